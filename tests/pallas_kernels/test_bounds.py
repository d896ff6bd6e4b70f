"""R114: Triton kernels touch nothing behind a ragged end. (Mosaic's take whole blocks only.)"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

import pallas_kernels as pk
from pallas_kernels import tiling
from tests.pallas_kernels import memory
from tests.pallas_kernels.cases import CASES, SCALARS, buffers, close, double, normal

SIZES = (1, 127, 1024, 1025, 3000)
elementwise = functools.partial(pk.elementwise, backend="triton")


def scaled(s, x):
    return (s[0] * x,)


@pytest.mark.parametrize("size", SIZES)
def test_r114_updates(size):
    case = CASES["adam"]
    updated, read = buffers(case, (size,))
    got = memory.run(lambda u, r: elementwise(case.fn, SCALARS, u, r, emit=case.emit), updated, read)
    want = case.oracle(double(SCALARS), *map(double, updated), *map(double, read))
    for x, y in zip((*got[0], *got[1]), want, strict=True):
        close(x, y)


@pytest.mark.parametrize("size", SIZES)
def test_r114_an_early_exit(size):
    case = CASES["adam"]
    updated, read = buffers(case, (size,))
    leave = jnp.asarray(SCALARS).at[0].set(1)
    kept, emitted = memory.run(
        lambda u, r: elementwise(case.fn, leave, u, r, emit=case.emit, early_exit=True), updated, read
    )
    for x, y in zip(kept, updated, strict=True):
        np.testing.assert_array_equal(x, y)
    for x in emitted:
        np.testing.assert_array_equal(np.asarray(x, np.float32), 0.0)


@pytest.mark.parametrize("size", SIZES)
def test_r114_norms(size):
    x = normal(0, (size,))
    for sums in (
        lambda x: pk.segment_sumsq(scaled, np.full(1, 2, np.float32), [x], (size,), backend="triton"),
        lambda x: pk.total_sumsq(scaled, np.full(1, 2, np.float32), [x], backend="triton"),
    ):
        # A few roundings of float32.
        np.testing.assert_allclose(pk.norm(memory.run(sums, x)), [[2 * np.linalg.norm(double(x))]], rtol=3e-7)


def test_r114_norms_of_segments():
    """Nine rows of 128: the second block has one of eight."""
    x = normal(0, (1152,))
    two, sizes = np.full(1, 2, np.float32), (1000, 100)
    sums = memory.run(lambda x: pk.segment_sumsq(scaled, two, [x], sizes, row=128, backend="triton"), x)
    want = [2 * np.linalg.norm(double(x)[start : start + size]) for start, size in zip((0, 1024), sizes)]
    np.testing.assert_allclose(pk.norm(sums), [want], rtol=3e-7)


def test_r114_pieces():
    shapes = ((10,), (3, 500), (0,), (1025,), ())
    rows = tiling.segments((10, 1500, 0, 1025, 1), 128).rows
    like = pk.Pieces((None,) * 5, shapes, 128, -(-rows * 128 // tiling.BLOCK) * tiling.BLOCK, np.dtype(np.float32))
    w, g = ([normal(10 * seed + i, shape) for i, shape in enumerate(shapes)] for seed in (1, 2))

    def step(w, g, m):
        places = [like.replaced(x, np.dtype(np.float32)) for x in (w, g)]
        new, _ = elementwise(CASES["momentum"].fn, SCALARS, [places[0], m], [places[1]])
        sums = pk.segment_sumsq(
            scaled, np.ones(1, np.float32), [places[1]], places[1].segments.sizes, row=128, backend="triton"
        )
        return new[0].arrays, new[1], sums

    m = like.replaced(w, np.dtype(np.float32)).joined
    new, moment, sums = memory.run(step, w, g, m)
    for x, a, b in zip(new, map(double, w), map(double, g), strict=True):
        close(x, CASES["momentum"].oracle(double(SCALARS), a, a, b)[0])
    close(moment, np.float64(SCALARS[2]) * double(m) + double(like.replaced(g, np.dtype(np.float32)).joined))
    np.testing.assert_allclose(pk.norm(sums), [[np.linalg.norm(double(x)) for x in g]], rtol=3e-7)


@pytest.mark.parametrize(("fault", "element"), [("read", 1025), ("write", 1025), ("begin", -1)])
def test_an_access_outside_is_seen(fault, element):
    """Pallas's own interpreter shows nothing of the first two: what it returns is right."""
    size, first = 1025, -1 if fault == "begin" else 0

    def kernel(x_ref, y_ref):
        here = pl.program_id(0) * 1024 + jnp.arange(1024, dtype=jnp.int32) + first
        inside = here < size
        x = plt.load(x_ref.at[here], mask=None if fault == "read" else inside)
        plt.store(y_ref.at[here], x, mask=None if fault == "write" else inside)

    def call(x):
        whole = pl.BlockSpec(memory_space=pl.ANY)
        shape = jax.ShapeDtypeStruct((size,), jnp.float32)
        return pl.pallas_call(kernel, shape, grid=(2,), in_specs=[whole], out_specs=whole, interpret=True)(x)

    x = normal(0, (size,))
    if fault != "begin":
        np.testing.assert_array_equal(call(x), x)
    with pytest.raises(IndexError, match=f"element {element} of a buffer of {size}"):
        memory.run(call, x)
