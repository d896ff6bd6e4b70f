"""Numbers at the edges of a dtype: decays close to 1, small epsilons, overflow, counts; and signatures."""

from __future__ import annotations

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fusedopt
from tests.helpers import (
    ROUNDING,
    avals,
    case,
    standard_promotion,
)

BF16, F16, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float16), np.dtype(np.float32)


def constant_gradient(tx, params, grads, steps):
    """The state after `steps` of the same gradient, parameters held fixed, and the last updates."""

    def body(carry, _):
        state, _ = carry
        updates, state = tx.update(grads, state, params)
        return (state, updates), None

    carry = tx.init(params), jax.tree.map(jnp.zeros_like, params)
    return jax.jit(lambda c: jax.lax.scan(body, c, length=steps)[0])(carry)


def test_r07_betas_near_one_are_not_those_of_bfloat16():
    params = {"w": jnp.ones((1, 2), BF16)}
    for b2, nu in ((0.999, 1e-3), (0.9999, 1e-4)):
        tx = fusedopt.adam(0.1, b2=b2)
        _, state = tx.update(params, tx.init(params), params)
        np.testing.assert_allclose(state.nu[0][:2], nu, rtol=1e-6)


@pytest.mark.parametrize("factory", [fusedopt.adam, fusedopt.adamw])
def test_r17_eps_of_1e_8_is_not_zero_in_float16(factory):
    params, tx = (
        {"w": jnp.ones((1, 2), F16)},
        factory(1e-3, **({} if factory is fusedopt.adam else {"weight_decay": 0.0})),
    )
    zeros, state = jax.tree.map(jnp.zeros_like, params), tx.init(params)
    for _ in range(3):
        updates, state = tx.update(zeros, state, params)
        np.testing.assert_array_equal(updates["w"], np.zeros((1, 2), F16))
    with standard_promotion():  # optax: 0/0
        twin = optax.adam(1e-3)
        assert bool(jnp.all(jnp.isnan(twin.update(zeros, twin.init(params))[0]["w"])))


def test_r18_float16_gradients_do_not_underflow_when_squared():
    params, grads = {"w": jnp.ones((1, 2), F16)}, {"w": jnp.full((1, 2), 1e-4, F16)}
    tx = fusedopt.adam(1e-3)
    updates, _ = tx.update(grads, tx.init(params), params)
    # g / (|g| + eps) with g = 1e-4 as float16 has it; the update is rounded to float16.
    g = float(F16.type(1e-4))
    np.testing.assert_allclose(np.asarray(updates["w"], np.float64), -1e-3 * g / (g + 1e-8), rtol=ROUNDING[F16])
    with standard_promotion():
        twin = optax.adam(1e-3)
        assert bool(jnp.all(twin.update(grads, twin.init(params))[0]["w"] == -jnp.inf))


def test_r19_moments_of_bfloat16_parameters_are_float32():
    params = {"w": jnp.ones((1, 2), BF16)}
    state, updates = constant_gradient(fusedopt.adam(1.0), params, params, 3000)
    np.testing.assert_allclose(state.nu[0][:2], 1 - 0.999**3000, rtol=1e-4)  # 0.950287; float32 sums 3000 roundings
    np.testing.assert_allclose(state.mu[0][:2], 1.0, rtol=1e-5)
    np.testing.assert_array_equal(np.asarray(updates["w"], np.float32), -1.0)
    assert state.nu[0].dtype == F32
    with standard_promotion():  # optax: nu sticks at 0.5, and the step is a third too long
        (twin_state, *_), twin_updates = constant_gradient(optax.adam(1.0), params, params, 3000)
        assert float(twin_state.nu["w"][0, 0]) == 0.5
        assert float(twin_updates["w"][0, 0]) < -1.34


MIXED = [(BF16, F32), (F32, BF16), (F16, F32), (BF16, F16)]


@pytest.mark.parametrize(("param", "grad"), MIXED, ids=str)
@pytest.mark.parametrize("name", ["momentum", "adamw", pytest.param("lars", marks=pytest.mark.slow)])
def test_r21_state_dtypes_do_not_depend_on_the_gradients(name, param, grad):
    tx = case(name).make(0.1)
    params, grads = {"w": jnp.ones((2, 3), param)}, {"w": jnp.ones((2, 3), grad)}
    state = tx.init(params)
    updates, after = tx.update(grads, state, params)
    applied, applied_state = tx.apply(grads, state, params)
    assert avals(after) == avals(applied_state) == avals(state)
    assert updates["w"].dtype == applied["w"].dtype == param


def test_r21_scan_of_three_steps_where_optax_changes_dtypes():
    params, grads = {"w": jnp.ones((2, 3), BF16)}, {"w": jnp.ones((2, 3), F32)}

    def three(tx):
        def body(carry, _):
            params, state = carry
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(body, (params, tx.init(params)), length=3)[0]

    with standard_promotion():
        _, state = jax.jit(lambda: three(fusedopt.adamw(0.1)))()
        assert int(state.count) == 3
        with pytest.raises(TypeError, match="scan body function carry"):
            three(optax.adamw(0.1))


@pytest.mark.parametrize("start", [256, 2**24, 2**31 - 2])
def test_r30_the_counter_counts_on(start):
    params, tx = {"w": jnp.ones((1, 2), BF16)}, fusedopt.adam(0.1)
    state = tx.init(params)._replace(count=jnp.int32(start))
    updates, state = tx.update(params, state, params)
    assert (int(state.count), state.count.dtype) == (start + 1, jnp.int32)
    assert bool(jnp.all(jnp.isfinite(updates["w"])))


