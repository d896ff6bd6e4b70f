"""One elementwise pass over buffers: the door. Checks the call and picks the launcher."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import tiling
from pallas_kernels.dispatch import Backend, interpreting, resolve_backend
from pallas_kernels.elementwise_xla import Call, elementwise_xla
from pallas_kernels.pieces import Pieces, on_joined

FLOATS = tuple(np.dtype(t) for t in (jnp.bfloat16, np.float16, np.float32, np.float64))


def elementwise(
    fn: Callable[..., Sequence[jax.Array]],
    scalars: jax.Array | tuple[jax.Array, ...],
    updated: Sequence[jax.Array],
    read: Sequence[jax.Array] = (),
    *,
    emit: Sequence[Any] = (),
    row_scalars: Sequence[jax.Array] = (),
    row: int = tiling.ROW,
    early_exit: bool = False,
    backend: Backend | None = None,
    name: str = "elementwise",
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Computes `*new_updated, *emitted = fn(s, *updated, *read)`, reading and writing each buffer once.

    ```python
    def sgd(s, w, g):
        return (w - s[0] * g,)

    (w,), _ = elementwise(sgd, jnp.array([0.1]), [w], [g])
    ```

    `fn` is elementwise jnp code without side effects or captured arrays; it sees blocks of the buffers, not the
    buffers, in their storage dtype, and its results are cast to the dtype they are stored in.

    Args:
        fn: `fn(s, *blocks)` returns len(updated) + len(emit) arrays; the blocks are those of `updated`, then
            of `read`. `s` is a tuple: one value per element of `scalars`, then one per array of `row_scalars`.
            Each is 0-d or has the block's shape.
        scalars: float32 or float64, (k,) with k <= 16; or a tuple of k 0-d arrays of one dtype, which XLA takes as they
            are: for many calls that share them.
        updated: buffers of one shape, any rank, bf16, f16, f32 or f64, dtypes may differ. Replaced: in place where
            the caller donates them; otherwise the caller's arrays stay as they are. Some may be `Pieces`.
        read: buffers of the same shape, or `Pieces`, only read.
        emit: dtypes of new buffers of that shape; `Pieces` if any of the others are.
        row_scalars: arrays (size // row,): one value for every `row` consecutive elements. The buffers must then
            be 1-D, their size a multiple of `row`.
        row: a power of two from 128 to 1024.
        early_exit: scalars[0] is a flag. If it is nonzero, kernels leave `updated` bit for bit as it is and
            emit zeros, without reading a buffer; elsewhere `fn` itself must compute the same. In kernels, which get to `fn`
            only past the flag, `s[0]` is the Python number 0.0.
        backend: "xla", "mosaic", "triton", or None for the best one the device and arrays support.
        name: of the kernel, in lowered text and profiles.

    Returns:
        (new_updated, emitted), two tuples.

    Raises:
        ValueError: shapes, counts or `backend` that do not fit.
        TypeError: dtypes that do not fit.
    """
    updated, read, row_scalars = (tuple(map(as_buffer, xs)) for xs in (updated, read, row_scalars))
    scalars = tuple(map(jnp.asarray, scalars)) if isinstance(scalars, tuple) else jnp.asarray(scalars)
    emit = tuple(np.dtype(dtype) for dtype in emit)
    buffers = _check(scalars, updated, read, emit, row_scalars, row)
    shape = buffers[0].shape
    pieces = any(isinstance(x, Pieces) for x in buffers)
    refused = {}
    if backend is None:
        refused = REFUSED_PIECES if pieces else refused_tail(buffers[0].size)
    chosen = resolve_backend(backend, jax.tree.leaves((buffers, scalars, row_scalars)), refused=refused)
    if not pieces and buffers[0].size == 0:
        return updated, tuple(jnp.zeros(shape, dtype) for dtype in emit)
    if chosen != "xla" and isinstance(scalars, tuple):
        scalars = jnp.stack(scalars)
    call = Call(fn, emit, row, early_exit, name, interpreting())
    launcher = _launcher(chosen)
    if pieces:
        launcher = _launcher("pieces") if chosen == "triton" else functools.partial(on_joined, launcher)
    return launcher(call, scalars, updated, read, row_scalars)


