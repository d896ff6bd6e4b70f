"""Static arithmetic of blocks, rows and segments. Plain Python and NumPy: nothing here is ever traced."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

BLOCK = 1024
"""Elements of one kernel block: 128 threads with two 16-byte loads per float32 buffer. Larger blocks use more
registers than they win in flight, smaller ones cost launches of thread blocks."""

ROW = 128
"""Alignment of a segment: the shortest run of elements that belongs to one segment only."""

MAX_SCALARS = 16
"""Scalars of one call: 64 bytes, half a cache line that every thread reads."""

MAX_ELEMENTS = 2**31 - 1
"""Kernels compute offsets in int32; a buffer beyond this takes the XLA definition."""

FAN_IN = 32
"""Partial sums added by one node of the reduction tree."""


@dataclasses.dataclass(frozen=True)
class Segments:
    """Where the segments of a flat buffer lie, in rows.

    Attributes:
        sizes: elements of each segment; segment j starts on a row, right behind the padded end of segment j-1.
        row: elements of a row.
    """

    sizes: tuple[int, ...]
    row: int = ROW

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """First row of each segment, and behind them the number of rows: int64 (S + 1,)."""
        rows = [-(-size // self.row) for size in self.sizes]
        return np.cumsum([0, *rows], dtype=np.int64)

    @property
    def rows(self) -> int:
        return int(self.starts[-1])

    @functools.cached_property
    def valid(self) -> np.ndarray:
        """Elements of each row that belong to its segment, the rest being padding: int32 (rows,)."""
        valid = np.full(self.rows, self.row, np.int32)
        for size, end in zip(self.sizes, self.starts[1:], strict=True):
            if size % self.row:
                valid[end - 1] = size % self.row
        return valid

    @functools.cached_property
    def owner(self) -> np.ndarray:
        """Segment of each row: int32 (rows,)."""
        return np.repeat(np.arange(len(self.sizes), dtype=np.int32), np.diff(self.starts))

    @functools.cached_property
    def tree(self) -> tuple[np.ndarray, ...]:
        """Gather tables that add the rows of each segment, one int32 (nodes, width) table a level.

        Entry (i, j) is the j-th term of node i, an index into the level below; the index one past its end means
        zero. Nodes never mix segments and pair their terms in segment order, so the rounding of a segment depends
        on its own rows alone. The last level has one node a segment.
        """
        starts, levels = self.starts, []
        while True:
            counts = np.diff(starts)
            nodes = -(-counts // FAN_IN)
            last = counts.max(initial=0) <= FAN_IN
            if last:
                nodes = np.ones_like(counts)
            width = 1 << (int(min(counts.max(initial=1), FAN_IN)) - 1).bit_length()
            levels.append(_terms(starts, nodes, FAN_IN, width))
            if last:
                return tuple(levels)
            starts = np.cumsum([0, *nodes])

    @functools.cached_property
    def blocks(self) -> np.ndarray:
        """The rows of each block, where every segment has blocks of its own: int32 (blocks, BLOCK // row).

        Like a table of `tree`: the index one past the last row means zero.
        """
        per_block = BLOCK // self.row
        return _terms(self.starts, -(-np.diff(self.starts) // per_block), per_block, per_block)


def _terms(starts: np.ndarray, nodes: np.ndarray, stride: int, width: int) -> np.ndarray:
    """Terms of each node, (nodes.sum(), width): a node starts `stride` terms behind its left neighbour of the same
    segment and takes up to `width` of them; terms of other segments are replaced by the index past the end."""
    ends = np.cumsum([0, *nodes])
    nth = np.arange(ends[-1]) - np.repeat(ends[:-1], nodes)
    table = (np.repeat(starts[:-1], nodes) + nth * stride)[:, None] + np.arange(width)
    return np.where(table < np.repeat(starts[1:], nodes)[:, None], table, starts[-1]).astype(np.int32)


@functools.lru_cache(maxsize=256)
def segments(sizes: tuple[int, ...], row: int) -> Segments:
    """The interned `Segments`, so that a retrace does not build its tables again."""
    return Segments(sizes, row)
