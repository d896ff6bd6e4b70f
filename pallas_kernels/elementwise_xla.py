"""The definition of `elementwise`: what every other backend is compared to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


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

    def outputs(self, s: tuple, updated: Sequence[jax.Array], read: Sequence[jax.Array]) -> list[jax.Array]:
        """`fn` on one block, its results cast to the dtypes they are stored in."""
        dtypes = [*(x.dtype for x in updated), *self.emit]
        out = tuple(self.fn(s, *updated, *read))
        if len(out) != len(dtypes):
            raise ValueError(f"`fn` must return {len(dtypes)} arrays (updated + emit), got {len(out)}")
        shape = updated[0].shape if updated else read[0].shape
        # A result that depends on no block (a constant) may come as a scalar.
        return [jnp.broadcast_to(jnp.asarray(y, dtype), shape) for y, dtype in zip(out, dtypes, strict=True)]


def elementwise_xla(call: Call, scalars, updated, read, row_scalars):
    """`fn` on whole arrays. They keep their shape: raveling them here would break aliasing in XLA."""
    shape = (updated or read)[0].shape
    s = tuple(scalars[i] for i in range(scalars.size))
    if row_scalars:
        view = (shape[0] // call.row, call.row)
        s += tuple(jnp.broadcast_to(r[:, None], view) for r in row_scalars)
        updated, read = ([x.reshape(view) for x in xs] for xs in (updated, read))
    with jax.named_scope(call.name):
        out = [y.reshape(shape) for y in call.outputs(s, updated, read)]
    return tuple(out[: len(updated)]), tuple(out[len(updated) :])
