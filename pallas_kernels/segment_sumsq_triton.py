"""The first phase of `segment_sumsq` as a Triton kernel, for compute capability >= 8.0.

Upstream has deprecated Triton in Pallas: this file goes when jax drops `jax.experimental.pallas.triton`.
"""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import compat
from pallas_kernels.launch import launch
from pallas_kernels.segment_sumsq_xla import Call, row_sums_xla, scaled_squares
from pallas_kernels.tiling import BLOCK

compat.ignore_triton_deprecation()

PARAMS = plt.CompilerParams(num_warps=BLOCK // 128, num_stages=1)

WHOLE = pl.BlockSpec(memory_space=pl.ANY)


def row_sums_triton(call: Call, scalars, arrays):
    if call.valid is None:
        # One segment: longer rows, fewer partial sums.
        call = dataclasses.replace(call, row=BLOCK)
    kernel, definition = (functools.partial(f, call) for f in (_kernel, row_sums_xla))
    return launch(kernel, definition, scalars, arrays, interpret=call.interpret)


def _kernel(call: Call, scalars, arrays):
    size = call.size(arrays[0])
    rows, per_block = pl.cdiv(size, call.row), BLOCK // call.row
    whole, tail = divmod(size, BLOCK)

    def body(scalars_ref, *refs):
        *in_refs, out_ref = refs
        valid_ref = in_refs.pop() if call.ragged else None
        block = pl.program_id(0)  # outside of pl.when, where the interpreter cannot lower it
        first = block * per_block

        def add(mask, row_mask):
            other = None if mask is None else 0
            here = pl.ds(block * BLOCK, BLOCK)
            blocks = [plt.load(ref.at[here], mask=mask, other=other) for ref in in_refs]
            s = tuple(scalars_ref[i] for i in range(scalars.size))
            counted = mask
            if valid_ref is not None:
                index = jnp.arange(BLOCK, dtype=jnp.int32)
                row = first + index // call.row
                valid = plt.load(valid_ref.at[row], mask=mask, other=other)
                counted = index % call.row < valid
            for i, x in enumerate(scaled_squares(call.counted(s, blocks, counted))):
                sums = jnp.sum(x.reshape(per_block, call.row), axis=1)
                plt.store(out_ref.at[pl.ds(i * rows + first, per_block)], sums, mask=row_mask)

        def last():
            inside = block * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32) < size
            add(inside, first + jnp.arange(per_block, dtype=jnp.int32) < rows)

        if whole:
            pl.when(block < whole)(lambda: add(None, None)) if tail else add(None, None)
        if tail:
            pl.when(block == whole)(last) if whole else last()

    operands = (scalars, *arrays, *((jnp.asarray(call.valid),) if call.ragged else ()))
    sums = pl.pallas_call(
        body,
        out_shape=compat.out_type((3 * call.terms * rows,), scalars.dtype, scalars, *arrays),
        grid=(pl.cdiv(size, BLOCK),),
        in_specs=[WHOLE] * len(operands),
        out_specs=WHOLE,
        compiler_params=PARAMS,
        interpret=call.interpret,
        name=call.name,
    )(*operands)
    return sums.reshape(3 * call.terms, rows)
