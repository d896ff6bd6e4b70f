"""`elementwise` as a Mosaic kernel, for compute capability >= 9.0 and jax >= 0.11.

One thread block of 128 threads for 1024 elements, from global memory to registers and back: enough bytes are in
flight without TMA or a persistent grid, which take more registers and more instructions for the same traffic.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.elementwise_xla import Call, elementwise_xla
from pallas_kernels.launch import launch
from pallas_kernels.tiling import BLOCK

# A thread touches only its own elements: no barrier is needed between loads and stores. Lane semantics compiles to
# the same instructions as the default, and several times faster.
PARAMS = plgpu.CompilerParams(unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane)

# Four consecutive float32 a thread: 16-byte loads.
LAYOUT = plgpu.Layout.WG_STRIDED((BLOCK,), vec_size=4)


def elementwise_mosaic(call: Call, scalars, updated, read, row_scalars):
    if (updated or read)[0].size < BLOCK:
        return elementwise_xla(call, scalars, updated, read, row_scalars)
    operands = (scalars, updated, read, row_scalars)
    kernel = _vmappable(call, jax.tree.map(lambda _: False, operands))
    return launch(kernel, functools.partial(elementwise_xla, call), *operands, interpret=call.interpret)


def _vmappable(call: Call, batched):
    """The kernel for operands of which `batched` ones have a leading batch axis; vmap adds or widens that axis."""

    @jax.custom_batching.custom_vmap
    def run(*operands):
        return _kernel(call, batched, *operands)

    @run.def_vmap
    def batch(axis_size, newly, *operands):
        inner = _batch_size(batched, operands, newly)
        # A buffer that is written needs one copy for each member of the batch, also where it came in only once.
        wide = jax.tree.map(lambda old, new: old or new, batched, tuple(newly))
        wide = (wide[0], tuple(True for _ in wide[1]), *wide[2:])

        def widen(x, old, new, wide):
            if not wide:
                return x
            x = x if new else jnp.broadcast_to(x, (axis_size, *x.shape))
            if inner is None:
                return x
            x = x if old else jnp.broadcast_to(x[:, None], (axis_size, inner, *x.shape[1:]))
            return x.reshape(axis_size * inner, *x.shape[2:])

        operands = jax.tree.map(widen, operands, batched, tuple(newly), wide)
        out = _vmappable(call, wide)(*operands)
        if inner is not None:
            out = jax.tree.map(lambda y: y.reshape(axis_size, inner, *y.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return run


def _batch_size(batched, operands, newly=None) -> int | None:
    """The size of the batch axis, behind that of a vmap in progress; None without one."""
    newly = jax.tree.map(lambda _: False, batched) if newly is None else tuple(newly)
    sizes = jax.tree.map(lambda x, old, new: x.shape[int(new)] if old else None, operands, batched, newly)
    return next(iter(jax.tree.leaves(sizes)), None)


def _kernel(call: Call, batched, scalars, updated, read, row_scalars):
    members = _batch_size(batched, (scalars, updated, read, row_scalars))
    lead = () if members is None else (members,)
    flags, (first, *_) = (*batched[1], *batched[2]), (*updated, *read)
    shape = first.shape[1:] if flags[0] else first.shape
    size = first.size // (first.shape[0] if flags[0] else 1)
    whole, n_read, n_updated, n_rates = size // BLOCK, len(read), len(updated), len(row_scalars)

    def flat(x, is_batched):
        return x.reshape(*x.shape[:1], size) if is_batched else x.reshape(size)

    def body(*refs):
        if members is not None:
            member = lax.axis_index("member")
            taken = (batched[0], *batched[3], *batched[2], *(True for _ in refs[1 + n_rates + n_read :]))
            refs = tuple(ref.at[member] if is_batched else ref for ref, is_batched in zip(refs, taken, strict=True))
        scalars_ref, rate_refs, refs = refs[0], refs[1 : 1 + n_rates], refs[1 + n_rates :]
        read_refs, updated_refs, emit_refs = refs[:n_read], refs[n_read:][:n_updated], refs[n_read + n_updated :]
        block = lax.axis_index("block")
        here = pl.ds(block * BLOCK, BLOCK)

        def load(ref):
            return plgpu.load(ref.at[here], layout=LAYOUT, optimized=False)

        def update():
            s = call.past_exit(tuple(scalars_ref[i] for i in range(scalars.shape[-1])))
            s += tuple(_rate(ref, block, call.row) for ref in rate_refs)
            out = call.outputs(s, [load(ref) for ref in updated_refs], [load(ref) for ref in read_refs])
            for ref, y in zip((*updated_refs, *emit_refs), out, strict=True):
                ref[here] = y

        def clear():
            for ref in emit_refs:
                ref[here] = plgpu.layout_cast(jnp.zeros((BLOCK,), ref.dtype), LAYOUT)

        if not call.early_exit:
            return update()
        pl.when(scalars_ref[0] == 0)(update)
        if call.emit:
            pl.when(scalars_ref[0] != 0)(clear)

    definition = functools.partial(elementwise_xla, call)
    if members is not None:
        axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, batched)
        definition = jax.vmap(definition, axes)
    read = tuple(map(flat, read, batched[2]))
    end = whole * BLOCK

    def run(refs):
        updated_refs, emit_refs = refs[:n_updated], refs[n_updated:]
        operands = (scalars, *row_scalars, *read)
        emitted = plgpu.kernel(
            body,
            out_type=[compat.out_type((*lead, size), dtype, *operands) for dtype in call.emit],
            grid=(*lead, whole),
            grid_names=("member", "block") if lead else ("block",),
            compiler_params=PARAMS,
            interpret=compat.mosaic_interpret() if call.interpret else None,
            kernel_name=call.name,
        )(*operands, *updated_refs)
        for ref, y in zip(emit_refs, emitted, strict=True):
            ref[...] = y
        if end == size:
            return
        # The tail is read from the refs, behind the kernel: reading the arrays would cost a copy of each.
        new, emitted = definition(
            scalars,
            tuple(ref[..., end:] for ref in updated_refs),
            tuple(x[..., end:] for x in read),
            tuple(r[..., end // call.row :] for r in row_scalars),
        )
        for ref, y in zip(refs, (*new, *emitted), strict=True):
            ref[..., end:] = y

    # run_state and not new_ref, which only jit and control flow may enclose, no custom_jvp. The zeros are
    # overwritten as a whole, so XLA drops them.
    buffers = (*map(flat, updated, batched[1]), *(jnp.zeros((*lead, size), dtype) for dtype in call.emit))
    out = [y.reshape(*lead, *shape) for y in pl.run_state(run)(buffers)]
    return tuple(out[:n_updated]), tuple(out[n_updated:])


def _rate(ref, block, row: int) -> jax.Array:
    """The block's row scalar; for rows shorter than a block, one value an element."""
    per_block = BLOCK // row
    rates = [ref[block * per_block + i] for i in range(per_block)]
    if per_block == 1:
        return rates[0]
    row_of = plgpu.broadcasted_iota(jnp.int32, (BLOCK,), 0, layout=LAYOUT) // row
    rate = rates[-1]
    for i, value in enumerate(rates[:-1]):
        rate = jnp.where(row_of == i, value, rate)
    return rate
