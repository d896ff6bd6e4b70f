"""FlatParams: a model's parameters as a few buffers, and the ways between a tree and its buffers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

import pallas_kernels
from fusedopt import layout_builder, serialization
from fusedopt import paths as _paths
from fusedopt.grouping import place
from fusedopt.layout import Bucket, FlatLayout, Packing, Segment
from fusedopt.paths import show
from fusedopt.typing import PyTree
from pallas_kernels import Pieces
from pallas_kernels.dispatch import explicit_spec

if TYPE_CHECKING:
    from fusedopt.transformation import FusedTransformation


@jax.tree_util.register_pytree_with_keys_class
class FlatParams:
    """Parameters laid out in buckets; a pytree with one leaf a bucket.

    ```python
    flat = fusedopt.pack(params)
    loss, grads = jax.value_and_grad(lambda flat: loss_fn(flat.tree, batch))(flat)
    flat, state = tx.apply(grads, state, flat)
    ```

    Gradients with respect to it are FlatParams too. Elementwise code (`jax.tree.map`,
    `optax.apply_updates`, `optax.tree.norm`, clipping, EMA) works on it; optax code that means
    something by a leaf (per-leaf norms, masks by name) sees buckets instead and does not. What is
    mapped over them must map 0 to 0, because padding between the leaves must stay zero: noise and
    g/|g| belong on trees.

    flax.serialization stores the tree that they hold and restores it into any layout, a ValueError naming a leaf that does
    not fit. Orbax stores the buffers, under names that end in the layout's fingerprint, and refuses to restore them into
    another layout; pickle keeps the layout.

    Attributes:
      buckets: arrays, one for each of ``layout.buckets``. Padding is zero.
      rest: leaves that are carried along: integers, booleans, random keys.
      layout: the static `FlatLayout`.
    """

    __slots__ = ("__weakref__", "buckets", "layout", "rest")

    buckets: tuple[jax.Array, ...]
    rest: tuple[jax.Array, ...]
    layout: FlatLayout

    def __init__(self, buckets: Iterable[Any], rest: Iterable[Any], layout: FlatLayout):
        self.buckets, self.rest, self.layout = tuple(buckets), tuple(rest), layout
        serialization.register()

    def tree_flatten_with_keys(self):
        # Checkpoint libraries store buffers by these names. With the fingerprint of the layout in them, buffers of
        # another layout are refused even if their shapes fit.
        names = [f"{b.name}@{self.layout.fingerprint}" for b in self.layout.buckets]
        names += [f"other.{i}" for i in range(len(self.rest))]
        keys = map(jax.tree_util.DictKey, names)
        return tuple(zip(keys, (*self.buckets, *self.rest), strict=True)), self.layout

    def tree_flatten(self):
        return (*self.buckets, *self.rest), self.layout

    @classmethod
    def tree_unflatten(cls, layout: FlatLayout, children: Sequence[Any]) -> FlatParams:
        # No checks: transformations put sentinels, specs and shardings where arrays go.
        n = len(layout.buckets)
        new = object.__new__(cls)
        new.buckets, new.rest, new.layout = tuple(children[:n]), tuple(children[n:]), layout
        return new

    @property
    def tree(self) -> Any:
        """The parameters as the user's tree. Differentiable; leading batch axes are kept."""
        leaves: list[Any] = [None] * self.layout.num_leaves
        for bucket, buffer in zip(self.layout.buckets, self.buckets, strict=True):
            members = self.layout.segments_of(bucket)
            row = self.layout.align
            parts = [buffer] if bucket.solo else pieces_of(bucket, members, row).split(buffer)
            for segment, leaf in zip(members, parts, strict=True):
                leaves[segment.leaf] = leaf
        carried = iter(self.rest)
        for i in self.layout.others:
            leaves[i] = None if i in self.layout.absent else next(carried)
        return self.layout.treedef.unflatten(leaves)

    def __getitem__(self, key: Any) -> Any:
        """``flat.tree[key]``: a part of the tree by its top-level key; take ``.tree`` once for many."""
        return self.tree[key]

    __iter__ = None  # or Python would count through __getitem__

    def __contains__(self, key: object) -> bool:
        """Whether `key` is a top-level key of the tree (Flax asks this of its params)."""
        tree = self.layout.treedef.unflatten(range(self.layout.num_leaves))
        return isinstance(tree, Mapping) and key in tree

    def __repr__(self) -> str:
        return f"FlatParams({self.layout!r})"


