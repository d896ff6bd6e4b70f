"""What multi-tensor Triton kernels have in common: how a thread block finds its piece of a buffer in pieces.

Every piece is an operand of its own. A thread block looks up in a table which of them is its, and where in it. A binary
tree of branches then leads to that operand's load; the compiler merges its leaves into one load through a selected
pointer, so that a kernel takes as few registers and the same 16-byte accesses as one of a single buffer.

Upstream has deprecated Triton in Pallas: this file goes when jax drops `jax.experimental.pallas.triton`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import compat
from pallas_kernels.pieces import Pieces
from pallas_kernels.tiling import BLOCK

compat.ignore_triton_deprecation()

MAX_PIECES = 56
"""Pieces of one kernel. The time to compile a kernel grows faster than their number."""


_PIECE_BITS = 6  # MAX_PIECES < 2**6, and 2**25 blocks of a piece are more than its elements can be
_LEFT_BITS = 11  # BLOCK < 2**11


class Here(NamedTuple):
    """Where a thread block is: its piece, indices and mask in that, and first row and mask in the other buffers.

    A mask is None if it would always be true.
    """

    piece: Any
    indices: Any
    inside: Any
    place: Any
    rows: Any


class Run:
    """The pieces that one kernel takes, and where each of them begins among the kernel's thread blocks."""

    def __init__(self, members: Sequence[int], sizes: Sequence[int]):
        self.members, self.sizes = list(members), [sizes[j] for j in members]
        self.starts = np.cumsum([0, *(-(-n // BLOCK) for n in self.sizes)])

    @property
    def blocks(self) -> int:
        return int(self.starts[-1])

    def table(self, first: np.ndarray, row: int) -> Any:
        """What each thread block looks up, as an operand: int32, three columns one behind the other.

        Column 0: which piece (the low bits) and which block of it. Column 1: the row of the block's first element in
        the other buffers, where piece k begins on row `first[k]`. Column 2: the elements (the low bits) and the rows,
        padding included, from there to the piece's end, at most a block.
        """
        counts = np.diff(self.starts)
        k = np.repeat(np.arange(len(counts)), counts)
        local = np.arange(self.blocks) - self.starts[k]
        left = np.minimum(np.asarray(self.sizes)[k] - local * BLOCK, BLOCK)
        columns = [local << _PIECE_BITS | k, first[k] + local * (BLOCK // row), -(-left // row) << _LEFT_BITS | left]
        # The tail stands for nothing: XLA computes an arithmetic sequence by a kernel instead of storing it.
        return jnp.asarray(np.concatenate([*columns, [-1, -3, -1]]), jnp.int32)

    def look_up(self, table_ref: Any, block: Any, row: int) -> Here:
        """Where the block is. Few operations: Triton's passes take time in proportion to whatever depends on them."""
        which, place, ends = (table_ref[i * self.blocks + block] for i in range(3))
        indices = lax.shift_right_logical(which, np.int32(_PIECE_BITS)) * BLOCK + iota()
        whole = not any(n % BLOCK for n in self.sizes)
        left = lax.bitwise_and(ends, np.int32((1 << _LEFT_BITS) - 1))
        if not any(n % 4 for n in self.sizes):
            left = pl.multiple_of(left, 4)  # four neighbours share their fate: a thread loads them at once
        rows = lax.shift_right_logical(ends, np.int32(_LEFT_BITS)) * row
        return Here(
            lax.bitwise_and(which, np.int32((1 << _PIECE_BITS) - 1)),
            indices,
            None if whole else iota() < left,
            place,
            None if whole else iota() < rows,
        )

    def visit(self, k: Any, leaf: Callable[[int], Any]) -> Any:
        """`leaf(k)` for a k that the kernel computes. As little as possible belongs in it: it is compiled for each."""

        def between(low, high):
            if high - low == 1:
                return leaf(low)
            middle = (low + high) // 2
            return lax.cond(k < middle, lambda: between(low, middle), lambda: between(middle, high))

        return between(0, len(self.sizes))


def runs(like: Pieces, members: Sequence[int]) -> list[Run]:
    """Kernels of about equally many pieces. Sorted by size, so that equal kernels arise and are compiled once; those
    of odd sizes, which cost their kernel its 16-byte accesses, by themselves."""
    sizes = like.segments.sizes
    members = sorted((j for j in members if sizes[j]), key=lambda j: sizes[j])
    found = []
    for alike in ([j for j in members if not sizes[j] % 4], [j for j in members if sizes[j] % 4]):
        width = -(-len(alike) // max(-(-len(alike) // MAX_PIECES), 1))
        found += [Run(alike[i : i + width], sizes) for i in range(0, len(alike), max(width, 1))]
    return found


def iota():
    return jnp.arange(BLOCK, dtype=jnp.int32)


def load(ref, indices, mask, dtype=None):
    x = plt.load(ref.at[indices], mask=mask, other=None if mask is None else 0)
    return x if dtype is None else x.astype(dtype)
