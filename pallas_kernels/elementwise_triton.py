"""`elementwise` as a Triton kernel, for compute capability >= 8.0.

Upstream has deprecated Triton in Pallas: this file goes when jax drops `jax.experimental.pallas.triton`.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import compat
from pallas_kernels.elementwise_xla import Call, elementwise_xla
from pallas_kernels.launch import launch
from pallas_kernels.tiling import BLOCK

compat.ignore_triton_deprecation()

# Four elements a thread: with eight, Triton exchanges bf16 blocks through shared memory to store them.
PARAMS = plt.CompilerParams(num_warps=BLOCK // 128, num_stages=1)

WHOLE = pl.BlockSpec(memory_space=pl.ANY)


def elementwise_triton(call: Call, scalars, updated, read, row_scalars):
    kernel, definition = (functools.partial(f, call) for f in (_kernel, elementwise_xla))
    return launch(kernel, definition, scalars, updated, read, row_scalars, interpret=call.interpret)


def _kernel(call: Call, scalars, updated, read, row_scalars):
    shape, size = (updated or read)[0].shape, (updated or read)[0].size
    whole, tail = divmod(size, BLOCK)
    n_rates, n_updated, n_in = len(row_scalars), len(updated), len(updated) + len(read)

    def body(scalars_ref, *refs):
        rate_refs, in_refs, out_refs = refs[:n_rates], refs[n_rates : n_rates + n_in], refs[n_rates + n_in :]
        block = pl.program_id(0)  # outside of pl.when, where the interpreter cannot lower it
        offset = block * BLOCK

        def update(mask):
            here = pl.ds(offset, BLOCK)
            blocks = [plt.load(ref.at[here], mask=mask, other=None if mask is None else 0) for ref in in_refs]
            s = call.past_exit(tuple(scalars_ref[i] for i in range(scalars.size)))
            if rate_refs:
                row = (offset + jnp.arange(BLOCK, dtype=jnp.int32)) // call.row
                s += tuple(plt.load(ref.at[row], mask=mask, other=None if mask is None else 0) for ref in rate_refs)
            out = call.outputs(s, blocks[:n_updated], blocks[n_updated:])
            for ref, y in zip(out_refs, out, strict=True):
                plt.store(ref.at[here], y, mask=mask)

        def inside():
            return offset + jnp.arange(BLOCK, dtype=jnp.int32) < size

        def clear():
            for ref in out_refs[n_updated:]:
                plt.store(ref.at[pl.ds(offset, BLOCK)], jnp.zeros((BLOCK,), ref.dtype), mask=inside())

        def run():
            # Only the last block carries a mask: masks of an odd size would make every access scalar.
            if whole:
                pl.when(block < whole)(lambda: update(None)) if tail else update(None)
            if tail:
                pl.when(block == whole)(lambda: update(inside())) if whole else update(inside())

        if not call.early_exit:
            return run()
        pl.when(scalars_ref[0] == 0)(run)
        if call.emit:
            pl.when(scalars_ref[0] != 0)(clear)

    operands = (scalars, *row_scalars, *(x.reshape(-1) for x in (*updated, *read)))
    dtypes = (*(x.dtype for x in updated), *call.emit)
    out = pl.pallas_call(
        body,
        out_shape=[compat.out_type((size,), dtype, *operands) for dtype in dtypes],
        grid=(pl.cdiv(size, BLOCK),),
        in_specs=[WHOLE] * len(operands),
        out_specs=[WHOLE] * len(dtypes),
        input_output_aliases={1 + n_rates + i: i for i in range(n_updated)},
        compiler_params=PARAMS,
        interpret=call.interpret,
        name=call.name,
    )(*operands)
    out = [y.reshape(shape) for y in out]
    return tuple(out[:n_updated]), tuple(out[n_updated:])
