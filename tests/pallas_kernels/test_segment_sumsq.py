"""`segment_sumsq` on every backend: kernels interpreted on CPU, against NumPy float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pallas_kernels as pk
from pallas_kernels import tiling
from tests.pallas_kernels.cases import BACKENDS, KERNELS, double, f32, needs_mosaic, normal

SIZES = (5, 0, 128, 300, 1000, 1, 1024, 2049)
ONE = np.ones(1, np.float32)

# Sums of squares add rounding errors of 6e-8 in pairs; the root halves what is left.
RTOL = 4e-7

# Mosaic sums whole blocks, other rows go to the next backend.
ROWS = [
    ("xla", 128),
    ("xla", 1024),
    # XLA on CPU takes seconds to compile short rows interpreted.
    pytest.param("triton", 128, marks=pytest.mark.slow),
    pytest.param("triton", 256, marks=pytest.mark.slow),
    ("triton", 1024),
    pytest.param("mosaic", 1024, marks=needs_mosaic),
]


def identity(s, *blocks):
    return blocks


def packed(sizes, row, trailing=0, seed=0, scale=None):
    """A buffer of segments, every element outside of them NaN, and the segments in float64."""
    table = tiling.segments(sizes, row)
    rng = np.random.default_rng(seed)
    buffer = np.full(table.rows * row + trailing, np.nan, np.float32)
    parts = []
    for i, (size, start) in enumerate(zip(sizes, table.starts)):
        part = rng.normal(size=size) * (1.0 if scale is None else scale[i])
        buffer[start * row : start * row + size] = part
        parts.append(buffer[start * row : start * row + size].astype(np.float64))
    return jnp.asarray(buffer), parts


def norms(backend, arrays, sizes, fn=identity, scalars=ONE, **kwargs):
    with pk.interpret():
        return jax.jit(lambda arrays: pk.norm(pk.segment_sumsq(fn, scalars, arrays, sizes, backend=backend, **kwargs)))(
            arrays
        )


@pytest.mark.parametrize("trailing", [0, 3 * 1024 + 17])
@pytest.mark.parametrize(("backend", "row"), ROWS)
def test_segments_and_poisoned_padding(backend, row, trailing):
    x, parts = packed(SIZES, row, trailing)
    y = x.astype(jnp.bfloat16)
    # fn makes inf of the zeros that a masked load reads: the mask must come behind it.
    fn = lambda s, x, y: (x, s[0] * y.astype(f32), jnp.where(x == 0, jnp.inf, x))  # noqa: E731
    got = norms(backend, [x, y], SIZES, fn, np.full(1, 0.5, np.float32), row=row)
    want = np.array([np.linalg.norm(p) for p in parts])
    np.testing.assert_allclose(got[0], want, rtol=RTOL)
    np.testing.assert_allclose(got[2], want, rtol=RTOL)
    rounded = [np.linalg.norm(0.5 * double(jnp.asarray(p, jnp.bfloat16))) for p in parts]
    np.testing.assert_allclose(got[1], rounded, rtol=RTOL)


@pytest.mark.parametrize("backend", ["xla", "triton"])
def test_the_default_row(backend):
    x, parts = packed((5, 0, 128, 300), 128)
    got = norms(backend, [x], (5, 0, 128, 300))
    np.testing.assert_allclose(got[0], [np.linalg.norm(p) for p in parts], rtol=RTOL)


@pytest.mark.parametrize("shape", [(1,), (127,), (1024,), (1025,), (3, 3, 40, 9), (), (0,), (2, 0)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_lone_segment_of_any_shape(backend, shape):
    x = normal(0, shape)
    got = norms(backend, [x], (x.size,))
    np.testing.assert_allclose(got, [[np.linalg.norm(double(x))]], rtol=RTOL)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_norm_overflows_or_underflows(backend):
    scale = np.array([1e-34, 1e-30, 1e-22, 1e-12, 1.0, 1e12, 1e18, 1e22, 1e30, 1e37])
    sizes = (600,) * len(scale)
    x, parts = packed(sizes, 1024, scale=scale)
    got = norms(backend, [x], sizes, row=1024)
    np.testing.assert_allclose(got[0], [np.linalg.norm(p) for p in parts], rtol=RTOL)


@pytest.mark.parametrize("backend", BACKENDS)
def test_mixed_magnitudes_in_one_segment(backend):
    x = np.zeros(1024, np.float32)
    x[[3, 700]] = 1e25, 1e-25
    y = np.full(1024, 1e-25, np.float32)
    y[9] = 3.0
    got = norms(backend, [jnp.asarray(x), jnp.asarray(y)], (1024,))
    np.testing.assert_allclose(got, [[1e25], [3.0]], rtol=RTOL)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_and_inf_come_through_and_stay_in_their_segment(backend, bad):
    x = np.ones(3072, np.float32)
    x[1500] = bad
    with pk.interpret():
        sums = pk.segment_sumsq(identity, ONE, [jnp.asarray(x)], (1024, 1024, 1024), row=1024, backend=backend)
    got = np.asarray(pk.norm(sums))[0]
    np.testing.assert_array_equal(got, [32.0, abs(bad), 32.0])
    np.testing.assert_array_equal(np.isfinite(sums.big[0]), [True, False, True])


def test_big_is_finite_for_every_finite_input():
    x = jnp.full((4096,), np.finfo(np.float32).max)
    sums = pk.segment_sumsq(identity, ONE, [x], (4096,))
    assert np.isfinite(sums.big).all()
    assert np.isinf(sums.mid).all()


@pytest.mark.parametrize(("backend", "row"), ROWS)
def test_neighbours_do_not_change_a_bit(backend, row):
    mine = np.random.default_rng(1).normal(size=2345).astype(np.float32)
    bits = []
    for sizes in ((100, 2345), (2345, 0, 7), (1, 2345, 40000 if backend == "xla" else 5000)):
        x, _ = packed(sizes, row, trailing=row)
        start = int(tiling.segments(sizes, row).starts[sizes.index(2345)]) * row
        x = x.at[start : start + 2345].set(mine)
        with pk.interpret():
            sums = pk.segment_sumsq(identity, ONE, [x], sizes, row=row, backend=backend)
        bits.append(float(sums.mid[0, sizes.index(2345)]))
    assert len(set(bits)) == 1


def test_accuracy_of_four_million_elements():
    x = normal(0, (4 << 20,))
    want = np.linalg.norm(double(x))
    solo = norms("xla", [x], (x.size,))
    flat = norms("xla", [jnp.pad(x, (0, 128))], (x.size, 5), row=128)
    for got in (solo[0, 0], flat[0, 0]):
        assert abs(float(got) / want - 1) < 2e-7


@pytest.mark.parametrize(("backend", "row"), ROWS)
def test_runs_are_reproducible(backend, row):
    x, _ = packed(SIZES, row)
    first, second = (norms(backend, [x], SIZES, row=row) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_no_atomics_and_no_scatter():
    x, _ = packed(SIZES, 128)
    text = str(jax.make_jaxpr(lambda x: pk.segment_sumsq(identity, ONE, [x], SIZES))(x))
    assert "scatter" not in text


def test_float64():
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).normal(size=3000) * np.repeat([1e-200, 1.0, 1e200], 1000))
        ones = np.ones(1)
        for backend in ("xla", "triton"):
            for part in (x[:1000], x[1000:2000], x[2000:]):
                with pk.interpret():
                    got = pk.norm(pk.segment_sumsq(identity, ones, [part], (1000,), backend=backend))
                assert got.dtype == np.float64
                scaled = np.asarray(part) / np.abs(part).max()
                want = np.linalg.norm(scaled) * np.abs(part).max()
                np.testing.assert_allclose(got[0, 0], want, rtol=1e-14)


@pytest.mark.parametrize(("backend", "row"), ROWS)
def test_x64_mode_keeps_dtypes_and_values(backend, row):
    """The compiler sees other loop counters and may contract other multiply-adds: one rounding."""
    x, _ = packed(SIZES, row)
    before = norms(backend, [x], SIZES, row=row)
    with jax.enable_x64(True):
        after = norms(backend, [x], SIZES, row=row)
    assert after.dtype == np.float32
    np.testing.assert_allclose(before, after, rtol=2e-7, atol=2e-7)


@pytest.mark.parametrize(("backend", "row"), ROWS)
def test_vmap(backend, row):
    x = jnp.stack([packed(SIZES, row, seed=i)[0] for i in range(3)])
    scalars = normal(3, (3, 1))
    fn = lambda s, x: (s[0] * x,)  # noqa: E731
    with pk.interpret():
        got = jax.jit(jax.vmap(lambda s, x: pk.norm(pk.segment_sumsq(fn, s, [x], SIZES, row=row, backend=backend))))(
            scalars, x
        )
    for i in range(3):
        want = [abs(double(scalars)[i, 0]) * np.linalg.norm(p) for p in packed(SIZES, row, seed=i)[1]]
        np.testing.assert_allclose(got[i, 0], want, rtol=RTOL)


@pytest.mark.parametrize("backend", KERNELS)
def test_derivative(backend):
    """The derivative of a norm is the unit vector; zero where the norm is zero."""
    x = normal(0, (1500,)).at[1024:1100].set(0)
    sizes = (1024, 76)

    def total(x):
        return jnp.sum(pk.norm(pk.segment_sumsq(identity, ONE, [x], sizes, row=1024, backend=backend)))

    x = jnp.pad(x, (0, 548)).at[1100:].set(jnp.nan)
    with pk.interpret():
        got = jax.jit(jax.grad(total))(x)
    want = np.zeros(2048)
    want[:1024] = double(x)[:1024] / np.linalg.norm(double(x)[:1024])
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-9)


def test_shards_add_up():
    """psum of the fields between segment_sumsq and norm gives the norms of whole segments, at every magnitude."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = normal(0, (3, 8 * 1024)) * jnp.asarray([[1e-30], [1.0], [1e25]], f32)

    def local(x):
        sums = [pk.segment_sumsq(identity, ONE, [row], (1024,)) for row in x]
        return jnp.stack([pk.norm(s)[0, 0] for s in jax.lax.psum(sums, "data")])

    got = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(None, "data"), out_specs=P()))(x)
    np.testing.assert_allclose(got, np.linalg.norm(double(x), axis=1), rtol=RTOL)