@functools.cache
def _launcher(backend: str) -> Callable[..., Any]:
    # Imported on first use: a CPU-only host never loads a GPU dialect.
    if backend == "mosaic":
        from pallas_kernels.elementwise_mosaic import elementwise_mosaic as launcher
    elif backend == "triton":
        from pallas_kernels.elementwise_triton import elementwise_triton as launcher
    elif backend == "pieces":
        from pallas_kernels.elementwise_pieces_triton import elementwise_pieces_triton as launcher
    else:
        launcher = elementwise_xla
    return launcher


def as_buffer(x: Any) -> Any:
    return x if isinstance(x, Pieces) else jnp.asarray(x)


def _check(scalars, updated, read, emit, row_scalars, row) -> tuple[jax.Array, ...]:
    buffers = (*updated, *read)
    if not buffers:
        raise ValueError("`updated` and `read` are both empty, expected at least one array")
    check_scalars(scalars)
    check_row(row)
    for argument, arrays in (("updated", updated), ("read", read)):
        for i, x in enumerate(arrays):
            check_float(f"{argument}[{i}]", x.dtype)
            if x.shape != buffers[0].shape:
                raise ValueError(f"`{argument}[{i}]` has shape {x.shape}, expected {buffers[0].shape}")
    check_pieces(buffers)
    for i, dtype in enumerate(emit):
        check_float(f"emit[{i}]", dtype)
    if row_scalars:
        size = buffers[0].size
        if buffers[0].ndim != 1 or size % row:
            raise ValueError(
                f"`row_scalars` need 1-D buffers of a multiple of {row=} elements, got shape {buffers[0].shape}"
            )
        for i, x in enumerate(row_scalars):
            check_float(f"row_scalars[{i}]", x.dtype)
            if x.shape != (size // row,):
                raise ValueError(f"`row_scalars[{i}]` has shape {x.shape}, expected {(size // row,)}")
    return buffers


def check_pieces(buffers: Sequence[Any]) -> None:
    pieces = [x for x in buffers if isinstance(x, Pieces)]
    for x in pieces:
        if (x.shapes, x.row) != (pieces[0].shapes, pieces[0].row):
            raise ValueError("buffers in pieces: expected the same shapes and rows in all of a call")
        for j, (piece, shape) in enumerate(zip(x.arrays, x.shapes, strict=True)):
            if piece is not None and piece.shape != shape:
                raise ValueError(f"piece {j} of a buffer has shape {piece.shape}, expected {shape}")


REFUSED_PIECES: dict[Backend, str] = {"mosaic": "has no masked loads, which arrays of any size need where they lie"}


def runs_pieces(backend: Backend | None, arrays: Any) -> bool:
    """Whether `backend` has kernels that take these arrays as pieces, where they are; otherwise it joins them."""
    refused = REFUSED_PIECES if backend is None else {}
    return resolve_backend(backend, jax.tree.leaves(arrays), refused=refused) == "triton"


def refused_tail(size: int) -> dict[Backend, str]:
    """Who should not be chosen for `size` elements: Mosaic leaves a tail to XLA, some small kernels for each buffer."""
    if size % tiling.BLOCK == 0:
        return {}
    return {"mosaic": f"has no masked loads, and {size} elements are no multiple of {tiling.BLOCK}"}


def check_scalars(scalars: jax.Array | tuple[jax.Array, ...]) -> None:
    if isinstance(scalars, tuple):
        if len(scalars) > tiling.MAX_SCALARS or any(x.ndim for x in scalars):
            raise ValueError(
                f"`scalars` have shapes {[x.shape for x in scalars]}, expected up to {tiling.MAX_SCALARS} of ()"
            )
        if len({x.dtype for x in scalars}) > 1 or any(x.dtype not in FLOATS[2:] for x in scalars):
            raise TypeError(
                f"`scalars` have dtypes {[str(x.dtype) for x in scalars]}, expected all float32 or all float64"
            )
        return
    if scalars.ndim != 1 or scalars.size > tiling.MAX_SCALARS:
        raise ValueError(f"`scalars` has shape {scalars.shape}, expected (k,) with k <= {tiling.MAX_SCALARS}")
    if scalars.dtype not in FLOATS[2:]:
        raise TypeError(f"`scalars` has dtype {scalars.dtype}, expected float32 or float64")


def check_row(row: int) -> None:
    if row not in (128, 256, 512, 1024):
        raise ValueError(f"`row` must be 128, 256, 512 or 1024, got {row}")


def check_float(argument: str, dtype: Any) -> None:
    if np.dtype(dtype) not in FLOATS:
        raise TypeError(f"`{argument}` has dtype {dtype}, expected one of {', '.join(map(str, FLOATS))}")
