"""LARS: the two published ratios by hand, its edge cases, and norms that neither overflow nor race."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fusedopt
from tests.helpers import normal, standard_promotion

# A few roundings of float32 in the norms, the ratio and the update, relative.
ULPS = 5e-7

BOTH = pytest.mark.parametrize("form", ["paper", "optax"])


def row(*values, dtype=jnp.float32):
    return jnp.asarray([values], dtype)  # (1, n): a weight, where a vector would be a bias


# Numbers are operands: one compiled step a form serves most of this file.
LARS = {form: fusedopt.lars(9.0, trust_ratio=form) for form in ("paper", "optax")}


def step(form, g, p, state=None, *, learning_rate=1.0, weight_decay=0.0):
    tx = LARS[form]
    state = tx.init(p) if state is None else state
    return jax.jit(tx.update)(g, state, p, learning_rate=learning_rate, weight_decay=weight_decay)


def ratios(form, state):
    return list(LARS[form].trust_ratios(state).values())


def optax_step(tx, g, p):
    with standard_promotion():
        return jax.jit(tx.update)(g, tx.init(p), p)[0]


W, G = row(3.0, 4.0), row(-0.8, 0.6)


def test_R66_the_two_forms_of_the_ratio_by_hand():
    paper, _ = step("paper", G, W, weight_decay=0.1)
    np.testing.assert_allclose(paper, row(0.00166667, -0.00333333), rtol=5e-6)  # six digits written down
    np.testing.assert_allclose(paper, row(0.005 / 1.5 * 0.5, -0.005 / 1.5), rtol=ULPS)
    ours, _ = step("optax", G, W, weight_decay=0.1)
    np.testing.assert_allclose(ours, row(0.00223607, -0.00447214), rtol=5e-6)
    np.testing.assert_allclose(optax_step(optax.lars(1.0, 0.1), G, W), ours, rtol=ULPS)
    # eta = .001*5/(1 + .1*5), read from the state by path.
    tx = fusedopt.lars(1.0, 0.1)
    params = {"fc": {"kernel": W, "bias": jnp.ones(2)}}
    _, state = jax.jit(tx.update)({"fc": {"kernel": G, "bias": jnp.ones(2)}}, tx.init(params), params)
    by_path = tx.trust_ratios(state)
    assert list(by_path) == [("fc", "kernel")]
    np.testing.assert_allclose(by_path["fc", "kernel"], 0.005 / 1.5, rtol=ULPS)


@BOTH
def test_R67_a_leaf_of_zeros_learns_at_the_full_rate(form):
    u, state = step(form, row(1.0, 2.0), row(0.0, 0.0))
    np.testing.assert_array_equal(u, row(-1.0, -2.0))
    assert ratios(form, state) == [1.0]


@BOTH
def test_a_gradient_of_zero_has_ratio_1_and_the_cap_is_not_reached(form):
    u, state = step(form, row(0.0, 0.0), W)
    np.testing.assert_array_equal(np.abs(u), row(0.0, 0.0))
    assert ratios(form, state) == [1.0]


@BOTH
def test_a_gradient_of_zero_still_decays_the_weights(form):
    # paper: |g| below the floor, eta = 1. optax: the norm of g + wd*w, eta = tc/wd.
    u, _ = step(form, row(0.0, 0.0), W, weight_decay=0.1)
    np.testing.assert_allclose(u, -0.1 * W if form == "paper" else -0.001 * W, rtol=ULPS)


@BOTH
def test_R69_without_weight_decay_the_ratio_still_applies(form):
    u, _ = step(form, G, W, weight_decay=0.0)
    np.testing.assert_allclose(u, row(0.004, -0.003), rtol=ULPS)


@BOTH
def test_R70_biases_have_neither_decay_nor_ratio(form):
    p = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}
    u, _ = step(form, p, p, weight_decay=0.1)
    np.testing.assert_array_equal(u["b"], [-1.0, -1.0])
    np.testing.assert_allclose(u["w"], np.full((2, 2), -0.001), rtol=ULPS)


def test_R74_norms_of_half_precision_leaves_do_not_overflow():
    p, g = jnp.full((1, 4), 200.0, jnp.float16), jnp.full((1, 4), 1e-3, jnp.float16)
    eta_g = 0.001 * 200 * float(g[0, 0]) / float(g[0, 0])  # tc*|w|/|g| * g
    u, _ = step("optax", g, p)
    assert u.dtype == jnp.float16
    np.testing.assert_allclose(u.astype(jnp.float32), -eta_g, rtol=1e-3)  # one rounding to float16
    u, _ = step("paper", g, p)  # the ratio of 200 is capped at 100
    np.testing.assert_allclose(u.astype(jnp.float32), -0.1, rtol=1e-3)
    p, g = jnp.full((1, 4096), 2000.0, jnp.float16), jnp.ones((1, 4096), jnp.float16)
    u, _ = step("optax", g, p)
    np.testing.assert_allclose(u.astype(jnp.float32), -2.0, rtol=1e-3)
    assert np.isinf(optax_step(optax.lars(1.0), g, p).astype(jnp.float32)).all()


def test_the_cap_is_a_hyperparameter_of_the_paper_form_only():
    tx = LARS["paper"]
    u, state = step("paper", G, W, tx.set_hyperparams(tx.init(W), max_trust_ratio=0.002))
    np.testing.assert_allclose(u, -0.002 * G, rtol=ULPS)
    assert ratios("paper", state) == [np.float32(0.002)]
    assert tx.hyperparams(tx.init(W))["max_trust_ratio"] == 100
    assert "max_trust_ratio" not in LARS["optax"].hyperparams(LARS["optax"].init(W))


@BOTH
def test_R76_the_learning_rate_is_inside_the_momentum(form):
    first, state = step(form, G, W, learning_rate=1.0)
    second, _ = step(form, G, W, state, learning_rate=0.1)
    np.testing.assert_allclose(first, row(0.004, -0.003), rtol=ULPS)
    np.testing.assert_allclose(second, row(0.004, -0.003), rtol=ULPS)


def test_the_learning_rate_of_a_bias_is_outside_in_the_paper_form_and_inside_in_that_of_optax():
    g = p = jnp.ones(2)
    for form, want in (("paper", -0.1 * 1.9), ("optax", -(0.9 * 1.0 + 0.1))):
        _, state = step(form, g, p, learning_rate=1.0)
        u, _ = step(form, g, p, state, learning_rate=0.1)
        np.testing.assert_allclose(u, [want, want], rtol=ULPS)


@pytest.mark.parametrize(("form", "solo_from"), [("paper", None), ("optax", 1)])
def test_R80_every_leaf_has_a_ratio_of_its_own(form, solo_from):
    p = {"u": row(3.0, 4.0), "v": row(0.0, 1.0)}
    g = {"u": row(1.0, 0.0), "v": row(0.0, 100.0)}
    tx = fusedopt.lars(1.0, trust_ratio=form, packing=fusedopt.Packing(solo_from=solo_from))
    u, state = jax.jit(tx.update)(g, tx.init(p), p)
    np.testing.assert_allclose(u["u"], row(-0.005, 0.0), rtol=ULPS)
    np.testing.assert_allclose(u["v"], row(0.0, -0.001), rtol=ULPS)
    np.testing.assert_allclose([tx.trust_ratios(state)[k,] for k in "uv"], [0.005, 1e-5], rtol=ULPS)


@pytest.mark.parametrize("make", [fusedopt.lars, fusedopt.adam, fusedopt.sgd])
def test_R83_complex_parameters_are_refused_by_name(make):
    p = {"fc": {"kernel": jnp.full((1, 2), 3 + 4j, jnp.complex64)}}
    with pytest.raises(TypeError, match=r"`params` leaf `fc/kernel` is complex64.*split_real_and_imaginary"):
        make(1.0).init(p)
    with pytest.raises(TypeError, match="complex64"):
        fusedopt.pack(p)


@BOTH
def test_norms_neither_overflow_nor_underflow_in_float32(form):
    """The ratio does not change when the gradient and the parameters are scaled alike."""
    for scale in (1e-11, 1e-6, 1e18, 1e30):
        u, state = step(form, G * scale, W * scale)
        assert not state.skipped
        np.testing.assert_allclose(u, row(0.004 * scale, -0.003 * scale), rtol=ULPS)
    for scale in (1e-30, 1e-13):  # both norms are below the floor of 1e-12, and the ratio is 1
        u, state = step(form, G * scale, W * scale)
        np.testing.assert_allclose(u, -G * scale, rtol=ULPS)


def test_R123_norms_have_the_same_bits_in_every_run_and_process():
    code = "from tests import test_lars; print(test_lars.digest(test_lars.compiled()))"
    here = {digest(run) for run in [compiled()] for _ in range(3)}
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()[-1]
    assert here == {there}


def compiled():
    """A step on 1,000,000 elements in five leaves, and a small neighbour."""
    params = {f"w{i}": normal((400, 500), i) for i in range(5)} | {"s": normal((7, 9), 9)}
    grads = {k: x[::-1] for k, x in params.items()}
    tx = fusedopt.lars(0.1, 0.1, packing=fusedopt.Packing(solo_from=None))
    update = jax.jit(tx.update)
    return lambda: update(grads, tx.init(params), params)


def digest(run) -> str:
    updates, state = run()
    text = b"".join(np.asarray(x).tobytes() for x in (*jax.tree.leaves(updates), state.trust_ratios))
    return hashlib.sha256(text).hexdigest()


def test_trust_ratios_of_an_optimizer_that_has_none():
    tx = fusedopt.adam(0.1)
    with pytest.raises(ValueError, match="no trust ratios"):
        tx.trust_ratios(tx.init(W))


def test_trust_ratios_need_a_state_whose_paths_are_known():
    state = fusedopt.lars(0.1).init({"w": W})
    tx = fusedopt.lars(0.1)
    with pytest.raises(ValueError, match="has not seen a state of this layout"):
        tx.trust_ratios(state)
    tx.init({"w": W})
    assert list(tx.trust_ratios(state)) == [("w",)]


def test_an_unknown_form_is_refused():
    with pytest.raises(ValueError, match="`trust_ratio`: expected 'paper' or 'optax', got 'apex'"):
        fusedopt.lars(0.1, trust_ratio="apex")


def test_trust_ratios_are_named_after_the_parameters_that_are_given():
    """States hold no names: of two models with equal shapes the one met last would name both."""
    tx = fusedopt.lars(0.1)
    first, second = {"a": jnp.ones((2, 3))}, {"v": jnp.ones((2, 3))}
    state = tx.init(first)
    tx.init(second)
    assert set(tx.trust_ratios(state)) == {("v",)}
    assert set(tx.trust_ratios(state, first)) == {("a",)}
    with pytest.raises(ValueError, match="of another layout"):
        tx.trust_ratios(state, {"a": jnp.ones((2, 3)), "c": jnp.ones((200, 300))})


def test_a_mask_that_arrives_as_an_array_is_called_by_its_own_name():
    with pytest.raises(TypeError, match="`weight_decay_mask` arrives as an array"):
        fusedopt.lars(0.1, weight_decay_mask=jnp.array(True))
    with pytest.raises(ValueError, match="`weight_decay_mask` has no entry for leaf `w`"):
        fusedopt.lars(0.1, weight_decay_mask={"v": True}).init({"w": jnp.ones((1, 2))})
