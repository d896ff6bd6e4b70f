"""The sum of squares of many arrays taken together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Backend
from pallas_kernels.elementwise import check_scalars, runs_pieces
from pallas_kernels.pieces import pieces_of
from pallas_kernels.segment_sumsq import SumSq, segment_sumsq


def total_sumsq(
    fn: Callable[..., Sequence[jax.Array]],
    scalars: jax.Array,
    arrays: Sequence[Any],
    *,
    backend: Backend | None = None,
    name: str = "total_sumsq",
) -> SumSq:
    """`sum(fn(s, x)[i] ** 2)` over all elements of all arrays, whatever their magnitude; see `segment_sumsq`.

    Each array is read once. Triton kernels take dozens of arrays each; everywhere else each array is one reduction.

    Args:
        fn: `fn(s, x) -> tuple` of k elementwise results in the dtype of `scalars`.
        scalars: float32 or float64, (n,) with n <= 16.
        arrays: of any shapes and dtypes that a buffer may have.
        backend: "xla", "mosaic", "triton", or None for the best one.
        name: of the kernel.

    Returns:
        `SumSq` of (k, 1) arrays; of no arrays zeros, with k = 1. Their `norm` is that of all arrays.

    Raises:
        ValueError: the shape of `scalars`, or a `backend` that cannot run here.
        TypeError: dtypes that do not fit.
    """
    arrays, scalars = [x for x in map(jnp.asarray, arrays) if x.size], jnp.asarray(scalars)
    check_scalars(scalars)
    if not arrays:
        return SumSq(*(jnp.zeros((1, 1), scalars.dtype) for _ in range(3)))
    pieces = pieces_of(arrays, scalars.dtype)
    if runs_pieces(backend, pieces):
        sizes = [x.size for x in arrays]
        sums = segment_sumsq(fn, scalars, (pieces,), sizes, row=pieces.row, backend=backend, name=name)
        return SumSq(*(jnp.sum(x, axis=1, keepdims=True) for x in sums))
    each = [segment_sumsq(fn, scalars, (x,), (x.size,), backend=backend, name=name) for x in arrays]
    return SumSq(*(jnp.sum(jnp.concatenate(x, axis=1), axis=1, keepdims=True) for x in zip(*each, strict=True)))
