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
from fusedopt.typing import PyTree


def has_nan(tree: PyTree) -> jax.Array:
    """Whether any floating point leaf of a tree holds a NaN or an infinity.

    Args:
      tree: a pytree of arrays, FlatParams too; None, integers and float0 are passed over.

    Returns:
      bool, 0-d.
    """
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(tree) if _is_float(x)]
    alike: dict[Any, list[jax.Array]] = {}
    for x in leaves:
        alike.setdefault(slot_dtype(x.dtype), []).append(x)
    return any_nan([zero_or_nan(arrays, dtype=dtype) for dtype, arrays in alike.items()])


def _is_float(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return isinstance(x, float) if dtype is None else jnp.issubdtype(dtype, jnp.floating)


def zero_or_nan(
    arrays: Sequence[jax.Array],
    unscale: jax.Array | None = None,
    *,
    squared: bool = False,
    dtype: Any,
    backend: pallas_kernels.Backend | None = None,
) -> jax.Array:
    """1-D, all 0 if every ``x * unscale`` (squared: its square) is finite in `dtype`, else with NaN in it. One read.

    Squared, float32 gradients above 1.8446743e19 count as infinite.
    """
    scalars = jnp.ones((1,), dtype) if unscale is None else unscale.astype(dtype).reshape(1)

    def looked_at(s, x):
        if unscale is not None:
            x = x * s[0]
        return x * x if squared else x

    return pallas_kernels.zero_or_nan(looked_at, scalars, arrays, backend=backend, name="fusedopt_has_nan")


def any_nan(zeros: Sequence[jax.Array]) -> jax.Array:
    """Whether any number of the `zero_or_nan` results is not zero."""
    zeros = [x.astype(jnp.float32) for x in zeros if x.size]
    if not zeros:
        return jnp.zeros((), jnp.bool_)
    return jnp.logical_not(jnp.isfinite(jnp.sum(jnp.concatenate(zeros))))
