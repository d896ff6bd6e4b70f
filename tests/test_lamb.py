"""LAMB: its ratio by hand, its edge cases, and what differs from optax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fusedopt
from tests.helpers import assert_equal, filled, gradients, standard_promotion

ULPS = 1e-6
"""Relative: a few roundings of float32 in moments, norms, ratio and update."""


def row(*values, dtype=jnp.float32):
    return jnp.asarray([values], dtype)


def step(tx, g, p, n=1):
    state, update = tx.init(p), jax.jit(tx.update)
    with standard_promotion():
        for _ in range(n):
            u, state = update(g, state, p)
            p = optax.apply_updates(p, u)
    return u, state, p


@pytest.mark.parametrize("shape", [(2,), (1, 2)])
def test_R69_without_weight_decay_the_ratio_still_applies(shape):
    p, g = jnp.reshape(jnp.array([3.0, 4.0]), shape), jnp.reshape(jnp.array([2.0, -2.0]), shape)
    for module in (fusedopt, optax):
        u, _, _ = step(module.lamb(0.1, eps=0.0), g, p)
        np.testing.assert_allclose(u.reshape(-1), [-0.353553, 0.353553], rtol=2e-5)  # optax's first step is 1.3e-5 off
    tx = fusedopt.lamb(0.1, eps=0.0)
    u, state, _ = step(tx, g, p)
    np.testing.assert_allclose(u.reshape(-1), [-0.5 / np.sqrt(2), 0.5 / np.sqrt(2)], rtol=ULPS)
    np.testing.assert_allclose(list(tx.trust_ratios(state).values()), 5 / np.sqrt(2), rtol=ULPS)


def test_R72_the_ratio_has_a_limit_only_if_one_is_asked_for():
    p, g = row(600.0, 800.0), row(1.0, 0.0)  # |w| = 1000, |d| = 1
    for limit, want in ((None, 1000.0), (10.0, 10.0)):
        u, _, _ = step(fusedopt.lamb(1.0, eps=0.0, max_trust_ratio=limit), g, p)
        np.testing.assert_allclose(u, row(-want, 0.0), rtol=ULPS)
    tx = fusedopt.lamb(1.0)
    with pytest.raises(ValueError, match="`max_trust_ratio` cannot be set"):
        tx.update(g, tx.init(p), p, max_trust_ratio=10.0)


def test_R84_a_leaf_of_zeros_stays_finite_and_learns():
    params = {"zero": jnp.zeros((2, 3)), "one": jnp.ones((2, 3)), "large": jnp.zeros((200, 100))}
    grads = {"zero": jnp.ones((2, 3)), "one": jnp.zeros((2, 3)), "large": jnp.zeros((200, 100))}
    tx = fusedopt.lamb(0.1, eps=1e-6)
    _, state, new = step(tx, grads, params, 10)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((new, state)))
    assert np.all(new["zero"] < 0)
    assert_equal({k: new[k] for k in ("one", "large")}, {k: params[k] for k in ("one", "large")})


def test_every_leaf_has_a_ratio_unless_a_mask_or_a_group_says_otherwise():
    params = filled({"w": (3, 4), "b": (4,), "head": (3, 5)})
    paths = {("w",), ("b",), ("head",)}
    group = fusedopt.Group("head", lambda path, leaf: path == ("head",), trust_ratio=False)
    for options, want in (
        ({}, paths),
        ({"trust_ratio_mask": fusedopt.weight_mask}, paths - {("b",)}),
        ({"groups": [group]}, paths - {("head",)}),
    ):
        tx = fusedopt.lamb(0.1, **options)
        _, state, _ = step(tx, params, params)
        assert tx.trust_ratios(state).keys() == want
    adamw, _, _ = step(fusedopt.adamw(0.1, eps=1e-6, weight_decay=0.0), params, params)
    lamb, _, _ = step(fusedopt.lamb(0.1, trust_ratio_mask=fusedopt.weight_mask), params, params)
    np.testing.assert_allclose(lamb["b"], adamw["b"], rtol=ULPS)


@pytest.mark.parametrize("solo_from", [None, pytest.param(4, marks=pytest.mark.slow)])
def test_a_skipped_step_changes_nothing_and_a_gradient_that_cannot_be_squared_is_one(solo_from):
    params = jax.tree.map(jnp.asarray, filled({"w": (3, 5), "b": (7,)}))
    tx = fusedopt.lamb(0.1, packing=fusedopt.Packing(solo_from=solo_from))
    _, state, new = step(tx, params, params)
    for bad in (jnp.nan, jnp.inf, 2e19, -3e38):
        g = {**params, "w": params["w"].at[1, 2].set(bad)}
        after, skipped = jax.jit(tx.apply)(g, state, new)
        assert skipped.skipped
        assert_equal(after, new)
        assert_equal(skipped._replace(skipped=state.skipped, total_skipped=state.total_skipped), state)


def test_norms_neither_overflow_nor_underflow_where_those_of_optax_do():
    for size in (1e25, 1e-25):
        p, g = jnp.full((2, 8), size), jnp.ones((2, 8))
        u, _, _ = step(fusedopt.lamb(0.1, eps=0.0), g, p)
        np.testing.assert_allclose(u, -0.1 * size, rtol=ULPS)  # |w|/|d| = size
        theirs, _, _ = step(optax.lamb(0.1, eps=0.0), g, p)
        assert not np.allclose(theirs, -0.1 * size, rtol=0.1)


def test_bfloat16_leaves_have_float32_norms():
    p, g = jnp.full((4, 2048), 2.0, jnp.bfloat16), jnp.full((4, 2048), 1e-3, jnp.bfloat16)
    u, _, _ = step(fusedopt.lamb(0.1, eps=0.0), g, p)
    np.testing.assert_allclose(u.astype(jnp.float32), -0.2, rtol=4e-3)  # bfloat16


@pytest.mark.slow
def test_a_hundred_leaves_in_one_bucket_have_the_ratios_of_optax():
    params = filled({f"l{i}": {"kernel": (4, 1 + i % 9), "bias": (3,)} for i in range(50)})
    grads = jax.tree.map(lambda x: x[0], gradients(params, 1))
    ours, _, _ = step(fusedopt.lamb(0.1, weight_decay=0.01), grads, params)
    theirs, _, _ = step(optax.lamb(0.1, weight_decay=0.01, mask=fusedopt.weight_mask), grads, params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=3e-5), ours, theirs)
