"""What is stored and returned in which dtype, and that low precision costs no more than its own rounding."""

from __future__ import annotations

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fusedopt
from tests.helpers import (
    OPTIMIZER_NAMES,
    ROUNDING,
    assert_close,
    avals,
    case,
    normal,
    standard_promotion,
)

BF16, F16, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float16), np.dtype(np.float32)
LOW = (BF16, F16)
# One optimizer for each path through the code; the others are marked slow.
CORE = ("sgd", "adamw", "lars_optax")
EVERY = [pytest.param(n, marks=[] if n in CORE else [pytest.mark.slow]) for n in OPTIMIZER_NAMES]


def constant_gradient(tx, params, grads, steps):
    """The state after `steps` of the same gradient, parameters held fixed, and the last updates."""

    def body(carry, _):
        state, _ = carry
        updates, state = tx.update(grads, state, params)
        return (state, updates), None

    carry = tx.init(params), jax.tree.map(jnp.zeros_like, params)
    return jax.jit(lambda c: jax.lax.scan(body, c, length=steps)[0])(carry)


# ----------------------------------------------------------------------------- CASES.md, section B


def test_r07_betas_near_one_are_not_those_of_bfloat16():
    params = {"w": jnp.ones((1, 2), BF16)}
    for b2, nu in ((0.999, 1e-3), (0.9999, 1e-4)):
        tx = fusedopt.adam(0.1, b2=b2)
        _, state = tx.update(params, tx.init(params), params)
        np.testing.assert_allclose(state.nu[0][:2], nu, rtol=1e-6)


@pytest.mark.parametrize("factory", [fusedopt.adam, fusedopt.adamw])
def test_r17_eps_of_1e_8_is_not_zero_in_float16(factory):
    params, tx = (
        {"w": jnp.ones((1, 2), F16)},
        factory(1e-3, **({} if factory is fusedopt.adam else {"weight_decay": 0.0})),
    )
    zeros, state = jax.tree.map(jnp.zeros_like, params), tx.init(params)
    for _ in range(3):
        updates, state = tx.update(zeros, state, params)
        np.testing.assert_array_equal(updates["w"], np.zeros((1, 2), F16))
    with standard_promotion():  # optax: 0/0
        twin = optax.adam(1e-3)
        assert bool(jnp.all(jnp.isnan(twin.update(zeros, twin.init(params))[0]["w"])))


def test_r18_float16_gradients_do_not_underflow_when_squared():
    params, grads = {"w": jnp.ones((1, 2), F16)}, {"w": jnp.full((1, 2), 1e-4, F16)}
    tx = fusedopt.adam(1e-3)
    updates, _ = tx.update(grads, tx.init(params), params)
    # g / (|g| + eps) with g = 1e-4 as float16 has it; the update is rounded to float16.
    g = float(F16.type(1e-4))
    np.testing.assert_allclose(np.asarray(updates["w"], np.float64), -1e-3 * g / (g + 1e-8), rtol=ROUNDING[F16])
    with standard_promotion():
        twin = optax.adam(1e-3)
        assert bool(jnp.all(twin.update(grads, twin.init(params))[0]["w"] == -jnp.inf))


def test_r19_moments_of_bfloat16_parameters_are_float32():
    params = {"w": jnp.ones((1, 2), BF16)}
    state, updates = constant_gradient(fusedopt.adam(1.0), params, params, 3000)
    np.testing.assert_allclose(state.nu[0][:2], 1 - 0.999**3000, rtol=1e-4)  # 0.950287; float32 sums 3000 roundings
    np.testing.assert_allclose(state.mu[0][:2], 1.0, rtol=1e-5)
    np.testing.assert_array_equal(np.asarray(updates["w"], np.float32), -1.0)
    assert state.nu[0].dtype == F32
    with standard_promotion():  # optax: nu sticks at 0.5, and the step is a third too long
        (twin_state, *_), twin_updates = constant_gradient(optax.adam(1.0), params, params, 3000)
        assert float(twin_state.nu["w"][0, 0]) == 0.5
        assert float(twin_updates["w"][0, 0]) < -1.34


