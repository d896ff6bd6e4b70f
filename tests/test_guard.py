"""Unusable gradients: seen wherever they are, and a skipped step leaves everything bit for bit as it was."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusedopt
from tests.guard_cases import INF, NAN, assert_skipped, model, stepper
from tests.helpers import MODES, assert_equal, each_once

DEFAULT = [("lars", "apply"), ("sgd", "update"), ("lars_optax", "flat_apply"), *(("adamw", m) for m in MODES)]
EVERY_MODE = [
    pytest.param(n, m, marks=[] if (n, m) in DEFAULT else [pytest.mark.slow])
    for n, m in dict.fromkeys([*DEFAULT, *each_once(MODES)])
]


def poisoned(tree, where, value=NAN):
    """The tree with `value` in one element; `where` is an index among all elements, leaf by leaf."""
    leaves, treedef = jax.tree.flatten(tree)
    for i, x in enumerate(leaves):
        if where < x.size:
            flat = np.array(x).reshape(-1)
            flat[where] = value
            leaves[i] = jnp.asarray(flat.reshape(x.shape))
            return treedef.unflatten(leaves)
        where -= x.size
    raise AssertionError("no such element")


def ends_of_leaves(tree):
    """The first and last element of every leaf, as indices for `poisoned`."""
    out, start = [], 0
    for x in jax.tree.leaves(tree):
        if x.size:
            out += [start, start + x.size - 1]
        start += x.size
    return sorted(set(out))


@pytest.mark.parametrize(("name", "mode"), EVERY_MODE)
def test_r46_r64_a_nan_in_any_leaf_skips_the_whole_step(name, mode):
    """First and last element of each leaf: solo, packed, 0-d, bfloat16, frozen group; moments, parameters, counters,
    schedule values and trust ratios keep their bits."""
    _, step, start, state = stepper(name, mode)
    grads = model(2)
    for where in ends_of_leaves(grads):
        out, after = step(poisoned(grads, where), state, start, {})
        assert_skipped(mode, start, state, out, after)
    for value in (INF, -INF):
        out, after = step(poisoned(grads, 7, value), state, start, {})
        assert_skipped(mode, start, state, out, after)
    _, after = step(grads, state, start, {})
    assert (bool(after.skipped), int(after.count)) == (False, int(state.count) + 1)


def test_r40_adam_after_a_skip():
    params, tx = {"w": jnp.ones((1, 1))}, fusedopt.adam(0.1)
    state, got, counts = tx.init(params), [], []
    for g in (1.0, NAN, -1.0):
        updates, state = tx.update({"w": jnp.full((1, 1), g)}, state, params)
        got.append(float(updates["w"][0, 0]))
        counts.append(int(state.count))
    np.testing.assert_allclose(got, [-0.1, 0.0, 0.00526316], rtol=1e-5)  # .00451822 if the count had moved
    assert counts == [1, 1, 2]
    assert int(state.total_skipped) == 1


def test_r42_our_own_skip_never_gives_up():
    params, tx = {"w": jnp.ones((1, 1))}, fusedopt.adam(0.1)
    state, totals, skipped, got = tx.init(params), [], [], []
    for g in (1.0, NAN, INF, NAN, 1.0):
        updates, state = tx.update({"w": jnp.full((1, 1), g)}, state, params)
        totals.append(int(state.total_skipped))
        skipped.append(bool(state.skipped))
        got.append(float(updates["w"][0, 0]))
    assert totals == [0, 1, 2, 3, 3]
    assert skipped == [False, True, True, True, False]
    np.testing.assert_allclose(got, [-0.1, 0, 0, 0, -0.1], rtol=1e-6)


def test_r44_groups_skip_together_and_count_together():
    params = {"kernel": jnp.ones((1, 2)), "bias": jnp.ones(2)}
    tx = fusedopt.adam(1.0)
    state = tx.init(params)
    overflow = {"kernel": jnp.full((1, 2), INF), "bias": jnp.ones(2)}
    _, state = tx.update(overflow, state, params)
    for t, g in enumerate((1.0, 2.0, 3.0), 1):
        updates, state = tx.update(jax.tree.map(lambda x, g=g: g * x, params), state, params)
        m = sum(0.1 * 0.9 ** (t - s) * s for s in range(1, t + 1)) / (1 - 0.9**t)
        v = sum(0.001 * 0.999 ** (t - s) * s * s for s in range(1, t + 1)) / (1 - 0.999**t)
        for u in jax.tree.leaves(updates):
            np.testing.assert_allclose(u, -m / np.sqrt(v), rtol=1e-5)


FLAGS = {
    "two": 2.0,
    "true": True,
    "int": 1,
    "minus": -1,
    "nan": NAN,
    "uint8": np.uint8(3),
    "bool array": jnp.array(True),
    "float16": jnp.float16(0.5),
    "bfloat16": jnp.bfloat16(2),
    "int32": jnp.int32(7),
    "tiny": jnp.float32(1e-30),
}


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("skip_nonfinite", [True, False])
def test_r46_r47_the_callers_flag_of_any_dtype(flag, skip_nonfinite):
    """Without any loss scale, and with the library's own look at the gradients switched off as well."""
    params = {"w": jnp.ones((1, 2))}
    tx = fusedopt.adamw(0.1, skip_nonfinite=skip_nonfinite)
    _, state = tx.update(params, tx.init(params), params)
    updates, after = tx.update(params, state, params, has_nan=FLAGS[flag])
    assert_skipped("update", params, state, updates, after)


