"""The definition of `segment_sumsq`'s first phase: sums of squares of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclasses.dataclass(frozen=True)
class Call:
    """The static half of a call, shared by all backends.

    Attributes:
        fn: the pure elementwise function `(s, *blocks) -> terms`, whose squares are summed.
        terms: how many arrays `fn` returns.
        row: elements of a row.
        valid: int32 (rows,), the elements of each row that count; None: every element of the array counts,
            and the last row may be short.
        name: of the kernel.
        interpret: run the kernel interpreted.
    """

    fn: Callable[..., Sequence[jax.Array]]
    terms: int
    row: int
    valid: np.ndarray | None
    name: str
    interpret: bool = False

    @property
    def ragged(self) -> bool:
        return self.valid is not None and bool((self.valid < self.row).any())


def scales(dtype) -> tuple[float, float]:
    """(down, up): powers of two between which some scaled sum of squares is exact, whatever the magnitude.

    `x * down` squares without overflow for every finite x, also 2**31 times added; `x * up` squares without
    underflow for every normal x. Scaling by a power of two does not round.
    """
    return (2.0**-600, 2.0**600) if np.dtype(dtype) == np.float64 else (2.0**-80, 2.0**80)


def scaled_squares(terms: Sequence[jax.Array]) -> list[jax.Array]:
    """big, mid, small of the first term, then of the second one, ...: what is summed."""
    out = []
    for x in terms:
        down, up = scales(x.dtype)
        out += [jnp.square(x * down), jnp.square(x), jnp.square(x * up)]
    return out


def row_sums_xla(call: Call, scalars, arrays) -> tuple[jax.Array, ...]:
    """big, mid, small of each term, each (rows,). `arrays` are 1-D and reach at least to the last row's end."""
    size = arrays[0].size
    if call.valid is not None:
        size = min(size, len(call.valid) * call.row)
    whole, rest = divmod(size, call.row)
    s = tuple(scalars[i] for i in range(scalars.size))
    parts = []
    if whole:
        blocks = [_head(x, whole * call.row).reshape(whole, call.row) for x in arrays]
        mask = None
        if call.ragged:
            column = lax.broadcasted_iota(jnp.int32, (whole, call.row), 1)
            mask = column < jnp.asarray(call.valid)[:, None]
        parts.append(_sum_rows(call, s, blocks, mask))
    if rest:
        parts.append(_sum_rows(call, s, [x[whole * call.row : size][None] for x in arrays], None))
    return tuple(jnp.concatenate(p) if len(p) > 1 else p[0] for p in zip(*parts, strict=True))


def _head(x: jax.Array, size: int) -> jax.Array:
    return x if x.size == size else x[:size]


def _sum_rows(call: Call, s, blocks, mask) -> tuple[jax.Array, ...]:
    with jax.named_scope(call.name):
        terms = [jnp.broadcast_to(x, blocks[0].shape) for x in call.fn(s, *blocks)]
        if mask is not None:
            # Behind fn, not before it: fn may make a NaN of a zero.
            terms = [jnp.where(mask, x, jnp.zeros((), x.dtype)) for x in terms]
        squares = scaled_squares(terms)
        # One reduce of all the sums reads each array once; one reduce a sum reads it once a sum, which is three
        # times slower on CPU.
        zeros = tuple(jnp.zeros((), x.dtype) for x in squares)
        return tuple(lax.reduce(tuple(squares), zeros, lambda a, b: tuple(map(lax.add, a, b)), (1,)))
