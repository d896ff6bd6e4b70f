"""`elementwise` of buffers in pieces as multi-tensor Triton kernels, for compute capability >= 8.0.

Upstream has deprecated Triton in Pallas: this file goes when jax drops `jax.experimental.pallas.triton`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import compat
from pallas_kernels.elementwise_triton import PARAMS, WHOLE
from pallas_kernels.elementwise_xla import Call, elementwise_xla
from pallas_kernels.launch import launch
from pallas_kernels.pieces import Pieces, absent, on_joined
from pallas_kernels.pieces_triton import Run, iota, load, runs
from pallas_kernels.tiling import BLOCK, ROW


def elementwise_pieces_triton(call: Call, scalars, updated, read, row_scalars):
    definition = functools.partial(on_joined, elementwise_xla, call)
    kernel = functools.partial(_elementwise_kernels, call)
    return launch(kernel, definition, scalars, updated, read, row_scalars, interpret=call.interpret)


def _elementwise_kernels(call, scalars, updated, read, row_scalars):
    like = next(x for x in (*updated, *read) if isinstance(x, Pieces))
    missing = absent((*updated, *read))
    updated, kinds = list(updated), [x.dtype if isinstance(x, Pieces) else None for x in (*updated, *read)]
    emitted = [like.replaced(map(jnp.zeros, like.shapes, [dtype] * len(like.shapes)), dtype) for dtype in call.emit]
    kernels: dict[tuple, Any] = {}
    for run in runs(like, [j for j in range(len(like.shapes)) if j not in missing]):
        # A function of its own for each kind of run: JAX traces and lowers it once, however many runs are of the kind.
        kernel = kernels.setdefault(
            tuple(run.sizes), jax.jit(functools.partial(_elementwise_kernel, call, run, kinds, len(updated)))
        )
        # In ROWs: int32 reaches to the end of any bucket, and the compiler sees alignment.
        table = run.table((like.segments.starts * (like.row // ROW))[run.members], ROW)
        new, out = kernel(scalars, table, row_scalars, [_taken(x, run.members) for x in (*updated, *read)])
        for i, (old, x) in enumerate(zip(updated, new, strict=True)):
            updated[i] = _with(old, run.members, x) if isinstance(old, Pieces) else x[0]
        emitted = [_with(old, run.members, x) for old, x in zip(emitted, out, strict=True)]
    return tuple(updated), tuple(emitted)


def _taken(x: Any, members: Sequence[int]) -> list[Any]:
    """The arrays that a run takes of a buffer."""
    return [x.arrays[j].reshape(-1) for j in members] if isinstance(x, Pieces) else [x]


def _with(pieces: Pieces, members: Sequence[int], arrays: Sequence[Any]) -> Pieces:
    new = list(pieces.arrays)
    for j, x in zip(members, arrays, strict=True):
        new[j] = x.reshape(pieces.shapes[j])
    return pieces.replaced(new)


def _elementwise_kernel(call, run: Run, kinds, n_updated: int, scalars, table, row_scalars, buffers):
    """New arrays for the first `n_updated` buffers and for `emit`, a list each.

    Args:
        kinds: of each buffer, the dtype of its pieces, or None where it is whole.
        buffers: the arrays of each.
    """
    width, scattered = len(run.sizes), [kind is not None for kind in kinds]
    operands = [scalars, table, *row_scalars]
    head = len(operands)
    where, aliases, out_types, outs = [], {}, [], []  # `where`: first operand of each buffer; `outs`: first output
    for i, arrays in enumerate(buffers):
        where.append(len(operands))
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
                    load(in_refs[first + k], here.indices, here.inside, kind)
                    for kind, first in zip(kinds, where, strict=True)
                    if kind is not None
                ]

            loaded = iter(run.visit(here.piece, leaf))
            place = here.place * ROW + iota()
            blocks = [
                next(loaded) if is_pieces else load(in_refs[first], place, here.rows)
                for first, is_pieces in zip(where, scattered, strict=True)
            ]
            s = call.past_exit(tuple(scalars_ref[i] for i in range(scalars.size)))
            s += tuple(ref[here.place // (call.row // ROW)] for ref in rate_refs)
            out = call.outputs(s, blocks[:n_updated], blocks[n_updated:])
            for first, y, is_pieces in zip(outs, out, stores_pieces, strict=True):
                if not is_pieces:
                    plt.store(out_refs[first].at[place], y, mask=here.rows)
            if any(stores_pieces):
                store(
                    here,
                    [(first, y) for first, y, is_pieces in zip(outs, out, stores_pieces, strict=True) if is_pieces],
                )

        def clear():
            zeros = [
                (first, jnp.zeros((BLOCK,), dtype)) for first, dtype in zip(outs[n_updated:], call.emit, strict=True)
            ]
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
    taken = [results[first : first + (width if many else 1)] for first, many in zip(outs, stores_pieces, strict=True)]
    return taken[:n_updated], taken[n_updated:]