@pytest.mark.parametrize("flag", [False, 0, 0.0, -0.0, None, jnp.array(False), jnp.bfloat16(0)], ids=str)
def test_r47_a_flag_of_zero_is_no_skip(flag):
    params, tx = {"w": jnp.ones((1, 2))}, fusedopt.adamw(0.1)
    _, after = tx.update(params, tx.init(params), params, has_nan=flag)
    assert (bool(after.skipped), int(after.count)) == (False, 1)


def test_flags_and_scales_that_are_no_scalars_are_refused():
    params, tx = {"w": jnp.ones((1, 2))}, fusedopt.adamw(0.1)
    for name in ("has_nan", "loss_scale"):
        with pytest.raises(ValueError, match=rf"`{name}`: expected a 0-d .*, got shape \(2,\)"):
            tx.update(params, tx.init(params), params, **{name: jnp.ones(2)})


def test_skip_nonfinite_false_only_drops_the_look():
    params, tx = {"w": jnp.ones((1, 2))}, fusedopt.adamw(0.1, skip_nonfinite=False)
    grads = {"w": jnp.array([[NAN, 1.0]])}
    updates, after = tx.update(grads, tx.init(params), params)
    assert bool(jnp.isnan(updates["w"][0, 0]))
    assert (bool(after.skipped), int(after.count), int(after.total_skipped)) == (False, 1, 0)
    _, after = tx.update(grads, tx.init(params), params, loss_scale=INF)
    assert (bool(after.skipped), int(after.count)) == (True, 0)


@pytest.mark.parametrize("mode", MODES)
def test_r64_odd_bits_survive_a_skip(mode):
    """Parameters: zeros of both signs, subnormals, infinities, NaN. Moments: zeros of both signs, infinities, NaN."""
    odd = np.array([0.0, -0.0, 1e-40, -1e-45, INF, -INF, NAN, 3.4e38, -1.2e-38, 1.5], np.float32)
    tx = fusedopt.adamw(0.1, packing=fusedopt.Packing(solo_from=20))
    params = {"packed": jnp.asarray(odd[:, None]), "solo": jnp.asarray(np.tile(odd, 2)[:, None])}
    moment = np.array([0.0, -0.0, 1.2e-38, -3e38, INF, -INF, NAN, 2.0, -2.0, 1.0], np.float32)
    flat = mode.startswith("flat")
    start = fusedopt.pack(params, tx) if flat else params
    mu = (jnp.asarray(np.pad(moment, (0, 1024 - 10))), jnp.asarray(np.tile(moment, 2)[:, None]))
    state = tx.init(start)._replace(mu=mu, nu=jax.tree.map(jnp.abs, mu))
    grads = jax.tree.map(lambda x: jnp.full_like(x, NAN), start)
    out, after = jax.jit(tx.apply if mode.endswith("apply") else tx.update)(grads, state, start)
    assert_skipped(mode, start, state, out, after)


def test_subnormal_moments_are_flushed_by_a_skipped_step_as_by_any_other():
    """XLA on CPU makes no subnormal results, so only a restored state can hold such moments."""
    tx, params = fusedopt.sgd(0.1, momentum=0.9), {"w": jnp.ones((1, 3))}
    small = np.zeros(1024, np.float32)
    small[:3] = 1e-40, -1e-40, 1.2e-38
    state = tx.init(params)._replace(mu=(jnp.asarray(small),))
    _, after = tx.update({"w": jnp.full((1, 3), NAN)}, state, params)
    assert_equal(np.asarray(after.mu[0])[:3], np.array([0.0, -0.0, 1.2e-38], np.float32))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_r64_every_value_of_16_bits_survives_a_skip(dtype):
    every = np.arange(2**16, dtype=np.uint16).view(dtype)
    every = np.where(np.isnan(every.astype(np.float32)), dtype(NAN), every)  # one NaN: which one is not kept
    params, tx = {"w": jnp.asarray(every.reshape(256, 256))}, fusedopt.adamw(0.1)
    state = tx.init(params)
    out, after = jax.jit(tx.apply)(jax.tree.map(lambda x: jnp.full_like(x, NAN), params), state, params)
    assert_skipped("apply", params, state, out, after)


