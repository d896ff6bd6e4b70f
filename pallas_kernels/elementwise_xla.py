"""The definition of `elementwise`: what every other backend is compared to."""

from __future__ import annotations

import contextvars
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_BY_CAST = contextvars.ContextVar("by_cast", default=False)
"""Whether the function of a compiled kernel is being traced."""


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """`x` as `dtype` would hold it, in the dtype of `x`; for the functions that `elementwise` takes.

    XLA drops a cast there and back, so there it is an operation of its own, which kernel languages do not have.
    """
    if jnp.finfo(dtype).bits >= jnp.finfo(x.dtype).bits:
        return x
    if _BY_CAST.get():
        return x.astype(dtype).astype(x.dtype)
    info = jnp.finfo(dtype)
    normal = lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)
    if info.nexp == jnp.finfo(x.dtype).nexp:
        return normal
    # Below its normal numbers, which reduce_precision takes for zeros, float16 has multiples of a smallest one.
    tiny, unit = np.asarray(info.tiny, x.dtype), np.asarray(info.smallest_subnormal, x.dtype)
    multiple = lax.round(x * (1 / unit), lax.RoundingMethod.TO_NEAREST_EVEN) * unit
    return jnp.where(jnp.abs(x) < tiny, multiple, normal)


@dataclasses.dataclass(frozen=True)
class Call:
    """The static half of a call, shared by all backends.

    Attributes:
        fn: the pure elementwise function `(s, *blocks) -> arrays`.
        emit: dtypes of the new arrays.
        row: elements that share one row scalar.
        early_exit: scalars[0] is a flag that leaves everything as it is.
        name: of the kernel.
        interpret: run the kernel interpreted.
    """

    fn: Callable[..., Sequence[jax.Array]]
    emit: tuple[Any, ...]
    row: int
    early_exit: bool
    name: str
    interpret: bool = False

    def past_exit(self, s: tuple) -> tuple:
        """The scalars where a kernel has not left early: the flag is 0, and nothing is compiled for another value."""
        return (0.0, *s[1:]) if self.early_exit else s

    def outputs(
        self, s: tuple, updated: Sequence[jax.Array], read: Sequence[jax.Array], kernel: bool = True
    ) -> list[jax.Array]:
        """`fn` on one block, its results cast to the dtypes they are stored in."""
        dtypes = [*(x.dtype for x in updated), *self.emit]
        token = _BY_CAST.set(kernel and not self.interpret)
        try:
            out = tuple(self.fn(s, *updated, *read))
        finally:
            _BY_CAST.reset(token)
        if len(out) != len(dtypes):
            raise ValueError(f"`fn` must return {len(dtypes)} arrays (updated + emit), got {len(out)}")
        shape = updated[0].shape if updated else read[0].shape
        # A result that depends on no block (a constant) may come as a scalar.
        return [jnp.broadcast_to(jnp.asarray(y, dtype), shape) for y, dtype in zip(out, dtypes, strict=True)]


def elementwise_xla(call: Call, scalars, updated, read, row_scalars):
    """`fn` on whole arrays. They keep their shape: reshaping them here would break aliasing in XLA."""
    shape = (updated or read)[0].shape
    s = scalars if isinstance(scalars, tuple) else tuple(scalars[i] for i in range(scalars.size))
    s += tuple(jnp.broadcast_to(r[:, None], (r.size, call.row)).reshape(shape) for r in row_scalars)
    with jax.named_scope(call.name):
        out = call.outputs(s, updated, read, kernel=False)
    return tuple(out[: len(updated)]), tuple(out[len(updated) :])
