"""Which values are unusable: loss scales, squares that overflow, and zeros and subnormals, which are not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fusedopt
from tests.guard_cases import INF, NAN, assert_skipped, model, stepper
from tests.helpers import assert_equal, avals, one_of_each

# One optimizer for each path through the code; the others are marked slow.
CORE = ("sgd", "adamw", "lars_optax")
EVERY = [pytest.param(n, marks=[] if n in CORE else [pytest.mark.slow]) for n in one_of_each(CORE)]


# ------------------------------------------------------------------------------------- loss scale


@pytest.mark.parametrize(
    ("name", "mode"), [pytest.param(*p.values, "apply", marks=p.marks) for p in EVERY] + [("adamw", "flat_update")]
)
def test_the_unscale_is_fused(name, mode):
    """Powers of two lose nothing, so scaled gradients give the bits of unscaled ones."""
    _, step, start, state = stepper(name, mode)
    grads = model(2)
    want, want_state = step(grads, state, start, {"loss_scale": jnp.float32(1.0)})
    scaled = jax.tree.map(lambda g: 1024 * g, grads)
    got, got_state = step(scaled, state, start, {"loss_scale": jnp.float32(1024.0)})
    assert_equal(got, want)
    assert_equal(got_state, want_state)


@pytest.mark.parametrize("name", EVERY)
def test_r49_unusable_scales(name):
    _, step, start, state = stepper(name, "apply")
    grads = model(2)
    for scale in (INF, -INF, NAN):
        out, after = step(grads, state, start, {"loss_scale": jnp.float32(scale)})
        assert_skipped("apply", start, state, out, after)
    want = step(grads, state, start, {"loss_scale": jnp.float32(1.0)})
    assert_equal(step(grads, state, start, {"loss_scale": jnp.float32(0.0)}), want)


@pytest.mark.parametrize("scale", [2.0, np.float64(2), 2, jnp.float16(2), jnp.bfloat16(2), jnp.int32(2)], ids=repr)
def test_loss_scales_of_any_kind(scale):
    params, tx = {"w": jnp.ones((1, 2))}, fusedopt.sgd(0.5)
    updates, state = tx.update(params, tx.init(params), params, loss_scale=scale)
    np.testing.assert_array_equal(updates["w"], -0.25)
    assert avals(state) == avals(tx.init(params))


def test_float16_gradients_overflow_and_come_back_with_a_smaller_scale():
    params, tx = {"w": jnp.ones((1, 2), jnp.float16)}, fusedopt.sgd(0.5)
    state = tx.init(params)
    for scale, grad, skipped in ((2.0**17, INF, True), (2.0**14, 2.0**13, False)):
        updates, state = tx.update({"w": jnp.full((1, 2), grad, jnp.float16)}, state, params, loss_scale=scale)
        assert bool(state.skipped) == skipped
    np.testing.assert_array_equal(np.asarray(updates["w"], np.float32), -0.25)


def test_what_counts_is_the_gradient_after_the_unscale():
    params = {"w": jnp.ones((1, 2))}
    # 1e30 squares to infinity, 1e30/2^60 does not.
    tx = fusedopt.adam(0.1)
    assert bool(tx.update({"w": jnp.full((1, 2), 1e30)}, tx.init(params))[1].skipped)
    updates, state = tx.update({"w": jnp.full((1, 2), 1e30)}, tx.init(params), loss_scale=2.0**60)
    assert not bool(state.skipped)
    np.testing.assert_allclose(updates["w"], -0.1, rtol=1e-6)
    # 1e30 / 2^-60 is infinite.
    assert bool(tx.update({"w": jnp.full((1, 2), 1e30)}, tx.init(params), loss_scale=2.0**-60)[1].skipped)
    # Plain SGD squares nothing.
    tx = fusedopt.sgd(0.1)
    updates, state = tx.update({"w": jnp.full((1, 2), 1e30)}, tx.init(params))
    assert not bool(state.skipped)
    np.testing.assert_allclose(updates["w"], -1e29, rtol=1e-6)


@pytest.mark.parametrize(("value", "skipped"), [(1.8446742e19, False), (1.8446744e19, True), (-1.8446744e19, True)])
def test_the_bound_where_gradients_are_squared(value, skipped):
    params, tx = {"w": jnp.ones((1, 2))}, fusedopt.adam(0.1)
    _, state = tx.update({"w": jnp.array([[1.0, value]], jnp.float32)}, tx.init(params))
    assert bool(state.skipped) == skipped


# ------------------------------------------------------------------------------------- has_nan


def test_has_nan_looks_at_floats_only():
    clean = {"a": jnp.ones(3), "none": None, "i": jnp.array([2**31 - 1]), "h": jnp.float16(60000), "f": 1.5}
    assert not bool(fusedopt.has_nan(clean))
    float0 = np.zeros((2,), jax.dtypes.float0)
    assert not bool(fusedopt.has_nan([clean, float0, jax.random.key(0)]))
    for bad in (NAN, jnp.bfloat16(INF), np.float64(-INF), jnp.array([[1.0, NAN]])):
        assert bool(fusedopt.has_nan([clean, bad, float0]))
    assert not bool(fusedopt.has_nan({}))
    assert bool(fusedopt.has_nan(fusedopt.pack({"w": jnp.array([NAN])})))
    assert not bool(fusedopt.has_nan({"large": jnp.full(4, 3e38)}))


# ------------------------------------------------------------------- zeros and subnormals, clipping


@pytest.mark.parametrize("factory", [fusedopt.sgd, fusedopt.adam])
def test_r135_signed_zeros_and_subnormals_are_finite(factory):
    """Neither is a reason to skip. XLA on CPU flushes subnormal results to zero, so 1e-40 acts as 0."""
    params, tx = {"w": jnp.ones((1, 4))}, factory(0.1)
    grads = {"w": jnp.array([[0.0, -0.0, 1e-40, -1e-40]], jnp.float32)}
    updates, state = tx.update(grads, tx.init(params))
    assert not bool(state.skipped)
    np.testing.assert_array_equal(updates["w"], 0.0)
    # SGD: -lr*g has the other sign. Adam: the moment is 0 + -0, which is 0, and the update -0 for both.
    signs = [True, False] if factory is fusedopt.sgd else [True, True]
    assert list(np.signbit(np.asarray(updates["w"])[0, :2])) == signs


def test_r59_r61_clipping_is_optaxs_and_its_edges_are_caught():
    """With `optax.clip_by_global_norm` in front: 0/0 becomes a skipped step, float16 squares overflow to zero."""
    params = {"w": jnp.ones((1, 2))}
    tx = fusedopt.chain(optax.clip_by_global_norm(0.0), fusedopt.adam(0.1))
    with jax.numpy_dtype_promotion("standard"):
        updates, state = tx.update({"w": jnp.zeros((1, 2))}, tx.init(params), params)
        assert_equal(updates, {"w": jnp.zeros((1, 2))})  # optax.adam: NaN
        assert bool(state[-1].skipped)
        half = {"w": jnp.ones((1, 2), jnp.float16)}
        tx = fusedopt.chain(optax.clip_by_global_norm(1.0), fusedopt.sgd(1.0))
        updates, state = tx.update({"w": jnp.full((1, 2), 300.0, jnp.float16)}, tx.init(half), half)
    # The norm of optax 0.2.8 is infinite in float16, and 300/inf is 0: a limit of the clip, not of the step.
    np.testing.assert_array_equal(np.asarray(updates["w"], np.float32), 0.0)
    assert not bool(state[-1].skipped)
    clipped = fusedopt.chain(optax.clip(1.0), fusedopt.sgd(1.0))
    updates, _ = clipped.update({"w": jnp.array([[-3.0, 0.5]])}, clipped.init(params), params)
    np.testing.assert_array_equal(updates["w"], [[1.0, -0.5]])