@pytest.mark.parametrize("name", ["adamw", "lars"])
def test_r64_no_host_transfer_and_no_callback(name):
    tx, step, start, state = stepper(name, "apply")
    grads = model(2)
    whole = lambda g, s, p: tx.apply(g, s, p, loss_scale=2.0, has_nan=0.0)  # noqa: E731
    text = str(jax.make_jaxpr(whole)(grads, state, start))
    # A choice by platform is a cond of the jaxpr, and gone when XLA has seen that its index is a constant.
    assert "conditional(" not in jax.jit(whole).lower(grads, state, start).compile().as_text()
    for word in ("callback", "device_put", "infeed", "outfeed", "while["):
        assert word not in text, word
    with jax.transfer_guard("disallow"):  # a look at a value, or a constant sent at each call, would raise
        jax.block_until_ready(step(grads, state, start, {}))


@pytest.mark.parametrize("factory", ["adamw", "momentum", pytest.param("lars", marks=pytest.mark.slow)])
def test_schedules_wait_for_a_skipped_step(factory):
    """The value used, and the one shown, is that of the finite steps."""

    def schedule(count):
        return 1.0 + count.astype(jnp.float32)

    params = {"w": jnp.ones((1, 2))}
    tx = {
        "adamw": lambda: fusedopt.adamw(schedule, weight_decay=schedule),
        "lars": lambda: fusedopt.lars(schedule),
        "momentum": lambda: fusedopt.sgd(schedule, momentum=0.0),
    }[factory]()
    state, seen = tx.init(params), []
    for g in (1.0, NAN, NAN, 1.0, INF, 1.0):
        updates, state = tx.update({"w": jnp.full((1, 2), g)}, state, params)
        seen.append(float(tx.hyperparams(state)["learning_rate"]))
        if factory == "momentum":
            np.testing.assert_array_equal(updates["w"], -seen[-1] if np.isfinite(g) else 0.0)
    assert seen == [1.0, 1.0, 1.0, 2.0, 2.0, 3.0]
    assert int(state.count) == 3


def test_a_skipped_step_keeps_trust_ratios_and_set_hyperparams():
    params, tx = {"w": jnp.full((1, 2), 3.0)}, fusedopt.lars(0.5, trust_coefficient=0.1)
    _, state = tx.update(params, tx.init(params), params)
    state = tx.set_hyperparams(state, learning_rate=0.25)
    ratio = tx.trust_ratios(state)[("w",)]
    np.testing.assert_allclose(ratio, 0.1, rtol=1e-6)
    _, after = tx.update({"w": jnp.full((1, 2), NAN)}, state, params, learning_rate=7.0)
    assert float(tx.hyperparams(after)["learning_rate"]) == 0.25
    assert_equal(tx.trust_ratios(after)[("w",)], ratio)


def test_a_large_gradient_hides_no_nan():
    """XLA on CPU drops NaN in large max reductions; three million elements, the NaN anywhere."""
    n = 3_000_000
    grad = jnp.ones((n,))
    seen = jax.jit(lambda g, i, value: fusedopt.has_nan({"x": g.at[i].set(value)}))
    for where in (0, 1, 12345, n // 2, n - 2, n - 1):
        for value in (NAN, INF, -INF):
            assert bool(seen(grad, where, value)), (where, value)
    assert not bool(seen(grad, 5, 3e38))


def test_a_large_gradient_in_a_step():
    n = 1_000_000
    params, tx = {"w": jnp.ones((n, 3))}, fusedopt.sgd(0.5)
    step = jax.jit(lambda s, p, i, value: tx.apply({"w": jnp.ones((n, 3)).at[i, 2].set(value)}, s, p))
    state = tx.init(params)
    for where in (0, n - 1):
        out, after = step(state, params, where, NAN)
        assert bool(after.skipped)
        assert bool(jnp.all(out["w"] == 1))
    out, after = step(state, params, 3, 3e38)  # as large as can be, and finite
    assert not bool(after.skipped)
    assert float(out["w"][0, 0]) == 0.5
