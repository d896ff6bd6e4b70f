"""The first phase of `segment_sumsq` of buffers in pieces, as multi-tensor Triton kernels, for capability >= 8.0.

Upstream has deprecated Triton in Pallas: this file goes when jax drops `jax.experimental.pallas.triton`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import compat
from pallas_kernels.elementwise_triton import PARAMS, WHOLE
from pallas_kernels.launch import launch
from pallas_kernels.pieces import join
from pallas_kernels.pieces_triton import Run, load, runs
from pallas_kernels.segment_sumsq_xla import Call, add_nodes, row_sums_xla, scaled_squares
from pallas_kernels.tiling import BLOCK, segments


def block_sums_triton(call: Call, scalars, arrays):
    """big, mid, small of each term, (3 * terms, blocks): each piece in blocks of its own, piece after piece.

    An absent piece counts as zeros. Of `call`, `row` and `valid` describe the rows of the joined buffers.
    """

    def definition(scalars, arrays):
        # The rows of each block, added: blocks begin where pieces do, not where the buffer's blocks would.
        sums = row_sums_xla(call, scalars, tuple(map(join, arrays)))
        return add_nodes(sums, arrays[0].segments.blocks)

    return launch(functools.partial(_block_sums, call), definition, scalars, arrays, interpret=call.interpret)


def _block_sums(call, scalars, arrays):
    like, kinds = arrays[0], [x.dtype for x in arrays]
    first = segments(like.segments.sizes, BLOCK).starts
    blocks, kernels = int(first[-1]), {}
    sums: Any = None
    for run in runs(like, range(len(like.shapes))):
        pieces = [[None if x.arrays[j] is None else x.arrays[j].reshape(-1) for j in run.members] for x in arrays]
        # Traced and lowered once for all runs of a kind.
        kernel = kernels.setdefault(
            tuple(run.sizes), jax.jit(functools.partial(_block_sums_kernel, call, run, kinds, blocks))
        )
        sums = kernel(scalars, run.table(first[run.members], BLOCK), pieces, sums)
    return sums.reshape(3 * call.terms, blocks)


def _block_sums_kernel(call, run: Run, kinds, blocks: int, scalars, table, pieces, sums):
    """Puts the sums of the run's members in their places of `sums` (flat); None: of a new array.

    Args:
        kinds, pieces: of each of the buffers, the dtype and the arrays, None where one is absent.
        blocks: of all members of all runs.
    """
    present = [[x is not None for x in some] for some in pieces]
    operands = [scalars, table, *(x for some in pieces for x in some if x is not None)]
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
                jnp.zeros((BLOCK,), kind) if some[k] is None else load(some[k], here.indices, here.inside, kind)
                for kind, some in zip(kinds, refs, strict=True)
            ]

        loaded = run.visit(here.piece, leaf)
        s = tuple(scalars_ref[i] for i in range(scalars.size))
        for i, x in enumerate(scaled_squares(call.counted(s, loaded, here.inside))):
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
