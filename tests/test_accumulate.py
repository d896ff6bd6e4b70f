"""`accumulate=k`: one step for k gradients, and what `optax.MultiSteps` makes of our optimizers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fusedopt
from tests.helpers import (
    NAMED,
    assert_close,
    assert_equal,
    case,
    each_once,
    filled,
    final_params,
    gradients,
    standard_promotion,
)

SHAPES = {"conv": {"kernel": (3, 1, 2, 5), "bias": (129,)}, "big": (130, 130)}


def means(stacked, k):
    return jax.tree.map(lambda x: x.reshape(-1, k, *x.shape[1:]).mean(1, dtype=np.float64).astype(np.float32), stacked)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(n, m, marks=() if (n, m) == ("adamw", "flat_apply") else pytest.mark.slow)
        for n, m in each_once(["update", "apply", "flat_apply"], all_of=("adamw", "lamb"))
    ],
)
def test_k_gradients_are_one_step_with_their_mean(name, mode):
    params = filled(SHAPES)
    grads = gradients(params, 12)
    got = final_params(case(name).make(1e-2, accumulate=3), mode, params, grads)
    # The mean is rounded three times here.
    assert_close(got, final_params(case(name).make(1e-2), "update", params, means(grads, 3)), 2e-6)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "adamw" else pytest.mark.slow) for n in NAMED])
def test_R54_multi_steps_of_optax_around_every_optimizer(name):
    params = filled(SHAPES)
    grads = gradients(params, 6)
    tx = optax.MultiSteps(case(name).make(1e-2), 3).gradient_transformation()
    with standard_promotion():
        got = final_params(tx, "update", params, grads)
    # Its running mean has two roundings a gradient more.
    assert_close(got, final_params(case(name).make(1e-2), "update", params, means(grads, 3)), 4e-6)


def steps(tx, grads, p, protocol="apply", **extra):
    state, trail = tx.init(p), []
    step = jax.jit(getattr(tx, protocol))
    for g in grads:
        out, state = step({"w": jnp.full(p["w"].shape, g)}, state, p, **extra)
        p = out if protocol == "apply" else optax.apply_updates(p, out)
        trail.append(
            (
                float(p["w"][0, 0]),
                int(state.count),
                int(state.micro_step),
                bool(state.skipped),
                int(state.total_skipped),
            )
        )
    return trail, state


@pytest.mark.parametrize("protocol", ["apply", "update"])
def test_R55_a_gradient_that_is_not_finite_is_left_out_and_counted(protocol):
    p = {"w": jnp.zeros((1, 2))}
    trail, _ = steps(fusedopt.sgd(1.0, accumulate=2), [np.nan, 1.0, 3.0, np.inf, 1.0, 1.0], p, protocol)
    # parameter, count, micro_step, skipped, total_skipped
    assert trail == [
        (0.0, 0, 0, True, 1),
        (0.0, 0, 1, False, 1),
        (-2.0, 1, 0, False, 1),
        (-2.0, 1, 0, True, 2),
        (-2.0, 1, 1, False, 2),
        (-3.0, 2, 0, False, 2),
    ]


def test_R56_training_resumes_after_a_nan_where_multi_steps_around_optax_stands_still():
    p, grads = {"w": jnp.zeros((1, 2))}, [1.0, np.nan, 3.0, 1.0, 1.0]
    trail, _ = steps(fusedopt.adam(0.1, eps=0.0, accumulate=2), grads, p)
    np.testing.assert_allclose([w for w, *_ in trail], [0, 0, -0.1, -0.1, trail[-1][0]], rtol=3e-7)
    assert trail[-1][0] < -0.15

    def around(tx, **options):
        """The parameter after each gradient."""
        tx, q, trail = optax.MultiSteps(tx, 2, **options), p, []
        state, update = tx.init(q), jax.jit(tx.update)
        with standard_promotion():
            for g in grads:
                u, state = update({"w": jnp.full((1, 2), g)}, state, q)
                q = optax.apply_updates(q, u)
                trail.append(float(q["w"][0, 0]))
        return trail

    # NaN times 0 stays in its sum; with its own guard it goes on, and with ours inside too.
    assert around(optax.apply_if_finite(optax.adam(0.1), 5))[-1] == 0.0
    resumed = around(fusedopt.adam(0.1, eps=0.0), should_skip_update_fn=optax.skip_not_finite)
    np.testing.assert_allclose(resumed, [w for w, *_ in trail], rtol=1e-6)


def test_between_steps_only_the_sum_changes():
    params = filled(SHAPES)
    tx = fusedopt.adamw(0.1, accumulate=2, ema_decay=0.9, clip_norm=1.0)
    step = jax.jit(tx.apply)
    g = jax.tree.map(jnp.ones_like, params)
    state = tx.init(params)
    for _ in range(2):
        params, state = step(g, state, params)
    held, after = step(g, state, params)
    assert_equal(held, params)
    assert after.micro_step == 1
    assert not after.skipped
    unchanged = {"accumulated": state.accumulated, "micro_step": state.micro_step}
    assert_equal(after._replace(**unchanged), state)
    assert all(np.any(x) for x in after.accumulated)
    assert [x.dtype for x in after.accumulated] == [jnp.float32] * len(after.mu)


def test_the_schedule_counts_steps_and_the_scale_is_undone_for_each_gradient():
    p = {"w": jnp.zeros((1, 2))}
    tx = fusedopt.sgd(lambda count: jnp.where(count == 0, 1.0, 0.1), accumulate=2)
    trail, _ = steps(tx, [8.0, 8.0, 8.0, 8.0], p, loss_scale=jnp.float32(8.0))
    np.testing.assert_allclose([w for w, *_ in trail], [0, -1, -1, -1.1], rtol=2e-7)


def test_bfloat16_gradients_are_summed_in_float32():
    """In bfloat16, 1 + 1/512 is 1: half of each small gradient would be lost."""
    p = {"w": jnp.zeros((1, 2), jnp.bfloat16)}
    tx = fusedopt.sgd(1.0, accumulate=4, master_weights=True)
    state = tx.init(p)
    for g in (1.0, 2**-9, 2**-9, 2**-9):
        p, state = jax.jit(tx.apply)({"w": jnp.full((1, 2), g, jnp.bfloat16)}, state, p)
    np.testing.assert_allclose(state.master[0][:2], -(1 + 3 * 2**-9) / 4, rtol=1.2e-7)


def test_a_leaf_without_a_gradient_adds_nothing():
    params = {"a": jnp.zeros((2, 2)), "b": jnp.zeros((200, 200)), "c": jnp.zeros((2, 2))}
    tx = fusedopt.sgd(1.0, accumulate=2)
    state = tx.init(params)
    params, state = jax.jit(tx.apply)({**params, "a": jnp.ones((2, 2)), "b": None, "c": None}, state, params)
    ones = jax.tree.map(jnp.ones_like, params)
    params, state = jax.jit(tx.apply)(ones, state, params)
    assert [float(params[k][0, 0]) for k in "abc"] == [-1.0, -0.5, -0.5]


def test_wrong_numbers_are_refused():
    for value in (0, -1):
        with pytest.raises(ValueError, match="`accumulate`: expected a positive int"):
            fusedopt.sgd(0.1, accumulate=value)
    for value in (2.0, True, jnp.array(2)):
        with pytest.raises(TypeError, match="`accumulate` is static"):
            fusedopt.sgd(0.1, accumulate=value)


def test_scan_over_micro_batches_is_the_loop():
    params = filled({"w": (3, 5), "b": (5,)})
    tx = fusedopt.adamw(0.1, accumulate=2)
    stacked = gradients(params, 4)

    def body(carry, g):
        params, state = carry
        return tx.apply(g, state, params), state.skipped

    (scanned, _), _ = jax.jit(lambda p, s, g: jax.lax.scan(body, (p, s), g))(params, tx.init(params), stacked)
    assert_equal(scanned, final_params(tx, "apply", params, stacked))
