"""`ema_decay`: an average of the parameters that moves with the step, and not with a skipped one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fusedopt
from tests.helpers import assert_close, assert_equal, case, gradients, ragged, standard_promotion


def run(tx, params, stacked, mode="apply"):
    """The parameters after each step as trees, and the last state."""
    held = fusedopt.pack(params, tx) if mode == "flat" else params
    state, trail = tx.init(held), []
    step = jax.jit(tx.update if mode == "update" else tx.apply)
    for i in range(len(jax.tree.leaves(stacked)[0])):
        g = jax.tree.map(lambda x, i=i: jnp.asarray(x[i]), stacked)
        out, state = step(fusedopt.pack(g, tx) if mode == "flat" else g, state, held)
        held = optax.apply_updates(held, out) if mode == "update" else out
        trail.append(held.tree if mode == "flat" else held)
    return trail, state, held


def test_R62_an_average_moves_with_a_step_and_not_with_a_skipped_one():
    p = {"w": jnp.ones((1, 2))}
    tx = fusedopt.sgd(0.1, ema_decay=0.9)
    state = tx.init(p)
    step = jax.jit(tx.apply)
    p, state = step({"w": jnp.ones((1, 2))}, state, p)
    np.testing.assert_allclose(tx.ema_params(state, p)["w"], 0.99, rtol=1.2e-7)  # one rounding
    p, state = step({"w": jnp.full((1, 2), jnp.nan)}, state, p)
    np.testing.assert_allclose(tx.ema_params(state, p)["w"], 0.99, rtol=1.2e-7)
    # What a chain of an optimizer and an average makes of it: the average moves on towards the parameter.
    assert 0.99 + 0.1 * (0.9 - 0.99) == pytest.approx(0.981)


@pytest.mark.parametrize("debias", [False, True])
@pytest.mark.parametrize(
    "mode", ["flat", pytest.param("apply", marks=pytest.mark.slow), pytest.param("update", marks=pytest.mark.slow)]
)
def test_the_average_is_that_of_the_parameters_after_each_step(mode, debias):
    params = ragged()
    tx = case("adamw").make(1e-2, ema_decay=0.8, ema_debias=debias)
    trail, state, held = run(tx, params, gradients(params, 5), mode)
    want = jax.tree.map(lambda x: 0.0 if debias else np.float64(x), params)
    for now in trail:
        want = jax.tree.map(lambda e, w: 0.8 * e + 0.2 * np.float64(w), want, now)
    if debias:
        want = jax.tree.map(lambda e: e / (1 - 0.8**5), want)
    got = tx.ema_params(state, held)
    assert_close(got.tree if mode == "flat" else got, want, 1e-6)  # 5 float32 steps of 3 roundings


def test_an_average_of_parameters_that_stand_still_is_them():
    """0.9999 and 1 - 0.9999 do not add up to 1 in float32: the usual formula ends 3e-4 off."""
    p = {"w": jnp.full((1, 3), 0.7)}
    tx = fusedopt.sgd(0.0, ema_decay=0.9999)
    step = jax.jit(lambda p, s: jax.lax.fori_loop(0, 20_000, lambda _, c: tx.apply(p, c[1], c[0]), (p, s)))
    new, state = step(p, tx.init(p))
    assert_equal(tx.ema_params(state, new), p)


def test_leaves_without_an_average_are_the_parameters():
    params = {"w": jnp.ones((2, 3), jnp.bfloat16), "frozen": jnp.ones((4, 4)), "steps": jnp.arange(3), "none": None}
    group = fusedopt.Group("fixed", {"w": False, "frozen": True, "steps": False, "none": False}, frozen=True)
    tx = fusedopt.adamw(0.5, ema_decay=0.5, groups=[group])
    state = tx.init(params)
    grads = {**jax.tree.map(jnp.ones_like, params), "steps": np.zeros(3, jax.dtypes.float0)}
    new, state = jax.jit(tx.apply)(grads, state, params)
    average = jax.jit(tx.ema_params)(state, new)
    assert jax.tree.structure(average) == jax.tree.structure(params)
    assert average["w"].dtype == jnp.bfloat16
    np.testing.assert_allclose(average["w"].astype(jnp.float32), 0.75, rtol=4e-3)  # half of the step; bfloat16
    assert_equal({k: average[k] for k in ("frozen", "steps")}, {k: params[k] for k in ("frozen", "steps")})


def test_the_average_of_a_bfloat16_parameter_that_cannot_move_does_not_move_either():
    p = {"w": jnp.ones((1, 3), jnp.bfloat16)}
    tx = fusedopt.sgd(1e-3, ema_decay=0.5)
    step, state = jax.jit(tx.apply), tx.init(p)
    for _ in range(3):
        p, state = step(p, state, p)
    np.testing.assert_array_equal(p["w"].astype(jnp.float32), 1.0)
    np.testing.assert_array_equal(state.ema[0][:3], 1.0)
    tx = fusedopt.sgd(1e-3, ema_decay=0.5, master_weights=True)  # with a master it does
    p, state = jax.jit(tx.apply)(p, tx.init(p), p)
    np.testing.assert_allclose(state.ema[0][:3], 0.9995, rtol=1.2e-7)


def test_a_leaf_without_a_gradient_keeps_its_average():
    params = {"a": jnp.ones((2, 2)), "b": jnp.ones((2, 2)), "c": jnp.ones((200, 100))}
    tx = fusedopt.sgd(0.5, ema_decay=0.5, ema_debias=True)
    state = tx.init(params)
    grads = {"a": jnp.ones((2, 2)), "b": None, "c": None}
    new, state = jax.jit(tx.apply)(grads, state, params)
    average = tx.ema_params(state, new)
    np.testing.assert_array_equal(average["a"], 0.5)
    np.testing.assert_array_equal(average["b"], 0.0)  # it has not begun
    np.testing.assert_array_equal(average["c"], 0.0)


def test_the_decay_is_an_operand_and_may_be_a_schedule():
    p = {"w": jnp.ones((1, 2))}
    g = {"w": jnp.ones((1, 2))}
    tx = fusedopt.sgd(0.1, ema_decay=lambda count: jnp.where(count == 0, 0.0, 0.5))
    state = tx.init(p)
    step = jax.jit(tx.apply)
    p, state = step(g, state, p)
    np.testing.assert_allclose(tx.ema_params(state, p)["w"], 0.9, rtol=1.2e-7)
    p, state = step(g, state, p)
    np.testing.assert_allclose(tx.ema_params(state, p)["w"], 0.85, rtol=1.2e-7)
    plain = fusedopt.sgd(0.1, ema_decay=0.5)
    p, state = jax.jit(plain.apply)(g, plain.init(p), p, ema_decay=0.0)
    assert_equal(plain.ema_params(state, p), p)


def test_a_chain_and_masked_states_are_read_and_what_has_no_average_says_so():
    p = {"w": jnp.ones((1, 2))}
    tx = fusedopt.chain(optax.scale(2.0), fusedopt.sgd(0.1, ema_decay=0.5))
    new, state = jax.jit(tx.apply)(p, tx.init(p), p)
    np.testing.assert_allclose(tx.ema_params(state, new)["w"], 0.9, rtol=1.2e-7)
    plain = fusedopt.sgd(0.1)
    with pytest.raises(ValueError, match="make it with `ema_decay`"):
        plain.ema_params(plain.init(p), p)
    with pytest.raises(ValueError, match=r"`ema_decay` cannot be set"):
        plain.apply(p, plain.init(p), p, ema_decay=0.5)
    with pytest.raises(ValueError, match="`ema_debias`: expected an `ema_decay`"):
        fusedopt.sgd(0.1, ema_debias=True)
    averaging = fusedopt.sgd(0.1, ema_decay=0.5)
    with pytest.raises(ValueError, match="`params` are needed"):
        averaging.update(p, averaging.init(p))
    with pytest.raises(ValueError, match=r"`state.ema` is of another layout"):
        averaging.ema_params(averaging.init({"w": jnp.ones((1, 2000))}), p)


def test_tree_map_params_sees_averages_and_masters():
    p = {"w": jnp.ones((1, 2), jnp.bfloat16)}
    tx = fusedopt.adamw(0.1, ema_decay=0.5, master_weights=True)
    seen = []
    with standard_promotion():
        optax.tree_map_params(tx, lambda x: seen.append(x.shape), tx.init(p))
    assert len(seen) == 4
