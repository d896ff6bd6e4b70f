"""Buffers in pieces: the multi-tensor kernels, interpreted, against NumPy float64 and against the joined buffer."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels import compat, pieces_triton, tiling
from tests.pallas_kernels.cases import CASES, SCALARS, close, double, normal

BACKENDS = [None, "xla", "triton", *(["mosaic"] if compat.HAS_MOSAIC else [])]

# Below, at and above a row and a block; odd tails; empty, 0-d and more than one dimension.
SHAPES = [(10,), (1000,), (1024,), (3, 1000), (64,), (2048,), (0,), (), (7, 11, 13), (128,), (2, 0), (1025,)]
# Interpreted, a kernel compiles in the square of its pieces: enough of them for everything that is not about sizes.
FEW = [(10,), (3, 500), (0,), (1024,), ()]


def places(row=128, shapes=SHAPES, spare=0):
    """Pieces without arrays; `spare` blocks of the buffer lie behind the last one."""
    rows = tiling.segments(tuple(map(math.prod, shapes)), row).rows
    size = (-(-rows * row // tiling.BLOCK) + spare) * tiling.BLOCK
    return pk.Pieces((None,) * len(shapes), tuple(shapes), row, size, np.dtype(np.float32))


def pieces(seed, like, dtype=np.float32, without=()):
    arrays = [None if j in without else normal(100 * seed + j, s, dtype) for j, s in enumerate(like.shapes)]
    return like.replaced(arrays, dtype)


def buffer(seed, like, without=()):
    """A whole buffer with numbers at the segments and zeros between them."""
    return pieces(seed, like, without=without).joined


def run(case, updated, read, backend, scalars=SCALARS, **kwargs):
    with pk.interpret():
        return jax.jit(
            lambda scalars, updated, read: pk.elementwise(
                case.fn, scalars, updated, read, emit=case.emit, backend=backend, **kwargs
            )
        )(scalars, updated, read)


def adam_buffers(like, dtype=np.float32, without=()):
    return [pieces(0, like), buffer(1, like), jnp.abs(buffer(2, like))], [pieces(3, like, dtype, without)]


def segment(like, x, j):
    start = int(like.segments.starts[j]) * like.row
    return double(x)[start : start + like.segments.sizes[j]].reshape(like.shapes[j])


@pytest.mark.parametrize("row", [128, pytest.param(1024, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_piece_is_updated_where_it_is(backend, row):
    like, case = places(row, spare=1), CASES["adam"]
    updated, read = adam_buffers(like)
    new, emitted = run(case, updated, read, backend)
    for j in range(len(SHAPES)):
        (w, m, v), g = updated, read[0]
        want = case.oracle(
            double(SCALARS), double(w.arrays[j]), segment(like, m, j), segment(like, v, j), double(g.arrays[j])
        )
        got = [new[0].arrays[j], segment(like, new[1], j), segment(like, new[2], j), *(x.arrays[j] for x in emitted)]
        for x, y in zip(got, want, strict=True):
            assert x.shape == SHAPES[j]
            eps = 2.0**-7 if x.dtype == jnp.bfloat16 else 2.0**-21  # four roundings
            np.testing.assert_allclose(double(x), y, rtol=eps, atol=eps)
    # Padding stays zero, in every buffer.
    for x in new[1:]:
        np.testing.assert_array_equal(like.replaced(like.split(x)).joined, x)
    assert [x.dtype for x in emitted] == [np.dtype(np.float32), jnp.bfloat16]


@pytest.mark.parametrize("backend", BACKENDS)
def test_r19_pieces_of_another_dtype_are_cast_where_they_are_read(backend):
    """bf16 gradients, one of them float32, one a transpose."""
    like, case = places(shapes=FEW), CASES["adam"]
    updated, (g,) = adam_buffers(like, jnp.bfloat16)
    arrays = list(g.arrays)
    arrays[0] = arrays[0].astype(np.float32)
    arrays[1] = normal(9, (500, 3), jnp.bfloat16).T
    mixed = dataclasses.replace(g, arrays=tuple(arrays), dtype=np.dtype(np.float32))
    new, _ = run(case, updated, [mixed], backend)
    want, _ = run(case, [x.joined if isinstance(x, pk.Pieces) else x for x in updated], [mixed.joined], "xla")
    close(new[0].joined, double(want[0]))
    close(new[1], double(want[1]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_absent_piece_leaves_its_place_alone(backend):
    like, case, without = places(shapes=FEW), CASES["adam"], (1, 4)
    updated, read = adam_buffers(like, without=without)
    new, emitted = run(case, updated, read, backend)
    full = [normal(5, shape) if x is None else x for x, shape in zip(read[0].arrays, FEW)]
    whole, _ = run(case, updated, [read[0].replaced(full)], backend)
    for j, shape in enumerate(FEW):
        if j in without:
            np.testing.assert_array_equal(new[0].arrays[j], updated[0].arrays[j])
            np.testing.assert_array_equal(segment(like, new[1], j), segment(like, updated[1], j))
            for x in emitted:
                np.testing.assert_array_equal(double(x.arrays[j]), np.zeros(shape))
        else:
            close(new[0].arrays[j], double(whole[0].arrays[j]))
            np.testing.assert_allclose(segment(like, new[2], j), segment(like, whole[2], j), rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_early_exit_leaves_everything_bit_for_bit(backend):
    like, case = places(shapes=FEW), CASES["adam"]
    updated, (g,) = adam_buffers(like)
    poison = g.replaced([jnp.full_like(x, jnp.nan) for x in g.arrays])

    def guarded(s, *blocks):
        *blocks, g = blocks
        out = case.fn(s, *blocks, jnp.where(s[0] != 0, jnp.zeros_like(g), g))
        kept = [*blocks, *(jnp.zeros_like(x) for x in out[3:])]
        return tuple(jnp.where(s[0] != 0, a, b) for a, b in zip(kept, out, strict=True))

    scalars = SCALARS.copy()
    scalars[0] = 1
    bad = dataclasses.replace(case, fn=guarded)
    new, emitted = run(bad, updated, [poison], backend, scalars, early_exit=True)
    for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(updated), strict=True):
        np.testing.assert_array_equal(x, y)
    assert not any(double(x).any() for x in jax.tree.leaves(emitted))
    new, _ = run(bad, updated, [g], backend, early_exit=True)
    want, _ = run(case, updated, [g], backend)
    close(new[0].joined, double(want[0].joined))


@pytest.mark.parametrize("backend", BACKENDS)
def test_row_scalars_reach_their_pieces(backend):
    like, case = places(shapes=FEW), CASES["lars"]
    rates = pk.spread(normal(8, (len(FEW),)), like.segments.sizes, 128, like.size)
    updated, read = [pieces(0, like), buffer(1, like)], [pieces(3, like)]
    new, _ = run(case, updated, read, backend, row_scalars=[rates])
    want, _ = run(case, [updated[0].joined, updated[1]], [read[0].joined], "xla", row_scalars=[rates])
    close(new[0].joined, double(want[0]))
    close(new[1], double(want[1]))


@pytest.mark.parametrize(
    ("row", "without"), [(128, (0, 3)), pytest.param(1024, (), marks=pytest.mark.slow)], ids=["128", "1024"]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_of_squares_of_pieces(backend, row, without):
    """Against float64; an absent piece counts as zeros, and no sum sees its neighbours or what lies behind a piece."""
    if backend == "mosaic":
        row = tiling.BLOCK  # the rows that it sums
    like = places(row)
    w, g = pieces(0, like), pieces(1, like, without=without)
    with pk.interpret():
        sums = jax.jit(
            lambda w, g: pk.segment_sumsq(
                lambda s, w, g: (w, g - s[0] * w), SCALARS[1:2], (w, g), like.segments.sizes, row=row, backend=backend
            )
        )(w, g)
    want = np.zeros((2, len(SHAPES)))
    for j, shape in enumerate(SHAPES):
        x, y = double(w.arrays[j]), np.zeros(shape) if j in without else double(g.arrays[j])
        want[:, j] = np.sum(x**2), np.sum((y - double(SCALARS)[1] * x) ** 2)
    np.testing.assert_allclose(sums.mid, want, rtol=1e-6)
    np.testing.assert_allclose(pk.norm(sums), np.sqrt(want), rtol=1e-6)


def test_the_same_sums_bit_for_bit_whatever_the_neighbours():
    like = places(shapes=FEW)
    w = pieces(0, like)
    alone = dataclasses.replace(places(shapes=FEW[1:2]), arrays=w.arrays[1:2])

    def sums(x):
        with pk.interpret():
            return pk.segment_sumsq(lambda s, w: (w,), SCALARS, (x,), x.segments.sizes, backend="triton").mid

    assert sums(w)[0, 1] == sums(alone)[0, 0]


def test_x64_mode_keeps_dtypes_and_values():
    """A Python number beside an int32 of a kernel would be int64 there. Values: see test_elementwise."""
    like, case = places(shapes=FEW), CASES["adam"]
    updated, read = adam_buffers(like)

    def everything():
        with pk.interpret():
            sums = pk.total_sumsq(lambda s, x: (x,), SCALARS, read[0].arrays, backend="triton")
            look = pk.zero_or_nan(lambda s, x: x, SCALARS, read[0].arrays, backend="triton")
        return run(case, updated, read, "triton"), sums, look

    before = everything()
    with jax.enable_x64(True):
        after = everything()
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert x.dtype == y.dtype
        eps = 2.0**-7 if x.dtype == jnp.bfloat16 else 2e-7
        np.testing.assert_allclose(double(x), double(y), rtol=eps, atol=eps)


def test_many_pieces_take_several_kernels_of_the_same_buffers(monkeypatch):
    monkeypatch.setattr(pieces_triton, "MAX_PIECES", 2)
    like, case = places(shapes=FEW), CASES["adam"]
    updated, read = adam_buffers(like)
    with pk.interpret():
        text = str(
            jax.make_jaxpr(lambda *a: pk.elementwise(case.fn, SCALARS, *a, emit=case.emit, backend="triton"))(
                updated, read
            )
        )
    assert text.count("pallas_call[") == 2  # four of the five pieces are not empty
    got, want = run(case, updated, read, "triton"), run(case, updated, read, "xla")
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        close(x, double(y))


def test_runs_take_about_equally_many_pieces_and_each_one_once():
    like = places(shapes=[(n,) for n in range(1, 162)])
    runs = pieces_triton.runs(like, range(161))
    assert [len(run.members) for run in runs] == [40, 41, 41, 39]
    assert sorted(j for run in runs for j in run.members) == list(range(161))
    assert pieces_triton.runs(places(shapes=[(0,)]), range(1)) == []


def test_vmap_scan_and_grad_through_a_multi_tensor_kernel():
    like, case = places(shapes=[(10,), (3, 500), ()]), CASES["momentum"]
    w, m, g = pieces(0, like), buffer(1, like), pieces(3, like)

    def step(backend):
        def run(lr, w, m):
            with pk.interpret():
                scalars = jnp.stack([jnp.float32(0), lr, jnp.float32(0.9)])
                (w, m), _ = pk.elementwise(case.fn, scalars, [w, m], [g], backend=backend)
            return w, m

        return run

    def agree(transformed):
        got, want = (jax.tree.leaves(transformed(step(backend))) for backend in ("triton", "xla"))
        for x, y in zip(got, want, strict=True):
            close(x, double(y), ulps=32)

    rates = jnp.asarray([0.1, 0.2], jnp.float32)
    agree(lambda f: jax.jit(jax.vmap(f, (0, None, None)))(rates, w, m))
    agree(lambda f: jax.jit(lambda: jax.lax.scan(lambda c, lr: (f(lr, *c), 0), (w, m), rates)[0])())
    agree(lambda f: jax.jit(jax.grad(lambda lr: jnp.sum(f(lr, w, m)[0].arrays[1])))(rates[0]))