def test_spread():
    values = jnp.arange(1.0, 5.0)
    got = pk.spread(values, (200, 0, 128, 1), 128, 7 * 128)
    np.testing.assert_array_equal(got, [1, 1, 3, 4, 0, 0, 0])
    whole = pk.spread(jnp.ones(1), (1024,), 1024, 1024)
    np.testing.assert_array_equal(whole, [1])


def test_spread_feeds_row_scalars():
    sizes = (200, 0, 128, 1)
    got = pk.elementwise(
        lambda s, x: (s[-1] * x,), ONE, [jnp.ones(896)], row_scalars=[pk.spread(jnp.arange(1.0, 5.0), sizes, 128, 896)]
    )[0][0]
    np.testing.assert_array_equal(got, np.repeat([1, 1, 3, 4, 0, 0, 0], 128))


@needs_mosaic
def test_mosaic_says_which_rows_it_sums():
    with pk.interpret(), pytest.raises(ValueError, match="mosaic: no, sums rows of 1024 elements, got row=128"):
        pk.segment_sumsq(identity, ONE, [jnp.ones(256)], (3, 5), backend="mosaic")


@pytest.mark.parametrize("row", [128, 1024])
@pytest.mark.parametrize("sizes", [(), (0,), (0, 0), (1,), (5, 0, 128), (100_000, 3, 0, 17 * 128, 16 * 128 + 1)])
def test_the_tree_adds_every_row_once(sizes, row):
    table = tiling.segments(sizes, row)
    rows = np.arange(1.0, table.rows + 1)
    sums = rows
    for level in table.tree:
        assert level.shape[1] <= tiling.FAN_IN
        sums = np.append(sums, 0.0)[level].sum(axis=1)
    want = [rows[a:b].sum() for a, b in zip(table.starts[:-1], table.starts[1:])]
    np.testing.assert_array_equal(sums, want)
    assert len(table.tree) == max(1, *(math.ceil(math.log(max(n / row, 1), tiling.FAN_IN)) for n in (1, *sizes)))
    assert table.valid.sum() == sum(sizes)
    assert len(table.owner) == table.rows
