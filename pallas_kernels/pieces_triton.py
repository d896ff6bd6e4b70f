"""`elementwise` and `segment_sumsq` of buffers in pieces as multi-tensor Triton kernels, for capability >= 8.0.

Every piece is an operand of its own. A thread block finds its piece by comparing its number with constants, a binary
tree of branches whose leaves the compiler merges into one load through a selected pointer: as many registers and the
same 16-byte accesses as a kernel of one buffer, and no table to wait for.

Upstream has deprecated Triton in Pallas: this file goes when jax drops `jax.experimental.pallas.triton`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import compat
from pallas_kernels import elementwise_xla as _elementwise
from pallas_kernels import segment_sumsq_xla as _sumsq
from pallas_kernels.elementwise_triton import PARAMS, WHOLE
from pallas_kernels.launch import launch
from pallas_kernels.pieces import Pieces, absent, join, on_joined
from pallas_kernels.segment_sumsq_xla import add_nodes
from pallas_kernels.tiling import BLOCK, ROW, segments

compat.ignore_triton_deprecation()

MAX_PIECES = 56
"""Pieces of one kernel. The time to compile a kernel grows faster than their number."""


_PIECE_BITS = 6  # MAX_PIECES < 2**6, and 2**25 blocks of a piece are more than its elements can be
_LEFT_BITS = 11  # BLOCK < 2**11


class _Here(NamedTuple):
    """Where a thread block is: its piece, indices and mask in that, and first row and mask in the other buffers.

    A mask is None if it would always be true.
    """

    piece: Any
    indices: Any
    inside: Any
    place: Any
    rows: Any


class _Run:
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

    def look_up(self, table_ref: Any, block: Any, row: int) -> _Here:
        """Where the block is. Few operations: Triton's passes take time in proportion to whatever depends on them."""
        which, place, ends = (table_ref[i * self.blocks + block] for i in range(3))
        indices = lax.shift_right_logical(which, _PIECE_BITS) * BLOCK + _iota()
        whole = not any(n % BLOCK for n in self.sizes)
        left = lax.bitwise_and(ends, (1 << _LEFT_BITS) - 1)
        if not any(n % 4 for n in self.sizes):
            left = pl.multiple_of(left, 4)  # four neighbours share their fate: a thread loads them at once
        rows = lax.shift_right_logical(ends, _LEFT_BITS) * row
        return _Here(
            lax.bitwise_and(which, (1 << _PIECE_BITS) - 1),
            indices,
            None if whole else _iota() < left,
            place,
            None if whole else _iota() < rows,
        )

    def visit(self, k: Any, leaf: Callable[[int], Any]) -> Any:
        """`leaf(k)` for a k that the kernel computes. As little as possible belongs in it: it is compiled for each."""

        def between(low, high):
            if high - low == 1:
                return leaf(low)
            middle = (low + high) // 2
            return lax.cond(k < middle, lambda: between(low, middle), lambda: between(middle, high))

        return between(0, len(self.sizes))


