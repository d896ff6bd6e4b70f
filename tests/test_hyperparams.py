"""Hyperparameters are operands: no retrace, one program for all values; schedules."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fusedopt
from tests.helpers import OPTIMIZERS, avals, case, counted, normal, standard_promotion

# Two or three roundings of float32, relative.
ULPS = 2.5e-7
PARAMS = {"w": jnp.asarray(normal((3, 5))), "b": jnp.asarray(normal((5,), 1))}
GRADS = {"w": jnp.asarray(normal((3, 5), 2)), "b": jnp.asarray(normal((5,), 3))}


def row(*values, dtype=jnp.float32):
    return jnp.asarray([values], dtype)


# ------------------------------------------------------------------------------- one program


def test_R01_changing_the_learning_rate_does_not_retrace():
    g, p = jnp.array([2.0]), jnp.array([1.0])
    tx = fusedopt.adam(1.0)
    state = tx.init(p)

    def by_keyword(rate):
        return tx.update(g, state, p, learning_rate=rate)[0]

    def by_state(rate):
        return tx.update(g, tx.set_hyperparams(state, learning_rate=rate), p)[0]

    def by_factory(rate):
        return fusedopt.adam(rate).update(g, state, p)[0]

    for way in (by_keyword, by_state, by_factory):
        step, traces = counted(way)
        step = jax.jit(step)
        updates = [step(jnp.float32(rate)) for rate in (0.1, 0.2, 0.3)]
        np.testing.assert_allclose(np.ravel(updates), [-0.1, -0.2, -0.3], rtol=ULPS)
        assert len(traces) == 1


@pytest.mark.parametrize(
    ("factory", "first", "second"),
    [
        (fusedopt.adamw, {"learning_rate": 1e-3}, {"learning_rate": 0.0}),
        (fusedopt.adamw, {"learning_rate": 1e-3, "weight_decay": 0.0}, {"learning_rate": 1e-3, "weight_decay": 0.1}),
        (
            fusedopt.adamw,
            {"learning_rate": 1, "b1": 0, "b2": 0.5, "eps": 0, "eps_root": 0},
            {"learning_rate": 0.1, "b1": 0.9, "b2": 0.999, "eps": 1e-8, "eps_root": 1e-8},
        ),
        (fusedopt.sgd, {"learning_rate": 1e-3, "momentum": 0.0}, {"learning_rate": 1.0, "momentum": 1.0}),
        (
            fusedopt.lars,
            {"learning_rate": 1.0, "weight_decay": 0.0, "eps": 0.0, "max_trust_ratio": 1},
            {"learning_rate": 2.0, "weight_decay": 0.1, "eps": 1e-3, "max_trust_ratio": 50.0},
        ),
    ],
    ids=["learning rate", "weight decay of 0", "adamw", "sgd", "lars"],
)
def test_R02_two_constants_give_the_same_program(factory, first, second):
    def text(options):
        tx = factory(**options)
        return jax.jit(tx.update).lower(GRADS, tx.init(PARAMS), PARAMS).as_text()

    assert text(first) == text(second)


def test_R02_a_group_hyperparameter_is_an_operand_too():
    def text(decay, scale):
        group = fusedopt.Group("g", {"w": True, "b": False}, weight_decay=decay, learning_rate_scale=scale)
        tx = fusedopt.adamw(1e-3, groups=[group])
        return jax.jit(tx.update).lower(GRADS, tx.init(PARAMS), PARAMS).as_text()

    assert text(0.1, 0.5) == text(0.2, 2.0)


@pytest.mark.parametrize("name", [c.name for c in OPTIMIZERS])
def test_R03_a_state_keeps_its_avals(name):
    tx = case(name).make(1e-2)
    state = tx.init(PARAMS)
    assert not any(x.weak_type for x in jax.tree.leaves(state))
    for step, name in ((tx.update, "updates"), (tx.apply, "params")):
        out, new = jax.eval_shape(step, GRADS, state, PARAMS)
        assert avals(new) == avals(state)
        assert avals(out) == avals(PARAMS), name
    assert avals(jax.eval_shape(tx.init, PARAMS)) == avals(state)


@pytest.mark.parametrize("name", ["adamw", "lars"])
def test_R03_the_step_is_compiled_once(name):
    tx = case(name).make(1e-2)
    state, update = tx.init(PARAMS), jax.jit(tx.update)
    for _ in range(3):
        _, state = update(GRADS, state, PARAMS)
    assert update._cache_size() == 1


@pytest.mark.parametrize(
    "wrap",
    [
        lambda: fusedopt.chain(optax.clip_by_global_norm(1.0), fusedopt.adamw(1e-2)),
        lambda: optax.chain(optax.clip_by_global_norm(1.0), fusedopt.adamw(1e-2)),
        lambda: optax.inject_hyperparams(fusedopt.lars)(1e-2),
        lambda: optax.inject_hyperparams(fusedopt.adamw)(optax.linear_schedule(1.0, 0.0, 9)),
        lambda: fusedopt.adamw(optax.linear_schedule(1.0, 0.0, 9), weight_decay=jnp.float32(0.1)),
    ],
    ids=["chain", "optax.chain", "inject_hyperparams", "injected schedule", "schedule and array"],
)
def test_R03_a_wrapped_state_keeps_its_avals_too(wrap):
    with standard_promotion():
        tx = wrap()
        state = jax.tree.map(jnp.asarray, tx.init(PARAMS))
        _, new = jax.eval_shape(tx.update, GRADS, state, PARAMS)
        assert avals(new) == avals(state)


def test_R05_a_decay_may_change_every_step_without_a_retrace():
    tx = fusedopt.adam(0.1, eps=0.0)
    p = row(1.0)
    step, traces = counted(lambda g, state, b1: tx.update(g, state, p, b1=b1))
    step = jax.jit(step)
    state, m, v = tx.init(p), 0.0, 0.0
    for t, (b1, g) in enumerate([(0.9, 1.0), (0.95, -2.0), (0.9, 0.5)], 1):
        u, state = step(row(g), state, jnp.float32(b1))
        # This step's b1, in m and in 1 - b1^t alike.
        m, v = b1 * m + (1 - b1) * g, 0.999 * v + 0.001 * g * g
        want = -0.1 * (m / (1 - b1**t)) / np.sqrt(v / (1 - 0.999**t))
        # 1 - b1 of a b1 that arrives in float32 has the rounding of b1, 6e-8/2, divided by 1 - b1.
        np.testing.assert_allclose(u[0, 0], want, rtol=2e-6)
    assert len(traces) == 1
    np.testing.assert_allclose(tx.hyperparams(state)["b1"], 0.9, rtol=ULPS)


def test_R09_each_member_of_an_ensemble_has_its_own_learning_rate():
    g = p = jnp.ones((2, 3))
    rates = jnp.array([0.1, 0.2])
    tx = fusedopt.adam(1.0)
    state = jax.vmap(tx.init)(p)
    updates, _ = jax.jit(jax.vmap(lambda g, s, p, rate: tx.update(g, s, p, learning_rate=rate)))(g, state, p, rates)
    np.testing.assert_allclose(updates, [[-0.1] * 3, [-0.2] * 3], rtol=ULPS)
    state = jax.vmap(lambda s, rate: tx.set_hyperparams(s, learning_rate=rate))(state, rates)
    updates, _ = jax.jit(jax.vmap(tx.update))(g, state, p)
    np.testing.assert_allclose(updates, [[-0.1] * 3, [-0.2] * 3], rtol=ULPS)


# --------------------------------------------------------------------------------- schedules


def test_R10_a_schedule_sees_the_counts_from_0():
    g, p = jnp.ones(2), jnp.ones(2)
    identity = lambda count: 1.0 * count.astype(jnp.float32)  # noqa: E731
    for tx in (fusedopt.sgd(identity), optax.inject_hyperparams(fusedopt.sgd)(identity)):
        state, update, updates = tx.init(p), jax.jit(tx.update), []
        for _ in range(3):
            u, state = update(g, state, p)
            updates.append(float(u[0]))
        assert updates == [0.0, -1.0, -2.0]


def test_R13_weight_decay_may_be_a_schedule():
    p = row(1.0, 1.0)
    g = jnp.zeros_like(p)
    tx = fusedopt.adamw(1.0, weight_decay=lambda count: 0.1 * (count.astype(jnp.float32) + 1))
    state, update = tx.init(p), jax.jit(tx.update)
    for want in (-0.1, -0.2):
        u, state = update(g, state, p)
        np.testing.assert_allclose(u, [[want, want]], rtol=ULPS)


def test_R14_the_learning_rate_last_used_and_the_count_are_read_from_the_state():
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    tx = fusedopt.sgd(schedule)
    p = jnp.ones(2)

    @jax.jit
    def step(state):
        _, state = tx.update(p, state, p)
        return state, tx.hyperparams(state)["learning_rate"], optax.tree.get(state, "count")

    state = tx.init(p)
    np.testing.assert_allclose(tx.hyperparams(state)["learning_rate"], 1.0)
    for n in range(1, 4):
        state, rate, count = step(state)
        np.testing.assert_allclose(rate, schedule(n - 1), rtol=ULPS)
        assert count == n


def test_a_schedule_in_the_factory_is_checked_when_it_is_called():
    p = jnp.ones(2)
    with pytest.raises(ValueError, match="`learning_rate`: expected a 0-d array, got shape \\(2,\\)"):
        fusedopt.sgd(lambda count: jnp.ones(2)).init(p)
    with pytest.raises(TypeError, match="`b1` arrives as bfloat16"):
        fusedopt.adam(0.1, b1=lambda count: jnp.bfloat16(0.9)).init(p)
    with pytest.raises(ValueError, match=r"`learning_rate`: expected a number.*got -1.0"):
        fusedopt.sgd(lambda count: -1.0).init(p)
