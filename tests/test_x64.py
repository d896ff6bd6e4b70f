"""With JAX in its 64-bit mode: float64 stays float64, and float32 is not promoted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fusedopt
from tests.helpers import (
    assert_close,
    avals,
    case,
    normal,
    one_of_each,
    standard_promotion,
)

BF16, F16, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float16), np.dtype(np.float32)

# One optimizer for each path through the code; the others are marked slow.
CORE = ("sgd", "adamw", "lars_optax")
EVERY = [pytest.param(n, marks=[] if n in CORE else [pytest.mark.slow]) for n in one_of_each(CORE)]


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", [pytest.param("python", marks=pytest.mark.slow), "numpy", "schedule"])
@pytest.mark.parametrize("name", ["sgd", "adamw", pytest.param("lars", marks=pytest.mark.slow)])
def test_r27_x64_promotes_no_float32_state(name, kind):
    def schedule(x):
        return lambda count: x * (count.astype(jnp.float64) + 1)

    give = {"python": float, "numpy": np.float64, "schedule": schedule}[kind]
    options = {
        "sgd": {"momentum": give(0.9) if kind != "schedule" else 0.9, "weight_decay": give(0.1)},
        "adamw": {"weight_decay": give(0.1), "eps": give(1e-8) if kind != "schedule" else 1e-8},
        "lars": {"weight_decay": give(0.1), "trust_coefficient": give(0.01)},
    }[name]
    tx = getattr(fusedopt, name)(give(0.1), **options)
    params = {"w": jnp.ones((2, 3), F32)}
    state = tx.init(params)
    updates, after = tx.update(params, state, params)
    applied, applied_state = tx.apply(params, state, params)
    for tree in (state, after, applied_state, updates, applied):
        assert {x.dtype for x in jax.tree.leaves(tree)} <= {F32, np.dtype(np.int32), np.dtype(bool)}
    assert avals(after) == avals(applied_state) == avals(state)


@pytest.mark.usefixtures("x64")
def test_r27_optax_promotes():
    params = {"w": jnp.ones((2, 3), F32)}
    twin = optax.sgd(np.float64(0.1))
    with standard_promotion():
        assert twin.update(params, twin.init(params))[0]["w"].dtype == np.float64


@pytest.mark.parametrize("name", EVERY)
def test_r28_float64_parameters_meet_float64(name):
    c = case(name)
    with jax.enable_x64(True):
        params = {
            "w": jnp.asarray(normal((9, 7), 1, dtype=np.float64)),
            "bias": jnp.asarray(normal((5,), 2, dtype=np.float64)),
        }
        grads = {
            "w": jnp.asarray(normal((9, 7), 3, dtype=np.float64)),
            "bias": jnp.asarray(normal((5,), 4, dtype=np.float64)),
        }
        tx = c.make(0.1)
        state, oracle, p = tx.init(params), c.oracle(params, 0.1), params
        for _ in range(5):
            p, state = tx.apply(grads, state, p)
            want = oracle.step(grads)
        assert all(x.dtype == np.float64 for x in (*jax.tree.leaves(p), *state.mu, *state.nu, state.hyperparams))
        assert avals(state) == avals(tx.init(params))
        assert_close(p, want, 1e-12)


@pytest.mark.parametrize("name", EVERY)
def test_r28_float32_is_the_same_with_x64(name):
    params = {"w": jnp.asarray(normal((9, 7), 1)), "bias": jnp.asarray(normal((5,), 2))}
    grads = jax.tree.map(lambda x: x + 1, params)

    def two_steps():
        tx = case(name).make(0.1)
        p, state = tx.apply(grads, tx.init(params), params)
        return tx.apply(grads, state, p)

    want = jax.tree.map(np.asarray, two_steps())
    with jax.enable_x64(True):
        got = jax.tree.map(np.asarray, two_steps())
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["sgd", "adamw", "lars", "lars_optax"])
def test_float32_beside_float64(name):
    params = {"w32": jnp.asarray(normal((4, 3), 1)), "w64": jnp.asarray(normal((4, 3), 2, dtype=np.float64))}
    grads = {"w32": jnp.asarray(normal((4, 3), 3)), "w64": jnp.asarray(normal((4, 3), 4, dtype=np.float64))}
    c = case(name)
    tx = c.make(0.1)
    updates, state = tx.update(grads, tx.init(params), params, loss_scale=1.0)
    want = c.oracle(params, 0.1).updates(grads)
    assert (updates["w32"].dtype, updates["w64"].dtype) == (F32, np.float64)
    assert_close(updates["w64"], want["w64"], 1e-12)
    assert_close(updates["w32"], want["w32"], 1e-6)
    assert avals(state) == avals(tx.init(params))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("name", "value"), [("adamw", 1e20), ("sgd", 1e39), ("lars", 1e39)])
def test_float64_gradients_that_overflow_a_float32_parameter_are_skipped(name, value, scaled):
    """Finite in float64, not where the step is computed; a float64 leaf beside it takes them."""
    tx = case(name).make(0.1)
    for wide in (False, True):
        params = {"w32": jnp.ones((1, 2), F32)} | ({"w64": jnp.ones((1, 2), np.float64)} if wide else {})
        grads = {"w32": jnp.full((1, 2), value, np.float64)} | ({"w64": jnp.ones((1, 2), np.float64)} if wide else {})
        updates, state = tx.update(grads, tx.init(params), params, **({"loss_scale": 1.0} if scaled else {}))
        assert bool(state.skipped)
        np.testing.assert_array_equal(updates["w32"], 0.0)
    params = {"w64": jnp.ones((1, 2), np.float64)}
    _, state = tx.update({"w64": jnp.full((1, 2), value)}, tx.init(params), params)
    assert not bool(state.skipped)