def pack(params: PyTree, tx: FusedTransformation[Any] | None = None, *, packing: Packing | None = None) -> FlatParams:
    """Lays a tree of parameters out in buckets. Copies: donating the result keeps `params` alive.

    Args:
      params: a pytree of arrays (or Python and NumPy numbers). Floating point leaves go to
        buckets, others are carried along.
      tx: the fusedopt optimizer that will update them; needed if it has ``groups=``, masks or a
        ``packing=`` of its own.
      packing: which leaves share a bucket; by default that of `tx`, else ``Packing()``.

    Returns:
      FlatParams; works under `jax.jit`, `jax.vmap` and `jax.eval_shape`.

    Raises:
      TypeError: complex leaves, or leaves that are no arrays, named by path.
    """
    if isinstance(params, FlatParams):
        raise TypeError(
            "`params` is FlatParams already; to change its layout pack `params.tree`, or use fusedopt.repack"
        )
    if packing is not None and not isinstance(packing, Packing):
        raise TypeError(f"`packing`: expected a Packing, got {type(packing).__name__}")
    flat = _paths.flatten(params)
    optimizer = getattr(tx, "optimizer", None)
    if tx is not None and optimizer is None:
        raise TypeError(f"`tx`: expected an optimizer made by fusedopt, got {type(tx).__name__}")
    check_params = getattr(tx, "check_params", None)
    if check_params is not None:  # zero1: leaves that are sharded would be gathered
        check_params(params)
    if optimizer is None:
        layout = _default_layout(flat, packing or Packing())
    else:
        layout = optimizer.layout_of(flat, "params", packing=packing)
    leaves = flat.leaves
    buckets = [pack_whole(leaves, bucket, layout) for bucket in layout.buckets]
    rest = [jnp.array(leaves[i], copy=True) for i in layout.others if i not in layout.absent]
    return FlatParams(buckets, rest, layout)


def pack_whole(leaves: Sequence[Any], bucket: Bucket, layout: FlatLayout) -> jax.Array:
    """A bucket from the leaves of a tree, in memory of its own."""
    whole = pallas_kernels.join(gather(leaves, bucket, layout.segments_of(bucket), layout.align))
    # A leaf that fills its bucket would otherwise be the caller's own array.
    return jnp.array(whole, copy=True) if len(layout.sizes_of(bucket)) == 1 else whole


def _default_layout(flat: _paths.Flattened, packing: Packing) -> FlatLayout:
    leaves, names = layout_builder.leaf_descriptions(flat, "params"), flat.paths()
    return layout_builder.build(flat.treedef, names, leaves, place(names, leaves), (), packing)


def gather(leaves: Sequence[Any], bucket: Bucket, members: Sequence[Segment], row: int) -> Any:
    """A bucket from the leaves of a tree: the leaf itself if solo, else pieces that stay where they are.

    Absent leaves are None; a solo one counts as zeros. The pieces' dtype is the leaves' common one; if they differ
    (bfloat16 gradients beside float32 ones), float32 or wider.
    """
    arrays = [None if leaves[s.leaf] is None else jnp.asarray(leaves[s.leaf]) for s in members]
    if bucket.solo:
        return jnp.zeros(bucket.shape, bucket.dtype) if arrays[0] is None else arrays[0]
    arrays = [x if explicit_spec(x) is None else gathered(x) for x in arrays]  # or they could not be joined
    dtypes = {x.dtype for x in arrays if x is not None}
    dtype = next(iter(dtypes), bucket.dtype) if len(dtypes) < 2 else slot_dtype(bucket.dtype)
    return pieces_of(bucket, members, row).replaced(arrays, dtype)


def pieces_of(bucket: Bucket, members: Sequence[Segment], row: int) -> Pieces:
    """The places of a packed bucket's leaves, without the leaves."""
    return Pieces((), tuple(s.shape for s in members), row, bucket.size, bucket.dtype)


def slot_dtype(dtype: Any) -> Any:
    """Optimizer state is float32 for float32 and lower precision, float64 for float64."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def sharded_by(x: Any) -> Any:
    """The spec by which an array is sharded, None where every device has it whole.

    As far as the array or its type tells: of a tracer over an Auto mesh nothing does.
    """
    if isinstance(x, Tracer):
        return explicit_spec(x)
    if not isinstance(x, jax.Array) or x.sharding.is_fully_replicated:
        return None
    return getattr(x.sharding, "spec", x.sharding)


def gathered(buffer: Any) -> Any:
    """A buffer that every device has whole, so that it can be cut into leaves, whatever the mesh."""
    if sharded_by(buffer) is None:
        return buffer
    traced = isinstance(buffer, Tracer)
    sharding = jax.typeof(buffer).sharding if traced else buffer.sharding
    if not isinstance(sharding, NamedSharding):
        return buffer
    return (jax.reshard if traced else jax.device_put)(buffer, NamedSharding(sharding.mesh, PartitionSpec()))


def placed_like(leaf: Any, like: Any) -> Any:
    """A leaf cut out of a bucket, sharded as the type of the leaf `like` says, which went into it."""
    if explicit_spec(like) is None:
        return leaf
    sharding = jax.typeof(like).sharding
    return jax.reshard(leaf, sharding) if isinstance(leaf, Tracer) else jax.device_put(leaf, like.sharding)


def check_shapes(leaves: Sequence[Any], layout: FlatLayout, name: str) -> None:
    """Raises ValueError naming the first leaf whose shape is not the layout's."""
    for s in layout.segments:
        leaf = leaves[s.leaf]
        if leaf is not None and jnp.shape(leaf) != s.shape:
            raise ValueError(f"`{name}` leaf `{show(s.path)}`: got shape {jnp.shape(leaf)}, expected {s.shape}")
