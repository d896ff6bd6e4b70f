"""A buffer in pieces: its segments are arrays of their own and stay where they are."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import compat
from pallas_kernels.tiling import BLOCK, Segments, segments


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays", "whole"],
    meta_fields=["shapes", "row", "size", "dtype"],
)
@dataclasses.dataclass(frozen=True)
class Pieces:
    """A 1-D buffer of which only the segments exist, each an array of its own.

    `elementwise` and `segment_sumsq` take it in place of a buffer. On a GPU the kernels read and write the arrays
    where they lie (multi-tensor); elsewhere they are joined to the buffer first and split behind.

    Attributes:
        arrays: one a segment, of any dtype that a buffer may have; None: a segment without a value, whose place in
            the other buffers of the call is left alone.
        shapes: of the segments, those of absent ones too.
        row: segment j starts at a multiple of `row`, right behind the padded end of segment j-1.
        size: elements of the buffer, padding counted.
        dtype: of the buffer: what the arrays are cast to where they are read.
        whole: the buffer, where somebody has joined it already.
    """

    arrays: tuple[Any, ...]
    shapes: tuple[tuple[int, ...], ...]
    row: int
    size: int
    dtype: np.dtype
    whole: Any = None

    @property
    def shape(self) -> tuple[int]:
        """That of the buffer."""
        return (self.size,)

    @property
    def ndim(self) -> int:
        return 1

    @property
    def segments(self) -> Segments:
        """Where the arrays lie in the buffer."""
        return segments(tuple(map(math.prod, self.shapes)), self.row)

    @property
    def absent(self) -> frozenset[int]:
        """The segments without a value."""
        return frozenset(j for j, x in enumerate(self.arrays) if x is None)

    @property
    def joined(self) -> jax.Array:
        """The buffer: (size,); zero between the segments and where one is absent."""
        if self.whole is not None:
            return self.whole
        parts, end = [], 0
        places = self.segments
        for x, size, next_start in zip(self.arrays, places.sizes, places.starts[1:] * self.row, strict=True):
            if size:
                parts.append(jnp.zeros((size,), self.dtype) if x is None else x.astype(self.dtype).reshape(-1))
            padding = int(next_start) - end - size
            if padding:
                parts.append(jnp.zeros((padding,), self.dtype))
            end = int(next_start)
        if end < self.size:
            parts.append(jnp.zeros((self.size - end,), self.dtype))
        if not parts:
            return jnp.zeros((0,), self.dtype)
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)

    def split(self, buffer: Any) -> list[Any]:
        """What lies at the segments' places in `buffer` ``(..., size)``: arrays ``(..., *shape)``."""
        parts = _split(buffer, self.segments)
        batch = buffer.shape[:-1]
        return [x.reshape(batch + shape) for x, shape in zip(parts, self.shapes, strict=True)]

    def replaced(self, arrays: Sequence[Any], dtype: Any = None) -> Pieces:
        """Other arrays in the same places."""
        return dataclasses.replace(self, arrays=tuple(arrays), dtype=np.dtype(dtype or self.dtype), whole=None)

    def with_segments_of(self, new: jax.Array, old: jax.Array, which: frozenset[int]) -> jax.Array:
        """The buffer `new` with the segments `which` as they are in `old`."""
        places = self.segments
        for j in sorted(which):
            start, size = int(places.starts[j]) * self.row, places.sizes[j]
            kept = lax.slice(old, (start,), (start + size,)).astype(new.dtype)
            new = lax.dynamic_update_slice(new, kept, (start,))
        return new


def _split(buffer: Any, places: Segments) -> list[jax.Array]:
    """The segments of a buffer (..., size), without their padding: (..., size of the segment) each."""
    if not (compat.BARRIERS_REACH_KERNELS and isinstance(buffer, jax.core.Tracer)):
        return _static_split(buffer, places)

    # The derivative is that of the static split, whose transpose is one concatenate.
    @jax.custom_jvp
    def split(buffer):
        static, dynamic = (functools.partial(f, places=places) for f in (_static_split, _dynamic_split))
        return lax.platform_dependent(buffer, cpu=dynamic, default=static)

    @split.defjvp
    def split_jvp(primals, tangents):
        return split(*primals), _static_split(*tangents, places)

    return split(buffer)


def _static_split(buffer: Any, places: Segments) -> list[jax.Array]:
    sizes = []
    for size, start, end in zip(places.sizes, places.starts[:-1], places.starts[1:], strict=True):
        sizes += [size, int(end - start) * places.row - size]
    sizes.append(buffer.shape[-1] - sum(sizes))
    # One split: its transpose is one concatenate, where slices would be as many pads and adds.
    return lax.split(buffer, sizes, axis=buffer.ndim - 1)[: 2 * len(places.sizes) : 2]


def _dynamic_split(buffer: Any, places: Segments) -> list[jax.Array]:
    """Slices whose offsets XLA cannot see: those of equal sizes are one kernel, compiled once.

    For CPUs, where a kernel takes longer to compile than the step takes to run. The buffer's barrier keeps whatever
    made it from being made again in every slice.
    """
    buffer = lax.optimization_barrier(buffer)
    zeros, batch = (np.int32(0),) * (buffer.ndim - 1), buffer.shape[:-1]
    parts = []
    for size, row in zip(places.sizes, places.starts[:-1], strict=True):
        start = lax.optimization_barrier(jnp.int32(int(row) * places.row))
        parts.append(lax.dynamic_slice(buffer, (*zeros, start), (*batch, size)))
    return parts


def pieces_of(arrays: Sequence[Any], dtype: Any) -> Pieces:
    """Arrays of any shapes as the pieces of a buffer that nobody has: each on whole blocks of its own."""
    shapes = tuple(x.shape for x in arrays)
    rows = segments(tuple(map(math.prod, shapes)), BLOCK).rows
    return Pieces(tuple(arrays), shapes, BLOCK, rows * BLOCK, np.dtype(dtype))


def absent(buffers: Sequence[Any]) -> frozenset[int]:
    """The segments that are absent from any of the buffers given in pieces."""
    return frozenset().union(*(x.absent for x in buffers if isinstance(x, Pieces)))


def arrays_of(x: Any) -> list[Any]:
    """The arrays that a buffer consists of: itself, or its pieces without the absent ones; joined already, the whole."""
    if not isinstance(x, Pieces):
        return [x]
    return [piece for piece in x.arrays if piece is not None] if x.whole is None else [x.whole]


def join(x: Any) -> Any:
    """A buffer from a buffer or its pieces."""
    return x.joined if isinstance(x, Pieces) else x


def on_joined(launcher: Any, call: Any, scalars: Any, updated: Any, read: Any, row_scalars: Any) -> Any:
    """`elementwise` of buffers in pieces by a launcher that wants them whole: joined before, split behind."""
    like = next(x for x in (*updated, *read) if isinstance(x, Pieces))
    missing = absent((*updated, *read))
    new, emitted = launcher(call, scalars, tuple(map(join, updated)), tuple(map(join, read)), row_scalars)
    results = []
    for old, x in zip(updated, new, strict=True):
        if isinstance(old, Pieces):
            arrays = old.split(x)
            kept = (o if j in missing else a.astype(o.dtype) for j, (a, o) in enumerate(zip(arrays, old.arrays)))
            results.append(old.replaced(kept))
        else:
            results.append(like.with_segments_of(x, old, missing))
    outs = []
    for x in emitted:
        arrays = like.split(x)
        outs.append(like.replaced((jnp.zeros_like(a) if j in missing else a for j, a in enumerate(arrays)), x.dtype))
    return tuple(results), tuple(outs)