MIXED = [(BF16, F32), (F32, BF16), (F16, F32), (BF16, F16)]


@pytest.mark.parametrize(("param", "grad"), MIXED, ids=str)
@pytest.mark.parametrize("name", ["momentum", "adamw", pytest.param("lars", marks=pytest.mark.slow)])
def test_r21_state_dtypes_do_not_depend_on_the_gradients(name, param, grad):
    tx = case(name).make(0.1)
    params, grads = {"w": jnp.ones((2, 3), param)}, {"w": jnp.ones((2, 3), grad)}
    state = tx.init(params)
    updates, after = tx.update(grads, state, params)
    applied, applied_state = tx.apply(grads, state, params)
    assert avals(after) == avals(applied_state) == avals(state)
    assert updates["w"].dtype == applied["w"].dtype == param


def test_r21_scan_of_three_steps_where_optax_changes_dtypes():
    params, grads = {"w": jnp.ones((2, 3), BF16)}, {"w": jnp.ones((2, 3), F32)}

    def three(tx):
        def body(carry, _):
            params, state = carry
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(body, (params, tx.init(params)), length=3)[0]

    with standard_promotion():
        _, state = jax.jit(lambda: three(fusedopt.adamw(0.1)))()
        assert int(state.count) == 3
        with pytest.raises(TypeError, match="scan body function carry"):
            three(optax.adamw(0.1))


@pytest.mark.parametrize("start", [256, 2**24, 2**31 - 2])
def test_r30_the_counter_counts_on(start):
    params, tx = {"w": jnp.ones((1, 2), BF16)}, fusedopt.adam(0.1)
    state = tx.init(params)._replace(count=jnp.int32(start))
    updates, state = tx.update(params, state, params)
    assert (int(state.count), state.count.dtype) == (start + 1, jnp.int32)
    assert bool(jnp.all(jnp.isfinite(updates["w"])))


def test_r30_the_counter_saturates():
    params, tx = {"w": jnp.ones((1, 2))}, fusedopt.adam(0.1)
    state = tx.init(params)._replace(count=jnp.int32(2**31 - 1), total_skipped=jnp.int32(2**31 - 1))
    _, after = tx.update(params, state, params)
    assert int(after.count) == 2**31 - 1
    _, after = tx.update(params, state, params, has_nan=True)
    assert int(after.total_skipped) == 2**31 - 1


def test_r32_the_first_step_is_exact():
    params, grads = {"w": jnp.ones((1, 2))}, {"w": jnp.full((1, 2), 2.0)}
    tx = fusedopt.adam(0.1)
    updates, _ = tx.update(grads, tx.init(params), params)
    np.testing.assert_allclose(updates["w"], -0.0999999995, rtol=2e-7)
    twin = optax.adam(0.1)  # 1 - 0.999 in float32 is off by 1.3e-5
    with standard_promotion():
        np.testing.assert_allclose(twin.update(grads, twin.init(params))[0]["w"], -0.09999933, rtol=1e-7)


def test_r33_a_b2_that_float32_cannot_tell_from_one():
    params, tx = {"w": jnp.ones((1, 2))}, fusedopt.adam(0.1, b2=0.99999999)
    updates, _ = tx.update(params, tx.init(params), params)
    # nu = 1e-8 g*g, so eps = 1e-8 is 1e-8 beside a root of 1.
    np.testing.assert_allclose(updates["w"], -0.1, rtol=1e-6)
    with pytest.raises(ValueError, match=r"`b2`: expected a number in \[0, 1\), got 1.0"):
        fusedopt.adam(0.1, b2=1.0)


