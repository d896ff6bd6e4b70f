"""Hyperparameters in optax.inject_hyperparams, and the ranges of those that are numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fusedopt
from tests.helpers import avals, normal, standard_promotion

PARAMS = {"w": jnp.asarray(normal((3, 5))), "b": jnp.asarray(normal((5,), 1))}
GRADS = {"w": jnp.asarray(normal((3, 5), 2)), "b": jnp.asarray(normal((5,), 3))}


@pytest.mark.parametrize(
    "name", ["sgd", "lars", *(pytest.param(n, marks=pytest.mark.slow) for n in ("adam", "adamw", "lion", "lamb"))]
)
def test_R12_every_factory_works_in_inject_hyperparams_without_static_args(name):
    factory = getattr(fusedopt, name)
    plain = factory(0.1)
    tx = optax.inject_hyperparams(factory)(0.1)
    with standard_promotion():
        state = jax.jit(tx.init)(PARAMS)
        assert isinstance(state.hyperparams["learning_rate"], jax.Array)
        # One program for both; the arrays of one are the constants of the other.
        updates, want = jax.jit(lambda s, t: (tx.update(GRADS, s, PARAMS)[0], plain.update(GRADS, t, PARAMS)[0]))(
            state, plain.init(PARAMS)
        )
    # b1 arrives in float32 there, and 1 - b1 has its rounding.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-9), updates, want)


def test_R12_static_arguments_stay_static_in_inject_hyperparams():
    group = fusedopt.Group("g", lambda path, leaf: path == ("b",), learning_rate_scale=0.5)
    options = {
        "mask": lambda tree: {"w": False, "b": True},
        "mu_dtype": jnp.bfloat16,
        "nesterov": True,
        "groups": (group,),
        "packing": fusedopt.Packing(solo_from=None),
        "backend": "xla",
        "skip_nonfinite": False,
    }
    tx = optax.inject_hyperparams(fusedopt.adamw, static_args=("mask", "mu_dtype"))(0.1, **options)
    plain = fusedopt.adamw(0.1, **options)
    with standard_promotion():
        state = jax.jit(tx.init)(PARAMS)
        updates, state = jax.jit(tx.update)(GRADS, state, PARAMS)
    want, _ = jax.jit(plain.update)(GRADS, plain.init(PARAMS), PARAMS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-9), updates, want)
    assert {x.dtype for x in state.inner_state.mu} == {jnp.dtype(jnp.bfloat16)}


def test_R06_injected_numbers_in_float32_are_right_for_bfloat16_parameters():
    p = g = jnp.ones((2, 2), jnp.bfloat16)
    tx = optax.inject_hyperparams(fusedopt.adamw, hyperparam_dtype=jnp.float32)(1e-3)
    with standard_promotion():
        state = tx.init(p)
        updates, new = jax.jit(tx.update)(g, state, p)
    assert updates.dtype == jnp.bfloat16
    # -lr*(1 + 1e-4): one rounding to bfloat16.
    np.testing.assert_allclose(updates.astype(jnp.float32), -1.0e-3, rtol=4e-3)
    assert avals(new) == avals(jax.tree.map(jnp.asarray, state))
    # optax's own: NaN without hyperparam_dtype, and mu changes its dtype with it.
    with standard_promotion():
        theirs = optax.inject_hyperparams(optax.adamw)(1e-3)
        assert np.isnan(jax.jit(theirs.update)(g, theirs.init(p), p)[0].astype(jnp.float32)).all()
        theirs = optax.inject_hyperparams(optax.adamw, hyperparam_dtype=jnp.float32)(1e-3)
        before = theirs.init(p)
        after = jax.jit(theirs.update)(g, before, p)[1]
    mu = [optax.tree.get(s, "mu").dtype for s in (before, after)]
    assert mu == [jnp.bfloat16, jnp.float32]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", ["b1", "b2"])
def test_R06_a_decay_in_16_bits_is_refused(name, dtype):
    message = f"`{name}` arrives as {jnp.dtype(dtype)}.*hyperparam_dtype=jnp.float32"
    with pytest.raises(TypeError, match=message):
        fusedopt.adamw(0.1, **{name: jnp.asarray(0.9, dtype)})
    tx = fusedopt.adamw(0.1)
    p = jnp.ones(2)
    with pytest.raises(TypeError, match=message):
        tx.update(p, tx.init(p), p, **{name: jnp.asarray(0.9, dtype)})
    with pytest.raises(TypeError, match=message):
        tx.set_hyperparams(tx.init(p), **{name: jnp.asarray(0.9, dtype)})


def test_R06_injection_at_the_precision_of_bfloat16_parameters_is_refused():
    p = jnp.ones((2, 2), jnp.bfloat16)
    with standard_promotion(), pytest.raises(TypeError, match=r"hyperparam_dtype=jnp.float32"):
        optax.inject_hyperparams(fusedopt.adamw)(1e-3).init(p)


@pytest.mark.parametrize("as_array", [jnp.array, np.array])
def test_a_mask_that_arrives_as_an_array_says_static_args(as_array):
    flag = as_array(True)
    for make in (
        lambda: fusedopt.adamw(0.1, mask=flag),
        lambda: fusedopt.lars(0.1, weight_decay_mask=flag),
        lambda: fusedopt.lars(0.1, trust_ratio_mask=flag),
        lambda: fusedopt.adamw(0.1, groups=flag),
    ):
        with pytest.raises(TypeError, match="static_args"):
            make()
    with pytest.raises(TypeError, match=r"`mask` at `w`.*static_args"):
        fusedopt.adamw(0.1, mask={"w": flag, "b": True}).init(PARAMS)


@pytest.mark.parametrize("name", ["nesterov", "skip_nonfinite", "eps_inside", "master_weights", "accumulate"])
def test_a_static_flag_that_arrives_as_an_array_says_static_args(name):
    with pytest.raises(TypeError, match=f"`{name}` is static.*static_args"):
        fusedopt.adamw(0.1, **{name: jnp.array(True)})


RANGES = [
    ("sgd", "learning_rate", [-1e-3, np.nan, np.inf]),
    ("sgd", "momentum", [-0.1, 1.1, np.nan]),
    ("sgd", "weight_decay", [-1e-3, np.nan, np.inf]),
    ("adam", "learning_rate", [-1e-3, np.nan, np.inf]),
    ("adam", "b1", [-0.1, 1, 1.0, np.nan]),
    ("adam", "b2", [-0.1, 1.0, np.float64(1.0)]),
    ("adam", "eps", [-1e-8, np.nan]),
    ("adam", "eps_root", [-1e-8, np.inf]),
    ("adam", "weight_decay", [-1e-3]),
    ("adamw", "weight_decay", [-1e-3, np.nan]),
    ("lion", "b1", [-0.1, 1.0]),
    ("lion", "b2", [-0.1, 1.0, np.nan]),
    ("lion", "weight_decay", [-1e-3]),
    ("lamb", "b2", [-0.1, 1.0, np.nan]),
    ("lamb", "eps", [-1e-8, np.nan]),
    ("lamb", "max_trust_ratio", [-1.0, 0.0, np.nan]),
    ("sgd", "clip_norm", [-1.0, np.nan]),
    ("lion", "ema_decay", [-0.1, 1.0, np.nan]),
    ("lars", "learning_rate", [-1.0]),
    ("lars", "weight_decay", [-1.0]),
    ("lars", "trust_coefficient", [-1.0, np.nan]),
    ("lars", "eps", [-1.0]),
    ("lars", "momentum", [-0.1, 1.1]),
    ("lars", "max_trust_ratio", [-1.0, 0.0, np.nan]),
]


@pytest.mark.parametrize(("name", "argument", "values"), RANGES)
def test_R136_constants_out_of_range_are_refused_by_name_and_value(name, argument, values):
    factory = getattr(fusedopt, name)
    for value in values:
        with pytest.raises(ValueError, match=rf"`{argument}`: expected a number.*got.*{value}"):
            factory(**{"learning_rate": 0.1, argument: value})


def test_R136_traced_values_pass():
    p = jnp.ones((1, 2))

    @jax.jit
    def step(bad):
        tx = fusedopt.adamw(bad, eps=bad, weight_decay=bad)
        return tx.update(p, tx.init(p), p)[0]

    assert step(jnp.float32(-0.5)).shape == p.shape


def test_an_array_hyperparameter_must_be_0d():
    with pytest.raises(ValueError, match=r"`learning_rate`: expected a 0-d array, got shape \(1,\)"):
        fusedopt.sgd(jnp.ones(1))


def test_eps_inside_has_no_nesterov_and_no_eps_root():
    with pytest.raises(ValueError, match=r"`eps_inside`.*`nesterov`"):
        fusedopt.adam(0.1, eps_inside=True, nesterov=True)
    with pytest.raises(ValueError, match="`eps_inside` has no `eps_root`"):
        fusedopt.adamw(0.1, eps_inside=True, eps_root=1e-8)


def test_eps_inside_under_injection_says_how():
    with pytest.raises(ValueError, match="name `eps_root` in `static_args`"):
        optax.inject_hyperparams(fusedopt.adamw)(1e-3, eps_inside=True).init({"w": jnp.ones((1, 2))})
    tx = optax.inject_hyperparams(fusedopt.adamw, static_args="eps_root")(1e-3, eps_inside=True)
    params = {"w": jnp.ones((1, 2))}
    updates, _ = tx.update(params, tx.init(params), params)
    # eps 1e-8 under the root of v = 1e-3: u = -lr*sqrt(1e-3)/0.1 * 0.1/sqrt(1e-3 + 1e-8), and the decay lr*1e-4
    np.testing.assert_allclose(updates["w"], -1e-3 * (np.sqrt(1e-3 / (1e-3 + 1e-8)) + 1e-4), rtol=2e-6)
