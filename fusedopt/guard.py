"""Unusable gradients, seen before anything is written.

A bad step must leave parameters, slots and counters bit for bit as they were, without a host
transfer. On XLA `where(bad, old, new)` around every buffer costs copies and `cond` costs them
on some versions; instead the scalars of the step become neutral (decays 1, complements and
rates 0) and the gradient -0.0, for which every slot's formula is the identity. Kernels leave early.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from fusedopt.packing import slot_dtype


def has_nan(tree: Any) -> jax.Array:
    """Whether any floating point leaf of a tree holds a NaN or an infinity.

    Args:
      tree: a pytree of arrays, FlatParams too; None, integers and float0 are passed over.

    Returns:
      bool, 0-d.
    """
    zeros = [zero_or_nan(jnp.asarray(x)) for x in jax.tree.leaves(tree) if _is_float(x)]
    return any_nan(zeros)


def _is_float(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return isinstance(x, float) if dtype is None else jnp.issubdtype(dtype, jnp.floating)


def zero_or_nan(
    g: Any,
    unscale: jax.Array | None = None,
    *,
    squared: bool = False,
    dtype: Any = None,
    backend: str | None = None,
) -> jax.Array:
    """0 if all of ``g * unscale`` (squared: its square) is finite in `dtype`, else NaN or infinite. 0-d, one read.

    `g` is an array, or pieces, which `backend` reads where they lie unless they are joined already.

    A sum, because XLA on CPU drops NaN in large max reductions and vectorises none of the
    boolean ones; of x - x, because it makes a dot product out of a sum of x * 0, and for that a
    buffer of zeros as large as x. Squared, float32 gradients above 1.8446743e19 count as infinite.
    """
    dtype = slot_dtype(g.dtype) if dtype is None else dtype
    scalars = jnp.ones((1,), dtype) if unscale is None else unscale.astype(dtype).reshape(1)

    def difference(s, g):
        x = g.astype(dtype)
        if unscale is not None:
            x = x * s[0]
        if squared:
            x = x * x
        return (x - x,)

    if isinstance(g, pallas_kernels.Pieces) and g.whole is None and len(g.absent) < len(g.arrays):
        sums = pallas_kernels.segment_sumsq(
            difference, scalars, (g,), g.segments.sizes, row=g.row, backend=backend, name="fusedopt_has_nan"
        )
        return jnp.sum(sums.mid)
    g = pallas_kernels.join(g)
    return jnp.sum(difference((scalars[0],), g)[0])


def any_nan(zeros: Sequence[jax.Array]) -> jax.Array:
    """Whether any of the `zero_or_nan` results is not finite."""
    total = jnp.zeros((), jnp.float32)
    for zero in zeros:
        total = total + zero.astype(jnp.float32)
    return jnp.logical_not(jnp.isfinite(total))
