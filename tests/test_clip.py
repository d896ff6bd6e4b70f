"""`clip_norm`: the global norm limited in the step, whatever the magnitude of the gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fusedopt
from tests.helpers import (
    MODES,
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


@pytest.mark.parametrize(
    ("name", "mode", "max_norm"),
    [
        ("adamw", "flat_apply", 1.0),
        pytest.param("adamw", "flat_apply", 1e3, marks=pytest.mark.slow),  # nothing to clip
        *(
            pytest.param(n, m, 1.0, marks=pytest.mark.slow)
            for n, m in each_once(list(MODES), all_of=("lars_optax", "lamb"))
            if (n, m) != ("adamw", "flat_apply")
        ),
    ],
)
def test_it_is_what_optax_computes_in_front_of_the_optimizer(name, mode, max_norm):
    params = filled(SHAPES)
    grads = gradients(params, 4, scale=3.0)
    clipped = final_params(case(name).make(1e-2, clip_norm=max_norm), mode, params, grads)
    chained = fusedopt.chain(optax.clip_by_global_norm(max_norm), case(name).make(1e-2))
    # The factor is one product of float32 here and two there, and the optimizers mostly divide by the gradient again.
    assert_close(clipped, final_params(chained, mode, params, grads), 2e-6)


def update(tx, g, p=None, **extra):
    p = jax.tree.map(jnp.zeros_like, g) if p is None else p
    with standard_promotion():
        return jax.jit(tx.update)(g, tx.init(p), p, **extra)


def test_R59_a_limit_of_zero_gives_zeros_where_optax_gives_nan():
    zero = {"w": jnp.zeros((1, 3))}
    for g in (zero, {"w": jnp.ones((1, 3))}):
        np.testing.assert_array_equal(update(fusedopt.sgd(1.0, clip_norm=0.0), g)[0]["w"], 0.0)
    theirs, _ = update(optax.chain(optax.clip_by_global_norm(0.0), optax.sgd(1.0)), zero)
    assert np.isnan(theirs["w"]).all()


@pytest.mark.parametrize(
    ("dtype", "value", "n"),
    [(jnp.float16, 300.0, 2), (jnp.float32, 1e30, 4), (jnp.float32, 1e-30, 4), (jnp.bfloat16, 2e38, 2)],
)
def test_R61_norms_neither_overflow_nor_underflow_where_those_of_optax_do(dtype, value, n):
    g = {"w": jnp.full((1, n), value, dtype)}
    size = float(g["w"][0, 0].astype(jnp.float32))
    max_norm = 1.0 if value > 1 else 1e-31
    u, state = update(fusedopt.sgd(1.0, clip_norm=max_norm), g)
    np.testing.assert_allclose(u["w"].astype(jnp.float32), -max_norm / np.sqrt(n), rtol=float(jnp.finfo(dtype).eps))
    np.testing.assert_allclose(state.grad_norm, size * np.sqrt(n), rtol=3e-7)
    theirs, _ = update(optax.chain(optax.clip_by_global_norm(max_norm), optax.sgd(1.0)), g)
    wrong = np.abs(np.asarray(theirs["w"], np.float32) + max_norm / np.sqrt(n)) > 0.1 * max_norm
    assert wrong.all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("mode", ["update", pytest.param("flat_apply", marks=pytest.mark.slow)])
def test_a_gradient_that_is_not_finite_skips_the_step(bad, mode):
    params = filled(SHAPES)
    tx = fusedopt.adamw(0.1, clip_norm=1.0)
    g = jax.tree.map(np.ones_like, params)
    g["big"][7, 9] = bad
    held, grads = (fusedopt.pack(x, tx) if mode == "flat_apply" else jax.tree.map(jnp.asarray, x) for x in (params, g))
    state = tx.init(held)
    good, state = jax.jit(tx.apply)(jax.tree.map(jnp.ones_like, held), state, held)
    step = jax.jit(tx.update if mode == "update" else tx.apply)
    out, after = step(grads, state, good)
    assert after.skipped
    assert_equal(out, jax.tree.map(jnp.zeros_like, good) if mode == "update" else good)
    assert_equal(after._replace(skipped=state.skipped, total_skipped=state.total_skipped), state)
    assert np.isfinite(after.grad_norm)


def test_the_norm_is_that_of_the_unscaled_gradients_before_clipping():
    g = {"w": jnp.full((2, 8), 1024.0), "b": jnp.full((9,), 1024.0)}
    u, state = update(fusedopt.sgd(1.0, clip_norm=0.5), g, loss_scale=jnp.float32(1024.0))
    np.testing.assert_allclose(state.grad_norm, 5.0, rtol=3e-7)
    np.testing.assert_allclose(u["b"], -0.1, rtol=3e-7)


def test_a_gradient_too_large_to_be_squared_is_usable_when_it_is_clipped():
    """Without clipping Adam has to skip it: see R35."""
    g = {"w": jnp.asarray([[3e25, 4e25]])}
    u, state = update(fusedopt.adam(0.1, clip_norm=1.0), g)
    assert not state.skipped
    np.testing.assert_allclose(u["w"], -0.1, rtol=1e-6)
    _, state = update(fusedopt.adam(0.1, clip_norm=jnp.float32(jnp.inf)), g)
    assert state.skipped
    _, state = update(fusedopt.sgd(0.1, clip_norm=1.0), {"w": jnp.full((2, 4), 2e38)})
    assert state.skipped  # the norm itself is beyond float32


def test_frozen_leaves_do_not_count_and_leaves_without_a_gradient_neither():
    params = {"a": jnp.zeros((2, 2)), "frozen": jnp.zeros((3, 3)), "none": jnp.zeros((2, 2)), "n": jnp.arange(2)}
    group = fusedopt.Group("fixed", lambda path, leaf: path == ("frozen",), frozen=True)
    tx = fusedopt.sgd(1.0, clip_norm=1.0, groups=[group])
    grads = {"a": jnp.ones((2, 2)), "frozen": jnp.full((3, 3), 1e3), "none": None, "n": np.zeros(2, jax.dtypes.float0)}
    u, state = update(tx, grads, params)
    assert state.grad_norm == 2.0
    np.testing.assert_allclose(u["a"], -0.5)


def test_the_limit_is_an_operand():
    g = {"w": jnp.full((1, 4), 1.0)}
    tx = fusedopt.sgd(1.0, clip_norm=1.0)
    step, state = jax.jit(tx.update), tx.init(g)
    for limit, want in ((0.5, 0.25), (10.0, 1.0), (1.0, 0.5)):
        u, _ = step(g, state, None, clip_norm=limit)
        np.testing.assert_allclose(u["w"], -want, rtol=2e-7)
        u, _ = step(g, tx.set_hyperparams(state, clip_norm=limit), None)
        np.testing.assert_allclose(u["w"], -want, rtol=2e-7)
    assert step._cache_size() == 2  # with and without the keyword
    with pytest.raises(ValueError, match="`clip_norm` cannot be set"):
        fusedopt.sgd(1.0).update(g, fusedopt.sgd(1.0).init(g), clip_norm=1.0)


@pytest.mark.slow
def test_in_half_a_thousand_leaves_the_norm_is_that_of_all():
    params = filled({f"l{i}": {"kernel": (5, 1 + i % 7), "bias": (3,)} for i in range(250)})
    tx = fusedopt.sgd(1.0, clip_norm=1.0)
    _, state = update(tx, jax.tree.map(jnp.asarray, params))
    want = np.sqrt(sum(float(np.sum(np.square(x, dtype=np.float64))) for x in jax.tree.leaves(params)))
    np.testing.assert_allclose(state.grad_norm, want, rtol=3e-7)
