"""What is stored and returned in which dtype, and that low precision costs no more than its own rounding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fusedopt
from tests.helpers import (
    ROUNDING,
    assert_close,
    avals,
    case,
    normal,
    one_of_each,
    standard_promotion,
)

BF16, F16, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float16), np.dtype(np.float32)
LOW = (BF16, F16)

# One optimizer for each path through the code; the others are marked slow.
CORE = ("sgd", "adamw", "lars_optax")
EVERY = [pytest.param(n, marks=[] if n in CORE else [pytest.mark.slow]) for n in one_of_each(CORE)]


def mixed(seed=0):
    """Two leaves of each dtype, one packed with its like and one solo (Packing(solo_from=64))."""
    out = {}
    for i, dtype in enumerate((BF16, F16, F32)):
        out[f"small_{dtype}"] = jnp.asarray(normal((3, 5), seed + i)).astype(dtype)
        out[f"large_{dtype}"] = jnp.asarray(normal((9, 8), seed + 10 + i)).astype(dtype)
    return out


@pytest.mark.parametrize("name", EVERY)
def test_r97_r115_mixed_trees(name):
    """Each leaf keeps its dtype, its slots are float32, and all of them are at the same step."""
    c, params, grads = case(name), mixed(), mixed(50)
    tx = c.make(0.1, packing=fusedopt.Packing(solo_from=64))
    step = jax.jit(tx.update)
    oracle, state = c.oracle(params, 0.1), tx.init(params)
    for _ in range(3):
        updates, state = step(grads, state, params)
        want = oracle.updates(grads)
    for key, u in updates.items():
        assert u.dtype == params[key].dtype, key
        # The step is made in float32 (100 roundings at most); the update is then rounded to the leaf's dtype.
        bound = ROUNDING[np.dtype(u.dtype)] + 2e-6
        assert_close(u, want[key], bound)
    assert all(b.dtype == F32 for slot in tx.optimizer.rule.slots for b in getattr(state, slot))
    assert int(state.count) == 3


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_apply_rounds_once_where_update_rounds_twice(dtype):
    """Both are within their roundings of float64; `apply` adds in float32, `apply_updates` in the leaf's dtype."""
    params, grads = (
        {"w": jnp.asarray(normal((9, 7), 1)).astype(dtype)},
        {"w": jnp.asarray(normal((9, 7), 2)).astype(dtype)},
    )
    tx = case("momentum").make(0.1)
    exact = case("momentum").oracle(params, 0.1).step(grads)["w"]
    applied = tx.apply(grads, tx.init(params), params)[0]["w"]
    updates = tx.update(grads, tx.init(params), params)[0]
    assert applied.dtype == dtype
    nearest = exact.astype(dtype).astype(np.float64)
    # The exact result itself, rounded: float32 noise can only matter where it lies on the midpoint of two neighbours.
    off = np.mean(np.asarray(applied, np.float64) != nearest)
    assert off < 0.05, off
    twice = optax.apply_updates(params, updates)["w"]
    assert_close(twice, exact, 2 * ROUNDING[np.dtype(dtype)])


@pytest.mark.parametrize("dtype", [*LOW, F32], ids=str)
@pytest.mark.parametrize("lr", ["python", "numpy", "strong", "override"])
def test_no_learning_rate_promotes_an_update(dtype, lr):
    params = {"w": jnp.ones((1, 2), dtype)}
    given = {"python": 0.5, "numpy": np.float64(0.5), "strong": jnp.float32(0.5), "override": 0.1}[lr]
    tx = fusedopt.sgd(given, momentum=0.9)
    extra = {"learning_rate": jnp.float32(0.5)} if lr == "override" else {}
    updates, state = tx.update(params, tx.init(params), params, **extra)
    assert updates["w"].dtype == dtype
    np.testing.assert_array_equal(np.asarray(updates["w"], np.float32), -0.5)
    assert avals(state) == avals(tx.init(params))
    if lr == "strong" and dtype == F16:
        with standard_promotion():  # optax: the update becomes float32
            twin = optax.sgd(given)
            assert twin.update(params, twin.init(params))[0]["w"].dtype == F32


SLOT_OPTIONS = [
    (fusedopt.sgd, {"momentum": 0.9, "accumulator_dtype": BF16}, {"mu": BF16}),
    (fusedopt.adam, {"mu_dtype": BF16}, {"mu": BF16, "nu": F32}),
    (fusedopt.adamw, {"mu_dtype": "float16", "nu_dtype": jnp.bfloat16, "b2": 0.9}, {"mu": F16, "nu": BF16}),
    (fusedopt.adamw, {}, {"mu": F32, "nu": F32}),
]


@pytest.mark.parametrize(("factory", "options", "want"), SLOT_OPTIONS, ids=lambda x: getattr(x, "__name__", ""))
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_slot_dtypes_on_request(factory, options, want, dtype):
    params, tx = {"w": jnp.full((2, 3), 0.5, dtype)}, factory(0.1, **options)
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update(params, state, params)
        assert {k: getattr(state, k)[0].dtype for k in want} == want
    assert updates["w"].dtype == dtype
    m1 = 0.05 if factory is not fusedopt.sgd else 0.5
    m2 = 0.9 * m1 + (0.05 if factory is not fusedopt.sgd else 0.5)
    # Each of the two stores rounds to the slot's dtype.
    np.testing.assert_allclose(np.asarray(state.mu[0][:6], np.float64), m2, rtol=2 * ROUNDING[want["mu"]])


@pytest.mark.parametrize("make", [fusedopt.adam, fusedopt.adamw, fusedopt.lamb])
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_a_second_moment_of_16_bits_that_would_stand_still_is_warned_of(make, dtype):
    with pytest.warns(UserWarning, match=rf"`nu_dtype`={np.dtype(dtype).name} with b2=0.999"):
        tx = make(0.1, nu_dtype=dtype)
    if dtype == BF16:
        # What it warns of: gradients of 1 should bring nu to 0.63 in 1,000 steps; it gets nowhere near.
        params = {"w": jnp.ones((1, 2))}
        body = lambda _, c: tx.apply({"w": jnp.ones((1, 2))}, c[1], c[0])  # noqa: E731
        _, state = jax.jit(lambda c: jax.lax.fori_loop(0, 1000, body, c))((params, tx.init(params)))
        assert float(state.nu[0][0]) < 0.51
    make(0.1, nu_dtype=dtype, b2=0.9)
    make(0.1, nu_dtype=jnp.float32)


def test_moments_in_bfloat16_are_optaxs_mu_dtype():
    params, grads = {"w": jnp.asarray(normal((4, 5), 3))}, {"w": jnp.asarray(normal((4, 5), 4))}
    tx, twin = fusedopt.adam(0.1, mu_dtype=BF16), optax.adam(0.1, mu_dtype=BF16)
    state = tx.init(params)
    with standard_promotion():
        twin_state = twin.init(params)
        for _ in range(3):
            updates, state = tx.update(grads, state, params)
            theirs, twin_state = twin.update(grads, twin_state, params)
    # Where the stored moments fall on different sides of a tie, the updates differ by one rounding of bfloat16.
    assert_close(updates, theirs, ROUNDING[BF16])