def _runs(like: Pieces, members: Sequence[int]) -> list[_Run]:
    """Kernels of about equally many pieces. Sorted by size, so that equal kernels arise and are compiled once; those
    of odd sizes, which cost their kernel its 16-byte accesses, by themselves."""
    sizes = like.segments.sizes
    members = sorted((j for j in members if sizes[j]), key=lambda j: sizes[j])
    runs = []
    for alike in ([j for j in members if not sizes[j] % 4], [j for j in members if sizes[j] % 4]):
        width = -(-len(alike) // max(-(-len(alike) // MAX_PIECES), 1))
        runs += [_Run(alike[i : i + width], sizes) for i in range(0, len(alike), max(width, 1))]
    return runs


def _iota():
    return jnp.arange(BLOCK, dtype=jnp.int32)


def _load(ref, indices, mask, dtype=None):
    x = plt.load(ref.at[indices], mask=mask, other=None if mask is None else 0)
    return x if dtype is None else x.astype(dtype)


def _flat(x: Any) -> Any:
    return x.reshape(-1)


def elementwise_pieces_triton(call: _elementwise.Call, scalars, updated, read, row_scalars):
    definition = functools.partial(on_joined, _elementwise.elementwise_xla, call)
    kernel = functools.partial(_elementwise_kernels, call)
    return launch(kernel, definition, scalars, updated, read, row_scalars, interpret=call.interpret)


def _elementwise_kernels(call, scalars, updated, read, row_scalars):
    like = next(x for x in (*updated, *read) if isinstance(x, Pieces))
    missing = absent((*updated, *read))
    updated = list(updated)
    emitted = [like.replaced(map(jnp.zeros, like.shapes, [dtype] * len(like.shapes)), dtype) for dtype in call.emit]
    for run in _runs(like, [j for j in range(len(like.shapes)) if j not in missing]):
        new, out = _elementwise_kernel(call, run, like, scalars, updated, read, row_scalars)
        for i, (old, x) in enumerate(zip(updated, new, strict=True)):
            updated[i] = _with(old, run.members, x) if isinstance(old, Pieces) else x
        emitted = [_with(old, run.members, x) for old, x in zip(emitted, out, strict=True)]
    return tuple(updated), tuple(emitted)


def _with(pieces: Pieces, members: Sequence[int], arrays: Sequence[Any]) -> Pieces:
    new = list(pieces.arrays)
    for j, x in zip(members, arrays, strict=True):
        new[j] = x.reshape(pieces.shapes[j])
    return pieces.replaced(new)


def _elementwise_kernel(call, run: _Run, like: Pieces, scalars, updated, read, row_scalars):
    """New arrays for `updated` and `emit`, of the run's members where those are pieces."""
    width, buffers, n_updated = len(run.members), (*updated, *read), len(updated)
    scattered = [isinstance(x, Pieces) for x in buffers]
    # In ROWs: int32 reaches to the end of any bucket, and the compiler sees the alignment.
    # In ROWs: int32 reaches to the end of any bucket, and the compiler sees alignment.
    table = run.table((like.segments.starts * (like.row // ROW))[run.members], ROW)
    operands = [scalars, table, *row_scalars]
    head = len(operands)
    where, aliases, out_types, outs = [], {}, [], []  # `where`: first operand of each buffer; `outs`: first output
    for i, x in enumerate(buffers):
        where.append(len(operands))
        arrays = [_flat(x.arrays[j]) for j in run.members] if scattered[i] else [x]
        if i < n_updated:
            outs.append(len(out_types))
            aliases |= {len(operands) + k: len(out_types) + k for k in range(len(arrays))}
            out_types += [(y.shape, y.dtype) for y in arrays]
        operands += arrays
    for dtype in call.emit:
        outs.append(len(out_types))
        out_types += [((n,), dtype) for n in run.sizes]

    def body(scalars_ref, table_ref, *refs):
        rate_refs, in_refs, out_refs = refs[: head - 2], refs[head - 2 : len(operands) - 2], refs[len(operands) - 2 :]
        in_refs = (None,) * head + in_refs
        block = pl.program_id(0)  # outside of every branch, where the interpreter cannot lower it

        def store(here, values):
            """Blocks to the piece that `here` says: (number of its first output, block) pairs."""

            def leaf(k):
                for first, y in values:
                    ref = out_refs[first + k]
                    plt.store(ref.at[here.indices], y.astype(ref.dtype), mask=here.inside)
                return ()

            run.visit(here.piece, leaf)

        def update():
            here = run.look_up(table_ref, block, ROW)

            def leaf(k):
                return [
                    _load(in_refs[first + k], here.indices, here.inside, x.dtype)
                    for x, first, is_pieces in zip(buffers, where, scattered, strict=True)
                    if is_pieces
                ]

            loaded = iter(run.visit(here.piece, leaf))
            place = here.place * ROW + _iota()
            blocks = [
                next(loaded) if is_pieces else _load(in_refs[first], place, here.rows)
                for first, is_pieces in zip(where, scattered, strict=True)
            ]
            s = tuple(scalars_ref[i] for i in range(scalars.size))
            s += tuple(ref[here.place // (call.row // ROW)] for ref in rate_refs)
            out = call.outputs(s, blocks[:n_updated], blocks[n_updated:])
            for first, y, is_pieces in zip(outs, out, stores_pieces, strict=True):
                if not is_pieces:
                    plt.store(out_refs[first].at[place], y, mask=here.rows)
            if any(stores_pieces):
                store(here, [(first, y) for first, y, is_pieces in zip(outs, out, stores_pieces, strict=True) if is_pieces])

        def clear():
            zeros = [(first, jnp.zeros((BLOCK,), dtype)) for first, dtype in zip(outs[n_updated:], call.emit, strict=True)]
            store(run.look_up(table_ref, block, ROW), zeros)

        if not call.early_exit:
            return update()
        pl.when(scalars_ref[0] == 0)(update)
        if call.emit:
            pl.when(scalars_ref[0] != 0)(clear)

    stores_pieces = [*scattered[:n_updated], *(True for _ in call.emit)]
    results = pl.pallas_call(
        body,
        out_shape=[compat.out_type(shape, dtype, *operands) for shape, dtype in out_types],
        grid=(run.blocks,),
        in_specs=[WHOLE] * len(operands),
        out_specs=[WHOLE] * len(out_types),
        input_output_aliases=aliases,
        compiler_params=PARAMS,
        interpret=call.interpret,
        name=call.name,
    )(*operands)
    taken = [results[first : first + width] if many else results[first] for first, many in zip(outs, stores_pieces)]
    return taken[:n_updated], taken[n_updated:]


def block_sums_triton(call: _sumsq.Call, scalars, arrays):
    """big, mid, small of each term, (3 * terms, blocks): each piece in blocks of its own, piece after piece.

    An absent piece counts as zeros. Of `call`, `row` and `valid` describe the rows of the joined buffers.
    """

    def definition(scalars, arrays):
        # The rows of each block, added: blocks begin where pieces do, not where the buffer's blocks would.
        sums = _sumsq.row_sums_xla(call, scalars, tuple(map(join, arrays)))
        return add_nodes(sums, arrays[0].segments.blocks)

    return launch(functools.partial(_block_sums, call), definition, scalars, arrays, interpret=call.interpret)


def _block_sums(call, scalars, arrays):
    like = arrays[0]
    first = segments(like.segments.sizes, BLOCK).starts
    sums = None
    for run in _runs(like, range(len(like.shapes))):
        sums = _block_sums_kernel(call, run, first, scalars, arrays, sums)
    return sums.reshape(3 * call.terms, int(first[-1]))


def _block_sums_kernel(call, run: _Run, first: np.ndarray, scalars, arrays, sums):
    """Puts the sums of the run's members in their places of `sums` (flat); None: of a new array."""
    table, blocks = run.table(first[run.members], BLOCK), int(first[-1])
    present = [[x.arrays[j] is not None for j in run.members] for x in arrays]
    pieces = [[_flat(x.arrays[j]) for j in run.members if x.arrays[j] is not None] for x in arrays]
    operands = [scalars, table, *(x for some in pieces for x in some)]
    aliases = {}
    if sums is not None:
        aliases = {len(operands): 0}
        operands.append(sums)

    def body(scalars_ref, table_ref, *refs):
        refs, out_ref = iter(refs), refs[-1]
        refs = [[next(refs) if here else None for here in some] for some in present]
        block = pl.program_id(0)
        here = run.look_up(table_ref, block, BLOCK)

        def leaf(k):
            return [
                jnp.zeros((BLOCK,), x.dtype) if some[k] is None else _load(some[k], here.indices, here.inside, x.dtype)
                for x, some in zip(arrays, refs, strict=True)
            ]

        loaded = run.visit(here.piece, leaf)
        s = tuple(scalars_ref[i] for i in range(scalars.size))
        for i, x in enumerate(_sumsq.scaled_squares(call.counted(s, loaded, here.inside))):
            out_ref[i * blocks + here.place] = jnp.sum(x)

    return pl.pallas_call(
        body,
        out_shape=compat.out_type((3 * call.terms * blocks,), scalars.dtype, *operands),
        grid=(run.blocks,),
        in_specs=[WHOLE] * len(operands),
        out_specs=WHOLE,
        input_output_aliases=aliases,
        compiler_params=PARAMS,
        interpret=call.interpret,
        name=call.name,
    )(*operands)
