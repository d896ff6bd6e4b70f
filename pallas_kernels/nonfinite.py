"""Whether a number in many arrays is not finite: the door, and its definition in plain JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Backend, interpreting
from pallas_kernels.elementwise import check_float, check_scalars, runs_pieces
from pallas_kernels.pieces import pieces_of
from pallas_kernels.segment_sumsq_xla import Call


def zero_or_nan(
    fn: Callable[..., jax.Array],
    scalars: jax.Array,
    arrays: Sequence[Any],
    *,
    backend: Backend | None = None,
    name: str = "zero_or_nan",
) -> jax.Array:
    """Numbers that are all 0 if `fn(s, x)` is finite for every element x of every array; else some of them are NaN.

    Each array is read once. To be added up by the caller, with those of other calls, in one go.

    Triton kernels take dozens of arrays each, of any shapes; everywhere else each array is one reduction.

    Args:
        fn: `fn(s, x)`, elementwise; `s` and the blocks as in `elementwise`. Its result has the dtype of `scalars`.
        scalars: float32 or float64, (n,) with n <= 16.
        arrays: of any shapes and dtypes that a buffer may have.
        backend: "xla", "mosaic" (the same as "xla": there is no such kernel), "triton", or None for the best one.
        name: of the kernel.

    Returns:
        1-D, in the dtype of `scalars`.

    Raises:
        ValueError: the shape of `scalars`, or a `backend` that cannot run here.
        TypeError: dtypes that do not fit.
    """
    arrays, scalars = [x for x in map(jnp.asarray, arrays) if x.size], jnp.asarray(scalars)
    check_scalars(scalars)
    for i, x in enumerate(arrays):
        check_float(f"arrays[{i}]", x.dtype)
    if not arrays:
        return jnp.zeros((0,), scalars.dtype)

    def difference(s, x):
        # A sum, because XLA on CPU drops NaN in large max reductions and vectorises none of the boolean ones; of
        # x - x, because it makes a dot product out of a sum of x * 0, and for that a buffer of zeros as large as x.
        y = fn(s, x.astype(scalars.dtype))
        return (y - y,)

    pieces = pieces_of(arrays, scalars.dtype)
    if not runs_pieces(backend, pieces):
        s = tuple(scalars[i] for i in range(scalars.size))
        return jnp.stack([jnp.sum(difference(s, x)[0]) for x in arrays])
    # On first use: a CPU-only host needs no GPU dialect.
    from pallas_kernels.segment_sumsq_pieces_triton import block_sums_triton

    call = Call(difference, 1, pieces.row, pieces.segments.valid, name, interpreting())
    return block_sums_triton(call, scalars, (pieces,))[1]
