"""Sums of squares per segment of a buffer, safe against overflow and deterministic: the door, and phase two."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import tiling
from pallas_kernels.dispatch import Backend, explicit_spec, interpreting, resolve_backend
from pallas_kernels.elementwise import (
    REFUSED_PIECES,
    as_buffer,
    check_float,
    check_pieces,
    check_row,
    check_scalars,
    refused_tail,
)
from pallas_kernels.pieces import Pieces, join
from pallas_kernels.segment_sumsq_xla import Call, add_nodes, row_sums_xla, scales, sums_where_they_are


class SumSq(NamedTuple):
    """Sums of squares at three scales, each (k, S). Additive: shards of a segment are added field by field.

    Attributes:
        big: sum of ``(x * 2**-80)**2``; finite exactly if every x is (``2**-600`` in float64).
        mid: sum of ``x**2``; may overflow or underflow.
        small: sum of ``(x * 2**80)**2``; exact where mid underflows (``2**600`` in float64).
    """

    big: jax.Array
    mid: jax.Array
    small: jax.Array


def norm(sumsq: SumSq) -> jax.Array:
    """The Euclidean norms, (k, S): sqrt of the sum of squares, taken at the scale that has not over- or underflowed.

    NaN and inf among the summed values come through. Differentiable; the derivative at zero is zero.
    """
    down, up = scales(sumsq.mid.dtype)
    # Where mid is below the floor, what underflow took from it may matter; above it is below one rounding.
    floor = up ** (-7 / 8) if sumsq.mid.dtype == jnp.float32 else up**-1.5
    tiny, huge = sumsq.mid < floor, sumsq.mid == jnp.inf
    square = jnp.where(tiny, sumsq.small, jnp.where(huge, sumsq.big, sumsq.mid))
    unscale = jnp.where(tiny, down, jnp.where(huge, up, 1.0)).astype(square.dtype)
    zero = square == 0
    root = jnp.sqrt(jnp.where(zero, jnp.ones_like(square), square))
    return jnp.where(zero, jnp.zeros_like(square), root * unscale)


def segment_sumsq(
    fn: Callable[..., Sequence[jax.Array]],
    scalars: jax.Array,
    arrays: Sequence[jax.Array | Pieces],
    sizes: Sequence[int],
    *,
    row: int = tiling.ROW,
    backend: Backend | None = None,
    name: str = "segment_sumsq",
    parts: int = 1,
) -> SumSq:
    """Sums, per segment, the squares of what `fn` makes of the arrays: `sum(fn(s, *arrays)[i][segment j] ** 2)`.

    Each array is read once. Same inputs give the same bits; the rounding of a segment does not depend on its
    neighbours. Padding behind a segment and rows behind the last one may hold anything, NaN too.

    ```python
    sums = segment_sumsq(lambda s, w, g: (w, g), scalars, [w, g], sizes)
    w_norm, g_norm = norm(sums)  # each (len(sizes),)
    ```

    Args:
        fn: `fn(s, *blocks) -> tuple` of k elementwise results in the dtype of `scalars`; `s` and the blocks are
            as in `elementwise`.
        scalars: float32 or float64, (n,) with n <= 16. Its dtype is that of the sums.
        arrays: 1-D, of one shape, bf16, f16, f32 or f64, at least as long as the padded segments; or `Pieces`, of
            which absent ones count as zeros. For a single segment that fills the arrays exactly: any shape.
        sizes: elements of each segment. Segment j starts at a multiple of `row`, right behind the padded end
            of segment j-1; an empty segment takes no row.
        row: a power of two from 128 to 1024.
        backend: "xla", "mosaic", "triton", or None for the best one the device and arrays support.
        name: of the kernel.
        parts: how many arrays of this size make the whole of which these are one part: rows are rounded as in it.

    Returns:
        `SumSq` of (k, S) arrays; see `norm`.

    Raises:
        ValueError: shapes, sizes or `backend` that do not fit.
        TypeError: dtypes that do not fit.
    """
    buffers: tuple[Any, ...] = tuple(map(as_buffer, arrays))
    sizes, scalars = tuple(map(int, sizes)), jnp.asarray(scalars)
    pieces = any(isinstance(x, Pieces) for x in buffers)
    solo = _check(scalars, buffers, sizes, row) and not pieces
    refused: dict[Backend, str] = {}
    if pieces and backend is None:
        refused = REFUSED_PIECES
    elif solo and backend is None:
        refused = refused_tail(buffers[0].size)
    elif not solo and row != tiling.BLOCK:
        refused = {"mosaic": f"sums rows of {tiling.BLOCK} elements, got {row=}"}
    chosen = resolve_backend(backend, jax.tree.leaves((buffers, scalars)), refused=refused)
    if pieces and chosen != "triton":
        buffers, pieces = tuple(map(join, buffers)), False
    terms = _count_terms(fn, scalars, buffers)
    table = tiling.segments(sizes, row)
    if table.rows == 0:
        return SumSq(*(jnp.zeros((terms, len(sizes)), scalars.dtype) for _ in range(3)))
    call = Call(fn, terms, row, None if solo else table.valid, name, interpreting(), parts)
    if solo and any(explicit_spec(x) is not None for x in buffers):
        total = sums_where_they_are(call, scalars, buffers)
        return SumSq(*jnp.moveaxis(total.reshape(terms, 3, 1), 1, 0))
    if not pieces:  # only reads: raveling costs nothing here, unlike around an update in place
        buffers = tuple(x.reshape(-1) for x in buffers)
    sums = _launcher("pieces" if pieces else chosen)(call, scalars, buffers)
    if pieces:
        table = tiling.segments(sizes, tiling.BLOCK)
    total = _add_all(sums) if solo else add_rows(sums, table.tree)
    return SumSq(*jnp.moveaxis(total.reshape(terms, 3, len(sizes)), 1, 0))


def spread(values: jax.Array, sizes: Sequence[int], row: int, total: int) -> jax.Array:
    """A value per segment, looked up for each row: (total // row,), zero for rows behind the last segment.

    Args:
        values: (S,).
        sizes, row: as in `segment_sumsq`.
        total: elements of the buffer, a multiple of `row`.

    Raises:
        ValueError: `values` of another shape, or a `total` that the segments do not fit into.
    """
    table = tiling.segments(tuple(map(int, sizes)), row)
    if values.shape != (len(table.sizes),):
        raise ValueError(f"`values` has shape {values.shape}, expected {(len(table.sizes),)}")
    if total % row or total < table.rows * row:
        raise ValueError(f"`total` must be a multiple of {row} and at least {table.rows * row}, got {total}")
    owner = np.full(total // row, len(table.sizes), np.int32)
    owner[: table.rows] = table.owner
    return jnp.take(jnp.append(values, jnp.zeros((1,), values.dtype)), jnp.asarray(owner), axis=0)


@functools.cache
def _launcher(backend: str) -> Callable[..., jax.Array]:
    if backend == "mosaic":
        from pallas_kernels.segment_sumsq_mosaic import row_sums_mosaic as launcher
    elif backend == "triton":
        from pallas_kernels.segment_sumsq_triton import row_sums_triton as launcher
    elif backend == "pieces":
        from pallas_kernels.segment_sumsq_pieces_triton import block_sums_triton as launcher
    else:
        launcher = row_sums_xla
    return launcher


def add_rows(sums: jax.Array, tree: Sequence[np.ndarray]) -> jax.Array:
    """(n, rows) -> (n, S). Gathers and pairwise adds: no atomics, no order that the compiler could choose."""
    for table in tree:
        sums = add_nodes(sums, table)
    return sums


def _add_all(sums: jax.Array) -> jax.Array:
    """(n, rows) -> (n, 1), for one segment: no table needed."""
    while sums.shape[1] > 1:
        width = min(sums.shape[1], tiling.ROW)
        sums = jnp.pad(sums, ((0, 0), (0, -sums.shape[1] % width)))
        sums = sums.reshape(sums.shape[0], -1, width).sum(axis=2)
    return sums


def _count_terms(fn, scalars, arrays) -> int:
    s = tuple(jax.ShapeDtypeStruct((), scalars.dtype) for _ in range(scalars.size))
    out = jax.eval_shape(fn, s, *(jax.ShapeDtypeStruct((tiling.ROW,), x.dtype) for x in arrays))
    for i, x in enumerate(out):
        if x.dtype != scalars.dtype:
            raise TypeError(f"`fn` result {i} has dtype {x.dtype}, expected that of `scalars`, {scalars.dtype}")
    return len(out)


def _check(scalars, arrays, sizes, row) -> bool:
    """Whether the one segment fills the arrays, which may then have any shape."""
    if not arrays:
        raise ValueError("`arrays` is empty, expected at least one array")
    check_scalars(scalars)
    check_row(row)
    shape, size = arrays[0].shape, arrays[0].size
    for i, x in enumerate(arrays):
        check_float(f"arrays[{i}]", x.dtype)
        if x.shape != shape:
            raise ValueError(f"`arrays[{i}]` has shape {x.shape}, expected {shape}")
    check_pieces(arrays)
    if len({isinstance(x, Pieces) for x in arrays}) > 1:
        raise ValueError("`arrays` must be all in pieces, or none of them")
    if any(n < 0 for n in sizes):
        raise ValueError(f"`sizes` must not be negative, got {sizes}")
    if sizes == (size,):
        return True
    need = tiling.segments(sizes, row).rows * row
    if len(shape) != 1 or size < need:
        raise ValueError(
            f"`arrays` have shape {shape}, expected 1-D with at least {need} elements for {len(sizes)} segments"
        )
    return False
