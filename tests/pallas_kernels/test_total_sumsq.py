"""`total_sumsq`, `rounded`, and scalars that come one by one: kernels interpreted, against NumPy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels import compat
from tests.pallas_kernels.cases import normal

BACKENDS = [None, "xla", "triton", *(["mosaic"] if compat.HAS_MOSAIC else [])]
SHAPES = [(10,), (3, 500), (0,), (1024,), (), (7, 11, 13)]


def doubled(s, x):
    return (s[0] * x.astype(jnp.float32),)


def total(arrays, backend, scale=2.0, fn=doubled):
    with pk.interpret():
        return jax.jit(lambda s, x: pk.norm(pk.total_sumsq(fn, s, x, backend=backend)))(jnp.array([scale]), arrays)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_norm_of_many_arrays_is_that_of_their_elements(backend):
    arrays = [jnp.asarray(normal(i, s, np.float32)) for i, s in enumerate(SHAPES)]
    arrays[1] = arrays[1].astype(jnp.bfloat16)
    want = 2 * np.sqrt(sum(np.sum(np.square(np.asarray(x, np.float64))) for x in arrays))
    np.testing.assert_allclose(total(arrays, backend), [[want]], rtol=3e-7)  # a few roundings of float32


@pytest.mark.parametrize("backend", ["xla", "triton"])
@pytest.mark.parametrize("size", [1e25, 1e-25, 1e30])
def test_it_neither_overflows_nor_underflows(size, backend):
    arrays = [jnp.full((130,), size), jnp.full((2, 3), size)]
    # Equal numbers round alike: 130 additions may all err to the same side.
    np.testing.assert_allclose(total(arrays, backend), [[2 * size * np.sqrt(136)]], rtol=4e-6)


@pytest.mark.parametrize("backend", ["xla", "triton"])
def test_what_is_not_finite_comes_through(backend):
    for bad in (jnp.nan, jnp.inf):
        arrays = [jnp.ones((130,)), jnp.ones((2, 3)).at[1, 2].set(bad)]
        assert not np.isfinite(total(arrays, backend)).any()
    # A norm beyond float32 is infinite, although every element is finite.
    assert np.isinf(total([jnp.full((4,), 3e38)], backend, scale=1.0)).all()


def test_no_arrays_have_norm_zero():
    assert total([], None) == 0
    assert total([jnp.zeros((0, 3))], None) == 0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("backend", ["xla", "triton", None])
def test_rounded_is_a_cast_there_and_back_that_xla_does_not_drop(backend, dtype):
    x = np.concatenate(
        [normal(0, (3000,), np.float32), 1e-6 * normal(1, (1000,), np.float32), [0.0, -0.0, 1e-8, 6.1e-5]]
    )
    x = x.astype(np.float32)

    def fn(s, x):
        return (s[0] * (pk.rounded(x, dtype) - x),)

    with pk.interpret():
        ((got,), _) = jax.jit(lambda x: pk.elementwise(fn, jnp.array([1.0]), [x], backend=backend))(x)
    want = x.astype(dtype).astype(np.float32) - x
    np.testing.assert_array_equal(got, want)
    assert np.any(want)
    assert pk.rounded(x, np.float32) is x


@pytest.mark.parametrize("backend", ["xla", "triton", None])
def test_scalars_may_come_one_by_one(backend):
    x = normal(0, (1500,), np.float32)
    fn = lambda s, x: (s[0] * x + s[1],)  # noqa: E731
    with pk.interpret():
        results = [
            jax.jit(lambda x, s=s: pk.elementwise(fn, s, [x], backend=backend))(x)[0][0]
            for s in (jnp.array([2.0, 3.0]), (jnp.float32(2.0), jnp.float32(3.0)))
        ]
    np.testing.assert_array_equal(results[0], results[1])


def test_scalars_one_by_one_are_checked():
    x = jnp.ones(8)
    with pytest.raises(ValueError, match=r"`scalars` have shapes \[\(2,\)\]"):
        pk.elementwise(lambda s, x: (x,), (jnp.ones(2),), [x])
    with pytest.raises(TypeError, match="expected all float32 or all float64"):
        pk.elementwise(lambda s, x: (x,), (jnp.float32(1), jnp.int32(1)), [x])


@pytest.mark.parametrize("backend", ["triton", *(["mosaic"] if compat.HAS_MOSAIC else [])])
def test_past_an_early_exit_the_flag_is_the_number_zero(backend):
    seen = []

    def fn(s, x):
        seen.append(s[0])
        return (x + s[1],)

    with pk.interpret():
        (y,), _ = jax.jit(lambda x: pk.elementwise(fn, jnp.array([0.0, 3.0]), [x], early_exit=True, backend=backend))(
            jnp.ones(2048)
        )
    np.testing.assert_array_equal(y, 4.0)
    assert any(isinstance(flag, float) and flag == 0 for flag in seen)
