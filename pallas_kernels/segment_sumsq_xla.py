"""The definition of `segment_sumsq`'s first phase: sums of squares of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.tiling import ROW


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
        parts: of how many such arrays these are one.
    """

    fn: Callable[..., Sequence[jax.Array]]
    terms: int
    row: int
    valid: np.ndarray | None
    name: str
    interpret: bool = False
    parts: int = 1

    @property
    def ragged(self) -> bool:
        """Whether some row ends in padding."""
        return self.valid is not None and bool((self.valid < self.row).any())

    def size(self, x: jax.Array) -> int:
        """Elements of x up to the end of the last row that counts."""
        return x.size if self.valid is None else len(self.valid) * self.row

    def counted(self, s: tuple, blocks: Sequence[jax.Array], mask: jax.Array | None) -> list[jax.Array]:
        """`fn` on one block, zero where the mask is False: behind fn, which may make a NaN of what is not there."""
        terms = [jnp.broadcast_to(x, blocks[0].shape) for x in self.fn(s, *blocks)]
        return terms if mask is None else [jnp.where(mask, x, jnp.zeros_like(x)) for x in terms]


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


def row_sums_xla(call: Call, scalars, arrays) -> jax.Array:
    """big, mid, small of each term, (3 * terms, rows). `arrays` are 1-D and reach to the last row's end."""
    size = call.size(arrays[0])
    s = tuple(scalars[i] for i in range(scalars.size))
    # Short runs first, then their sums: a CPU adds a run one element after the other, and errors grow with its length.
    whole, rest = divmod(size, ROW)
    parts = []
    if whole:
        # The slice is the identity where nothing follows the last row.
        blocks = [x[: whole * ROW].reshape(whole, ROW) for x in arrays]
        mask = None
        if call.ragged and call.valid is not None:
            valid = np.clip(call.valid[:, None] - np.arange(0, call.row, ROW), 0, ROW).reshape(whole, 1)
            mask = lax.broadcasted_iota(jnp.int32, (whole, ROW), 1) < jnp.asarray(valid, jnp.int32)
        parts.append(_sum_rows(call, s, blocks, mask))
    if rest:
        parts.append(_sum_rows(call, s, [x[None, whole * ROW :] for x in arrays], None))
    sums = jnp.concatenate(parts, axis=1)
    runs = call.row // ROW
    sums = jnp.pad(sums, ((0, 0), (0, -sums.shape[1] % runs)))
    return sums.reshape(sums.shape[0], -1, runs).sum(axis=2)


def sums_where_they_are(call: Call, scalars, arrays) -> jax.Array:
    """big, mid, small of each term of one segment in its own shape, (3 * terms, 1).

    For arrays whose type says that they are sharded: as one row they would have to be gathered. One axis after the other,
    so that no run is longer than an axis.
    """
    s = tuple(scalars[i] for i in range(scalars.size))
    with jax.named_scope(call.name):
        squares = scaled_squares(call.counted(s, arrays, None))
        while squares[0].ndim:
            squares = [x.sum(axis=-1) for x in squares]
    return jnp.stack(squares)[:, None]


LANES = 16
"""What a CPU adds up side by side: a row is 8 times as many elements."""

LANES_UP_TO = 2**21
"""Elements of a buffer up to which its lanes stay in the caches between the kernel that sums them and the next one."""


def _sum_rows(call: Call, s, blocks, mask) -> jax.Array:
    with jax.named_scope(call.name):
        squares = scaled_squares(call.counted(s, blocks, mask))
        # One reduce of all the sums reads each array once; a reduce for each takes three times as long on CPU.
        rows, width = squares[0].shape
        # Not for arrays without a table, large leaves each: the lanes of all of them wait for their turn together.
        lanes = width == ROW and call.valid is not None and call.parts * squares[0].size <= LANES_UP_TO
        view = (rows, width // LANES, LANES) if lanes else (rows, width)
        zeros = tuple(jnp.zeros((), x.dtype) for x in squares)
        sums = lax.reduce(tuple(x.reshape(view) for x in squares), zeros, lambda a, b: tuple(map(lax.add, a, b)), (1,))
        if not lanes:
            return jnp.stack(sums)
        # A CPU adds along the last axis one element after the other, along another one vector after the other: a quarter
        # of the time. What is left is small; behind the barrier, so that it is not fused into the reduce.
        halves = list(lax.optimization_barrier(sums))
        while halves[0].shape[1] > 1:
            half = halves[0].shape[1] // 2
            halves = [x[:, :half] + x[:, half:] for x in halves]
        return jnp.stack([x[:, 0] for x in halves])


def add_nodes(sums: jax.Array, table: np.ndarray) -> jax.Array:
    """(n, rows) -> (n, nodes): one level of a reduction tree, the index past the end meaning zero."""
    padded = jnp.pad(sums, ((0, 0), (0, 1)))
    nodes = [jnp.take(padded, jnp.asarray(column), axis=1) for column in table.T]
    while len(nodes) > 1:
        nodes = [a + b for a, b in zip(nodes[::2], nodes[1::2], strict=True)]
    return nodes[0]