def test_r30_the_counter_saturates():
    params, tx = {"w": jnp.ones((1, 2))}, fusedopt.adam(0.1)
    state = tx.init(params)._replace(count=jnp.int32(2**31 - 1), total_skipped=jnp.int32(2**31 - 1))
    _, after = tx.update(params, state, params)
    assert int(after.count) == 2**31 - 1
    _, after = tx.update(params, state, params, has_nan=True)
    assert int(after.total_skipped) == 2**31 - 1


def test_r32_the_first_step_is_exact():
    params, grads = {"w": jnp.ones((1, 2))}, {"w": jnp.full((1, 2), 2.0)}
    tx = fusedopt.adam(0.1)
    updates, _ = tx.update(grads, tx.init(params), params)
    np.testing.assert_allclose(updates["w"], -0.0999999995, rtol=2e-7)
    twin = optax.adam(0.1)  # 1 - 0.999 in float32 is off by 1.3e-5
    with standard_promotion():
        np.testing.assert_allclose(twin.update(grads, twin.init(params))[0]["w"], -0.09999933, rtol=1e-7)


def test_r33_a_b2_that_float32_cannot_tell_from_one():
    params, tx = {"w": jnp.ones((1, 2))}, fusedopt.adam(0.1, b2=0.99999999)
    updates, _ = tx.update(params, tx.init(params), params)
    # nu = 1e-8 g*g, so eps = 1e-8 is 1e-8 beside a root of 1.
    np.testing.assert_allclose(updates["w"], -0.1, rtol=1e-6)
    with pytest.raises(ValueError, match=r"`b2`: expected a number in \[0, 1\), got 1.0"):
        fusedopt.adam(0.1, b2=1.0)


def test_r34_eps_stands_outside_the_root():
    params, grads = {"w": jnp.ones((1, 2))}, {"w": jnp.full((1, 2), 1e-8)}
    tx = fusedopt.adam(0.1, eps=1e-8)
    np.testing.assert_allclose(tx.update(grads, tx.init(params))[0]["w"], -0.05, rtol=1e-5)
    inside = fusedopt.adam(0.1, eps=1e-8, eps_inside=True)
    want = 0.1 * np.sqrt(1e-3) / 0.1 * 1e-9 / np.sqrt(1e-3 * 1e-16 + 1e-8)
    np.testing.assert_allclose(inside.update(grads, inside.init(params))[0]["w"], -want, rtol=1e-5)


@pytest.mark.parametrize("kind", ["skip", "look away"])
def test_r35_a_gradient_whose_square_overflows(kind):
    params, tx = {"w": jnp.ones((1, 1))}, fusedopt.adam(0.1, skip_nonfinite=kind == "skip")
    state, skipped = tx.init(params), []
    for g in (1.0, 1e20, 1.0):
        updates, state = tx.update({"w": jnp.full((1, 1), g)}, state, params)
        skipped.append(bool(state.skipped))
    if kind == "skip":
        assert skipped == [False, True, False]
        assert int(state.count) == 2
        np.testing.assert_allclose(updates["w"], -0.1, rtol=1e-6)
    else:  # optax's silent stop: nu is infinite for ever
        assert skipped == [False, False, False]
        np.testing.assert_array_equal(state.nu[0][0], np.inf)
        np.testing.assert_array_equal(updates["w"], 0.0)


def test_r36b_zero_gradient_and_zero_eps():
    params, tx = {"w": jnp.ones((1, 2))}, fusedopt.adam(0.1, eps=0.0)
    zeros = {"w": jnp.zeros((1, 2))}
    updates, _ = tx.update(zeros, tx.init(params), params)
    np.testing.assert_array_equal(updates["w"], 0.0)
    twin = optax.adam(0.1, eps=0.0)
    with standard_promotion():
        assert bool(jnp.all(jnp.isnan(twin.update(zeros, twin.init(params))[0]["w"])))
    # 1e-15 squares to 1e-30; its step is a whole one.
    updates, _ = tx.update({"w": jnp.full((1, 2), 1e-15)}, tx.init(params), params)
    np.testing.assert_allclose(updates["w"], -0.1, rtol=1e-5)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "lars"])
def test_r39_signatures_are_optaxs_with_ours_keyword_only_behind(name):
    """Order and defaults; where a default differs on purpose, both values are stated."""
    ours, theirs = (inspect.signature(getattr(m, name)).parameters for m in (fusedopt, optax))
    differ = {"lars": {"weight_decay_mask": (None, True), "trust_ratio_mask": (None, True)}}.get(name, {})
    positional = [p for p in ours.values() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert [p.name for p in positional] == [
        p.name for p in theirs.values() if p.kind is not inspect.Parameter.KEYWORD_ONLY
    ]
    for p in theirs.values():
        assert (ours[p.name].default, p.default) == differ.get(p.name, (p.default, p.default)), p.name
        assert ours[p.name].kind == p.kind


@pytest.mark.parametrize("name", ["sgd", "adamw", "lars"])
def test_r39_every_argument_is_documented(name):
    factory = getattr(fusedopt, name)
    arguments = factory.__doc__.split("Args:")[1].split("State:")[0]
    documented = {n.strip() for line in re.findall(r"^\s{6}([a-z0-9_, ]+):", arguments, re.M) for n in line.split(",")}
    common = set(re.findall(r"^\s{2}([a-z_]+):", fusedopt.transforms.__doc__, re.M))
    assert documented - {"groups and what follows"} | common == set(inspect.signature(factory).parameters)
