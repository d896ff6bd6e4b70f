"""AdamW over one flat float32 buffer in kernels of other block sizes and numbers of warps than the library's.

Written out here, as small as can be: the library's own sizes are constants. Each kernel once with and once without the
look at the flag by which a step is skipped. All candidates update the same buffers in turn, which saves memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from benchmarks.gpu import correctness
from benchmarks.gpu.record import Run
from benchmarks.gpu.timing import Candidate, JaxSteps, compare

# Multiples of the largest block. The second is about ResNet-50; the first fits in the caches of a large GPU.
SIZES = (26 * 10**6 // 2048 * 2048, 208 * 10**6 // 2048 * 2048, 2**20)

BYTES = 28  # for each parameter: w, g, m and v are read, w, m and v written

# (elements a block, warps) with Triton; a Mosaic block has four warps.
TRITON = ((1024, 8), (512, 4), (1024, 4), (2048, 8))
MOSAIC = (1024, 512, 2048)

SCALARS = np.array([0, 1e-3, 0.01, 0.9, 0.999, 1e-8, 1, 1, *[0] * 8], np.float32)
"""The flag, then learning rate, weight decay, b1, b2, eps and the two bias corrections."""

Step = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, ...]]
"""(w, m, v, g, scalars) -> (w, m, v)"""


def adamw(s, w, m, v, g):
    """The formula, for blocks and for whole buffers."""
    _, lr, wd, b1, b2, eps, mu_scale, nu_scale = s
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g * g
    return w - lr * (m * mu_scale / (jnp.sqrt(v * nu_scale) + eps) + wd * w), m, v


def read(scalars):
    return [scalars[i] for i in range(8)]


def xla(w, m, v, g, scalars):
    return adamw(read(scalars), w, m, v, g)


def triton(block: int, warps: int, flag: bool, interpret: bool) -> Step:
    from jax.experimental.pallas import triton as plt

    def body(scalars, w, m, v, g, *out):
        def update():
            for ref, y in zip(out, adamw(read(scalars), w[...], m[...], v[...], g[...]), strict=True):
                ref[...] = y

        pl.when(scalars[0] == 0)(update) if flag else update()

    def step(w, m, v, g, scalars):
        part = pl.BlockSpec((block,), lambda i: (i,))
        return pl.pallas_call(
            body,
            out_shape=[jax.ShapeDtypeStruct(w.shape, w.dtype)] * 3,
            grid=(w.size // block,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY), *[part] * 4],
            out_specs=[part] * 3,
            input_output_aliases={1: 0, 2: 1, 3: 2},
            compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
            interpret=interpret,
        )(scalars, w, m, v, g)

    return lambda *operands: tuple(step(*operands))


def mosaic(block: int, flag: bool, interpret: bool) -> Step:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    # As in the library: no barriers, as no thread reads what another one has written; 16 bytes a load.
    params = plgpu.CompilerParams(unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane)
    layout = plgpu.Layout.WG_STRIDED((block,), vec_size=4)

    def body(scalars, g, *updated):
        here = pl.ds(lax.axis_index("block") * block, block)

        def update():
            blocks = [plgpu.load(ref.at[here], layout=layout, optimized=False) for ref in (*updated, g)]
            for ref, y in zip(updated, adamw(read(scalars), *blocks), strict=True):
                ref[here] = y

        pl.when(scalars[0] == 0)(update) if flag else update()

    def step(w, m, v, g, scalars):
        refs = [jax.new_ref(x) for x in (w, m, v)]
        plgpu.kernel(
            body,
            out_type=(),
            grid=(w.size // block,),
            grid_names=("block",),
            compiler_params=params,
            interpret=plgpu.InterpretGPUParams() if interpret else None,
        )(scalars, g, *refs)
        return tuple(jax.freeze(ref) for ref in refs)

    return step


def variants(names: tuple[str, ...], interpret: bool) -> Iterator[tuple[str, str, Callable[[], Step]]]:
    """(backend, what, how to make the step), plain XLA first."""
    yield "xla", "xla", lambda: xla
    for flag in (False, True):
        end = ", flag" if flag else ""
        if "triton" in names:
            for block, warps in TRITON:
                make = functools.partial(triton, block, warps, flag, interpret)
                yield "triton", f"block {block}, {warps} warps{end}", make
        if "mosaic" in names:
            for block in MOSAIC:
                yield "mosaic", f"block {block}, 4 warps{end}", functools.partial(mosaic, block, flag, interpret)


def buffers(size: int, seed: int) -> tuple[list[jax.Array], jax.Array]:
    """w, m and v, and a gradient. v is no negative number."""
    keys = jax.random.split(jax.random.key(seed), 4)
    w, m, v, g = (0.1 * jax.random.normal(key, (size,), jnp.float32) for key in keys)
    return [w, m, v * v], g


def part(run: Run) -> None:
    names = correctness.backends(run)
    interpret = jax.default_backend() == "cpu"
    for size in (2**12,) if run.tiny else SIZES:
        model = f"{size / 1e6:.3g}M"
        labels = {"part": "tuning", "model": model, "rule": "adamw", "mode": "flat"}
        made = run.attempt({**labels, "what": "buffers"}, functools.partial(buffers, size, run.seed))
        if made is None:
            continue
        held, g = made
        scalars = jnp.asarray(SCALARS)

        def candidate(backend, what, make, *, held=held, rest=(g, scalars), labels=labels, size=size):
            def build():
                return JaxSteps(make(), held, rest)

            return Candidate({**labels, "what": what, "backend": backend}, build, BYTES * size, 1.0, what == "xla")

        compare(run, [candidate(*v) for v in variants(names, interpret)])
