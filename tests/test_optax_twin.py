"""Every optimizer against its optax twin with the same masks; and where the two part on purpose, both values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fusedopt
from tests.helpers import OPTIMIZERS, assert_close, case, flat_runs, optax_params, problem, standard_promotion

FAST = ("adamw", "lars_optax_nesterov")  # the others with `-m slow`


@pytest.mark.parametrize(
    "name",
    [pytest.param(c.name, marks=() if c.name in FAST else pytest.mark.slow) for c in OPTIMIZERS if c.twin is not None],
)
def test_100_steps_end_where_the_optax_twin_does(name):
    params, grads = problem()
    got = flat_runs(name)[1e-2][0].tree
    # Two float32 runs, each within a few roundings a step of the exact one; optax's own bias corrections are 1.3e-5
    # off in the first step and add about 1e-7 of the parameters in 100 steps at this learning rate.
    assert_close(got, optax_params(case(name).twin(1e-2), params, grads), 1e-6)


def row(*values, dtype=jnp.float32):
    return jnp.asarray([values], dtype)  # (1, n): a weight, where a vector would be a bias


def first_update(tx, g, p):
    with standard_promotion():
        return jax.jit(lambda g, p: tx.update(g, tx.init(p), p)[0])(g, p)


def test_R32_the_first_adam_step_is_the_learning_rate_where_optax_is_a_hundred_thousandth_off():
    g, p = row(2.0), row(1.0)
    ours, theirs = (float(first_update(m.adam(0.1), g, p)[0, 0]) for m in (fusedopt, optax))
    assert ours == pytest.approx(-0.0999999995, rel=2.5e-7)
    assert theirs == pytest.approx(-0.09999933, rel=1e-7)


def test_R33_a_decay_near_one_still_steps_where_optax_stands_still():
    g, p = row(1.0), row(1.0)
    ours, theirs = (float(first_update(m.adam(0.1, b2=0.99999999), g, p)[0, 0]) for m in (fusedopt, optax))
    assert ours == pytest.approx(-0.1, rel=2.5e-7)
    assert theirs == 0.0
    with pytest.raises(ValueError, match=r"`b2`: expected a number in \[0, 1\), got 1.0"):
        fusedopt.adam(0.1, b2=1.0)


def test_R34_eps_is_outside_the_root_and_after_the_bias_correction():
    g, p = row(1e-8), row(1.0)
    # 2.5e-7: three roundings of float32.
    for module in (fusedopt, optax):
        np.testing.assert_allclose(first_update(module.adam(0.1), g, p), -0.05, rtol=2e-5)
    np.testing.assert_allclose(first_update(fusedopt.adam(0.1), g, p), -0.05, rtol=2.5e-7)
    inside = first_update(fusedopt.adam(0.1, eps_inside=True), g, p)
    np.testing.assert_allclose(inside, -3.16227e-7, rtol=1e-5)  # .1*sqrt(.001)/.1 * 1e-9/sqrt(1e-8)


def test_nesterov_adam_has_the_values_of_optax():
    g, p = row(2.0), row(1.0)
    for module in (fusedopt, optax):
        tx = module.adam(0.1, nesterov=True)
        state = tx.init(p)
        with standard_promotion():
            update = jax.jit(tx.update)
            u1, state = update(g, state, p)
            u2, state = update(g, state, p)
        # optax's bias corrections are 1.3e-5 off.
        np.testing.assert_allclose([u1[0, 0], u2[0, 0]], [-0.1473684, -0.1157312], rtol=2e-5)


def test_R77_momentum_and_nesterov_without_dampening_and_with_the_learning_rate_outside():
    g, p = row(1.0), row(1.0)

    def updates(tx, grads, rates=(None, None)):
        state, out, update = tx.init(p), [], jax.jit(tx.update)
        for g, rate in zip(grads, rates, strict=True):
            with standard_promotion():
                u, state = update(g, state, p, **({} if rate is None else {"learning_rate": rate}))
            out.append(float(u[0, 0]))
        return out

    for module in (fusedopt, optax):
        # 2.5e-7: two or three roundings of float32.
        np.testing.assert_allclose(updates(module.sgd(0.1, 0.9), [g, g]), [-0.1, -0.19], rtol=2.5e-7)
        np.testing.assert_allclose(updates(module.sgd(0.1, 0.9, True), [g, g]), [-0.19, -0.271], rtol=2.5e-7)
    g = row(0.8)
    np.testing.assert_allclose(updates(fusedopt.sgd(1.0, 0.9), [g, g], [1.0, 0.1]), [-0.8, -0.152], rtol=2.5e-7)


def test_a_denominator_of_zero_gives_no_update_where_optax_gives_nan():
    g, p = row(0.0), row(1.0)
    assert float(first_update(fusedopt.adam(0.1, eps=0.0, nesterov=True), g, p)[0, 0]) == 0.0
    assert np.isnan(first_update(optax.adam(0.1, eps=0.0, nesterov=True), g, p)[0, 0])
    assert float(first_update(fusedopt.adam(0.1, eps=0.0, eps_inside=True), g, p)[0, 0]) == 0.0


def test_R15_a_traced_weight_decay_of_zero_leaves_an_infinite_parameter_its_update_where_optax_gives_nan():
    g, p = row(1.0), row(np.inf)
    for module, want in ((fusedopt, -0.1), (optax, np.nan)):
        step = jax.jit(lambda wd, module=module: first_update(module.adamw(0.1, weight_decay=wd), g, p))
        np.testing.assert_allclose(step(jnp.float32(0)), want, rtol=2e-5)  # NaN equals NaN here


def test_the_default_masks_differ_from_those_of_optax_in_biases_only():
    params = {"w": row(1.0, 1.0), "b": jnp.ones(2)}
    grads = jax.tree.map(jnp.zeros_like, params)
    ours = first_update(fusedopt.adamw(1.0, weight_decay=0.1), grads, params)
    theirs = first_update(optax.adamw(1.0, weight_decay=0.1), grads, params)
    np.testing.assert_allclose(ours["w"], theirs["w"], rtol=2.5e-7)
    np.testing.assert_array_equal(ours["b"], 0.0)
    np.testing.assert_allclose(theirs["b"], -0.1, rtol=2.5e-7)


MASKS = {
    "all": True,
    "none": False,
    "tree": {"w": False, "b": True},
    "callable": lambda tree: {k: k == "w" for k in tree},
}
OWN_MASK = {
    "adamw": lambda module, mask, trust_ratio=None: module.adamw(0.1, weight_decay=0.1, mask=mask),
    "lars decay": lambda module, mask, **options: module.lars(
        0.1, 0.1, weight_decay_mask=mask, trust_ratio_mask=fusedopt.weight_mask, **options
    ),
    "lars trust ratio": lambda module, mask, **options: module.lars(
        0.1, 0.1, weight_decay_mask=fusedopt.weight_mask, trust_ratio_mask=mask, **options
    ),
}


@pytest.mark.parametrize("optimizer", OWN_MASK)
@pytest.mark.parametrize("mask", [pytest.param(m, marks=() if m == "tree" else pytest.mark.slow) for m in MASKS])
def test_an_optax_mask_means_the_same_to_both(optimizer, mask):
    params = {"w": row(1.0, 2.0), "b": jnp.array([3.0, 1.0])}
    grads = jax.tree.map(lambda x: x * x - 0.5, params)
    make = OWN_MASK[optimizer]
    ours = first_update(make(fusedopt, MASKS[mask], trust_ratio="optax"), grads, params)
    theirs = first_update(make(optax, MASKS[mask]), grads, params)
    for key in params:  # optax's first Adam step is 1.3e-5 off
        np.testing.assert_allclose(ours[key], theirs[key], rtol=2e-5)
