"""The first phase of `segment_sumsq` as a Mosaic kernel, for compute capability >= 9.0 and jax >= 0.11."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.launch import launch
from pallas_kernels.segment_sumsq_xla import Call, row_sums_xla, scaled_squares
from pallas_kernels.tiling import BLOCK

# Barriers stay automatic: a sum over the block goes through shared memory.
PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)

LAYOUT = plgpu.Layout.WG_STRIDED((BLOCK,), vec_size=4)


def row_sums_mosaic(call: Call, scalars, arrays):
    if call.valid is None:
        # One segment: its rows are ours to choose.
        call = dataclasses.replace(call, row=BLOCK)
    if call.size(arrays[0]) < BLOCK:
        return row_sums_xla(call, scalars, arrays)
    kernel, definition = (functools.partial(f, call) for f in (_kernel, row_sums_xla))
    return launch(kernel, definition, scalars, arrays, interpret=call.interpret)


def _kernel(call: Call, scalars, arrays):
    whole, tail = divmod(call.size(arrays[0]), BLOCK)

    def body(scalars_ref, *refs):
        *in_refs, out_ref = refs
        valid_ref = in_refs.pop() if call.ragged else None
        block = lax.axis_index("block")
        here = pl.ds(block * BLOCK, BLOCK)
        blocks = [plgpu.load(ref.at[here], layout=LAYOUT, optimized=False) for ref in in_refs]
        s = tuple(scalars_ref[i] for i in range(scalars.size))
        counted = None
        if valid_ref is not None:
            counted = plgpu.broadcasted_iota(jnp.int32, (BLOCK,), 0, layout=LAYOUT) < valid_ref[block]
        for i, x in enumerate(scaled_squares(call.counted(s, blocks, counted))):
            out_ref[i, block] = jnp.sum(x)

    operands = (scalars, *arrays, *((jnp.asarray(call.valid),) if call.ragged else ()))
    sums = plgpu.kernel(
        body,
        out_type=compat.out_type((3 * call.terms, whole), scalars.dtype, scalars, *arrays),
        grid=(whole,),
        grid_names=("block",),
        compiler_params=PARAMS,
        interpret=compat.mosaic_interpret() if call.interpret else None,
        kernel_name=call.name,
    )(*operands)
    if not tail:
        return sums
    # Only a lone segment has a tail: rows of many are blocks.
    rest = row_sums_xla(call, scalars, [x[whole * BLOCK :] for x in arrays])
    return jnp.concatenate([sums, rest], axis=1)