def test_r34_eps_stands_outside_the_root():
    params, grads = {"w": jnp.ones((1, 2))}, {"w": jnp.full((1, 2), 1e-8)}
    tx = fusedopt.adam(0.1, eps=1e-8)
    np.testing.assert_allclose(tx.update(grads, tx.init(params))[0]["w"], -0.05, rtol=1e-5)
    inside = fusedopt.adam(0.1, eps=1e-8, eps_inside=True)
    want = 0.1 * np.sqrt(1e-3) / 0.1 * 1e-9 / np.sqrt(1e-3 * 1e-16 + 1e-8)
    np.testing.assert_allclose(inside.update(grads, inside.init(params))[0]["w"], -want, rtol=1e-5)


@pytest.mark.parametrize("kind", ["skip", "look away"])
def test_r35_a_gradient_whose_square_overflows(kind):
    params, tx = {"w": jnp.ones((1, 1))}, fusedopt.adam(0.1, skip_nonfinite=kind == "skip")
    state, skipped = tx.init(params), []
    for g in (1.0, 1e20, 1.0):
        updates, state = tx.update({"w": jnp.full((1, 1), g)}, state, params)
        skipped.append(bool(state.skipped))
    if kind == "skip":
        assert skipped == [False, True, False]
        assert int(state.count) == 2
        np.testing.assert_allclose(updates["w"], -0.1, rtol=1e-6)
    else:  # optax's silent stop: nu is infinite for ever
        assert skipped == [False, False, False]
        np.testing.assert_array_equal(state.nu[0][0], np.inf)
        np.testing.assert_array_equal(updates["w"], 0.0)


def test_r36b_zero_gradient_and_zero_eps():
    params, tx = {"w": jnp.ones((1, 2))}, fusedopt.adam(0.1, eps=0.0)
    zeros = {"w": jnp.zeros((1, 2))}
    updates, _ = tx.update(zeros, tx.init(params), params)
    np.testing.assert_array_equal(updates["w"], 0.0)
    twin = optax.adam(0.1, eps=0.0)
    with standard_promotion():
        assert bool(jnp.all(jnp.isnan(twin.update(zeros, twin.init(params))[0]["w"])))
    # 1e-15 squares to 1e-30; its step is a whole one.
    updates, _ = tx.update({"w": jnp.full((1, 2), 1e-15)}, tx.init(params), params)
    np.testing.assert_allclose(updates["w"], -0.1, rtol=1e-5)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "lars"])
def test_r39_signatures_are_optaxs_with_ours_keyword_only_behind(name):
    """Order and defaults; where a default differs on purpose, both values are stated."""
    ours, theirs = (inspect.signature(getattr(m, name)).parameters for m in (fusedopt, optax))
    differ = {"lars": {"weight_decay_mask": (None, True), "trust_ratio_mask": (None, True)}}.get(name, {})
    positional = [p for p in ours.values() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert [p.name for p in positional] == [
        p.name for p in theirs.values() if p.kind is not inspect.Parameter.KEYWORD_ONLY
    ]
    for p in theirs.values():
        assert (ours[p.name].default, p.default) == differ.get(p.name, (p.default, p.default)), p.name
        assert ours[p.name].kind == p.kind


@pytest.mark.parametrize("name", ["sgd", "adamw", "lars"])
def test_r39_every_argument_is_documented(name):
    factory = getattr(fusedopt, name)
    arguments = factory.__doc__.split("Args:")[1].split("State:")[0]
    documented = {n.strip() for line in re.findall(r"^\s{6}([a-z0-9_, ]+):", arguments, re.M) for n in line.split(",")}
    common = set(re.findall(r"^\s{2}([a-z_]+):", fusedopt.transforms.__doc__, re.M))
    assert documented - {"groups and what follows"} | common == set(inspect.signature(factory).parameters)


# --------------------------------------------------------------------------------------- dtypes


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


# ------------------------------------------------------------------------------------------- x64


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
