"""What a device that holds one shard of every buffer must do differently inside a step: norms, flags, places.

Everything here runs inside a shard_map. Sums are made of rows: a device sums the rows of its own shard, the row sums of all
devices are gathered, and every device adds them in the order in which one device would: the same bits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_kernels
from fusedopt.layout import FlatLayout, intern
from fusedopt.paths import show
from pallas_kernels.segment_sumsq import SumSq, add_rows
from pallas_kernels.tiling import BLOCK, segments


@dataclasses.dataclass(frozen=True)
class Shards:
    """Equal shards of every buffer along one axis of a mesh.

    Attributes:
      axis: name of the axis, manual where these methods are called.
      count: its size.
    """

    axis: str
    count: int

    def own(self, whole: jax.Array) -> jax.Array:
        """This device's shard (n // count,) of an array (n,) that every device holds."""
        size = whole.shape[0] // self.count
        return jax.lax.dynamic_slice_in_dim(whole, jax.lax.axis_index(self.axis) * size, size)

    def whole(self, own: jax.Array, axis: int = 0) -> jax.Array:
        """The shards of all devices side by side along `axis`: one all-gather."""
        return jax.lax.all_gather(own, self.axis, axis=axis, tiled=True, to="invarying")

    def mean_shard(self, local: jax.Array, dtype: Any) -> jax.Array:
        """This device's shard of the mean over devices of an array (n,), in `dtype`: one reduce-scatter."""
        total = jax.lax.psum_scatter(local.astype(dtype), self.axis, scatter_dimension=0, tiled=True)
        return total / jnp.full((), self.count, dtype)

    def checked(self) -> bool:
        """Whether the shard_map around has check_vma=True, so that types say what varies."""
        return self.axis in varying(jax.lax.axis_index(self.axis))

    def zeros(self, zeros: Sequence[jax.Array]) -> list[jax.Array]:
        """`zero_or_nan` results of this device's shards -> of all shards: one small all-reduce."""
        alike = [jnp.sum(x.astype(jnp.float32)) for x in zeros if x.size]
        return [jax.lax.psum(jnp.stack(alike), self.axis)] if alike else []

    def segment_sumsq(self, fn, scalars, arrays, sizes: Sequence[int], *, row: int, backend: Any, name: str) -> SumSq:
        """`pallas_kernels.segment_sumsq` of the whole buffers, from shards of them; `sizes` are of the whole.

        Padding counts, and must be zero where `fn` makes zero of zeros: it is, in every buffer of this library.
        """
        rows = arrays[0].size // row
        own = pallas_kernels.segment_sumsq(
            fn, scalars, arrays, [row] * rows, row=row, backend=backend, name=name, parts=self.count
        )
        sums = self.whole(jnp.concatenate(own), axis=1)
        table = segments(tuple(map(int, sizes)), row)
        total = add_rows(sums[:, : table.rows], table.tree)
        return SumSq(*jnp.split(total, 3))

    def total_sumsq(
        self, fn: Callable[..., Sequence[jax.Array]], scalars: jax.Array, arrays: Sequence[jax.Array], *, backend, name
    ) -> SumSq:
        """`pallas_kernels.total_sumsq` of the whole buffers, from shards of them: block sums, added as a tree."""
        each = [
            self.segment_sumsq(fn, scalars, (x,), (x.size * self.count,), row=BLOCK, backend=backend, name=name)
            for x in arrays
        ]
        if not each:
            return pallas_kernels.total_sumsq(fn, scalars, arrays, backend=backend, name=name)
        return SumSq(*(functools.reduce(jnp.add, parts) for parts in zip(*each, strict=True)))

    def layout_of(self, layout: FlatLayout) -> FlatLayout:
        """The layout with buckets of one shard each; its segments are those of the whole.

        Raises:
          ValueError: a bucket that has no equal shards of whole blocks, naming a leaf.
        """
        for b in layout.buckets:
            if b.solo or b.size % (self.count * BLOCK):
                leaf = show(layout.segments_of(b)[0].path)
                raise ValueError(
                    f"`params` bucket `{b.name}` with leaf `{leaf}`: got shape {b.shape}, expected one dimension, a "
                    f"multiple of {self.count} devices * {BLOCK} elements: pack for the devices, fusedopt.pack(params, tx) "
                    "with the `tx` of fusedopt.zero1"
                )
        buckets = tuple(dataclasses.replace(b, shape=(b.size // self.count,)) for b in layout.buckets)
        return intern(dataclasses.replace(layout, buckets=buckets))


def mapped(body: Callable[..., Any], mesh: Mesh, in_specs: tuple, out_specs: Any) -> Callable[..., Any]:
    """`jax.shard_map` under jit, of arguments that need not be placed yet."""
    # Not check_vma: kernels of Pallas take no arrays that vary, by their type, over an axis.
    run = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    if any(kind != AxisType.Explicit for kind in mesh.axis_types):
        return run

    def put(spec: P, tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.reshard(x, NamedSharding(mesh, spec)), tree)

    return lambda *args: run(*jax.tree.map(put, in_specs, args, is_leaf=lambda x: isinstance(x, P)))


def varying(x: Any) -> frozenset:
    """The axes of the shard_map around over which an array varies, as its type says; none under check_vma=False."""
    return frozenset(jax.typeof(x).mat.varying)
