"""Leaves that are carried along (integers, booleans, random keys), and leaves without a gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fusedopt
from tests.helpers import assert_close, assert_equal, case, normal, one_of_each

LR = 0.1

# A step of ours against float64 at magnitudes near 1: two or three roundings of float32.
TOLERANCE = 1e-6

# One optimizer for each path through the code; the others take as long and are marked slow.
CORE = ("momentum", "adamw", "lars_optax")
EVERY = [pytest.param(n, marks=[] if n in CORE else [pytest.mark.slow]) for n in one_of_each(CORE)]


# ------------------------------------------------------------------------- leaves that are no weights


def carried():
    params = {"i": jnp.array([3, -4]), "w": jnp.ones((1, 2)), "flag": jnp.array([True, False]), "u": jnp.uint8(7)}
    grads = jax.grad(lambda p: jnp.sum(p["w"] ** 2), allow_int=True)(params)
    assert grads["i"].dtype == jax.dtypes.float0
    return params, grads


@pytest.mark.parametrize("name", EVERY)
def test_r95_integers_and_booleans_stay(name):
    params, grads = carried()
    tx = case(name).make(LR)

    def both(params):
        updates, state = tx.update(grads, tx.init(params), params)
        return optax.apply_updates(params, updates), tx.apply(grads, tx.init(params), params)[0], state

    after, applied, state = both(params)
    for got in (after, applied):
        for key in ("i", "flag", "u"):
            assert_equal(got[key], params[key])
        assert bool(jnp.all(got["w"] < 1))
    assert all(b.dtype == jnp.float32 for b in (*state.mu, *state.nu))


def test_r95_the_same_under_jit_where_gradients_are_made_inside():
    params, _ = carried()
    tx = fusedopt.adamw(LR)

    @jax.jit
    def step(params, state):
        grads = jax.grad(lambda p: jnp.sum(p["w"] ** 2), allow_int=True)(params)
        return tx.apply(grads, state, params)

    out, _ = step(params, tx.init(params))
    assert_equal(out["i"], params["i"])
    assert float(out["w"][0, 0]) < 1


@pytest.mark.parametrize("grad", ["integer", "none"])
def test_r95_integer_gradients_of_integers_are_passed_over(grad):
    params = {"i": jnp.array([100]), "w": jnp.ones((1, 2))}
    grads = {"i": jnp.array([5]) if grad == "integer" else None, "w": jnp.ones((1, 2))}
    tx = fusedopt.adam(LR)
    updates, _ = tx.update(grads, tx.init(params), params)
    # optax.adam gives a float update here, and apply_updates truncates 100 - 0.1 to 99.
    assert_equal(updates["i"], jnp.array([0]))
    if grad == "integer":
        twin = optax.adam(LR)
        with jax.numpy_dtype_promotion("standard"):
            theirs, _ = twin.update(grads, twin.init(params), params)
            assert int(optax.apply_updates(params, theirs)["i"][0]) == 99


def test_integers_in_flat_params():
    params, _ = carried()
    flat, tx = fusedopt.pack(params), fusedopt.adamw(LR)
    assert_equal(flat.tree, params)
    grads = jax.grad(lambda f: jnp.sum(f.tree["w"] ** 2), allow_int=True)(flat)
    updates, _ = tx.update(grads, tx.init(flat), flat)
    applied, _ = tx.apply(grads, tx.init(flat), flat)
    for got in (optax.apply_updates(flat, updates).tree, applied.tree):
        for key in ("i", "flag", "u"):
            assert_equal(got[key], params[key])
        assert bool(jnp.all(got["w"] < 1))


@pytest.mark.parametrize("mode", ["tree", "flat"])
def test_random_keys_are_carried_along(mode):
    params, tx = {"key": jax.random.key(3), "w": jnp.ones((1, 2))}, fusedopt.adamw(LR)
    if mode == "tree":
        out, _ = jax.jit(tx.apply)({"key": None, "w": jnp.ones((1, 2))}, tx.init(params), params)
    else:
        flat = fusedopt.pack(params)
        grads = jax.grad(lambda f: jnp.sum(f.tree["w"]), allow_int=True)(flat)
        out = tx.apply(grads, tx.init(flat), flat)[0].tree
    assert bool(jnp.all(jax.random.key_data(out["key"]) == jax.random.key_data(params["key"])))
    assert bool(jnp.all(out["w"] < 1))


# ------------------------------------------------------------------------------------ None gradients


def slot_of(state, layout, path, slot):
    """A leaf's part of a slot, in its own shape."""
    s = layout.segment(path)
    live = [b for b in layout.buckets if not b.frozen]
    buffer = np.asarray(getattr(state, slot)[live.index(layout.buckets[s.bucket])])
    return buffer.reshape(-1)[s.offset : s.offset + s.size].reshape(s.shape)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("solo_from", [1, None])
@pytest.mark.parametrize("name", EVERY)
def test_r94_no_gradient_is_not_a_zero_gradient(name, solo_from, in_place):
    """A leaf without gradient keeps parameter and slots to the bit; one with a zero gradient decays and coasts."""
    params = {k: jnp.asarray(normal((3, 5), i)) for i, k in enumerate(("absent", "other", "zero"))}
    ones = jax.tree.map(jnp.ones_like, params)
    tx = case(name).make(LR, packing=fusedopt.Packing(solo_from=solo_from))
    layout = fusedopt.pack(params, tx).layout
    grads = {"absent": None, "other": ones["other"], "zero": jnp.zeros((3, 5))}

    def step(grads, state, params):
        if in_place:
            return None, *tx.apply(grads, state, params)
        updates, state = tx.update(grads, state, params)
        return updates, optax.apply_updates(params, updates), state

    _, before, state = step(ones, tx.init(params), params)
    updates, after, new = step(grads, state, before)
    other, ones = {"other": params["other"]}, {"other": ones["other"]}
    _, alone, alone_state = step(ones, tx.init(other), other)
    alone = step(ones, alone_state, alone)[1]
    if not in_place:
        assert_equal(updates["absent"], jnp.zeros((3, 5)))
    assert_equal(after["absent"], before["absent"])
    assert np.any(np.asarray(after["zero"]) != before["zero"])
    assert np.all(np.asarray(after["other"]) != before["other"])
    for slot in tx.optimizer.rule.slots:
        was, now = (slot_of(s, layout, ("absent",), slot) for s in (state, new))
        assert_equal(now, was)
        assert not np.array_equal(slot_of(new, layout, ("zero",), slot), slot_of(state, layout, ("zero",), slot))
    assert_close(alone, {"other": after["other"]}, TOLERANCE)  # the neighbour does not notice


def test_r94_the_documented_values():
    params = {"w": jnp.full((1, 2), 2.0), "v": jnp.full((1, 2), 2.0)}
    tx = fusedopt.adamw(LR, weight_decay=0.1)
    updates, _ = tx.update({"w": None, "v": jnp.zeros((1, 2))}, tx.init(params), params)
    assert_equal(updates["w"], jnp.zeros((1, 2)))
    np.testing.assert_allclose(updates["v"], -LR * 0.1 * 2.0, rtol=1e-6)


@pytest.mark.parametrize("in_place", [False, True])
def test_r94_all_gradients_none(in_place):
    params = {"w": jnp.ones((2, 2)), "b": jnp.ones(3), "none": None}
    none = jax.tree.map(lambda _: None, params)
    tx = fusedopt.adamw(LR)
    state = tx.init(params)
    fn = tx.apply if in_place else tx.update
    out, new = jax.jit(lambda s, p: fn(none, s, p))(state, params)
    assert_equal(out, params if in_place else jax.tree.map(jnp.zeros_like, params))
    assert_equal((new.mu, new.nu), (state.mu, state.nu))
    assert int(new.count) == 1


def test_r94_none_beside_a_nan_keeps_everything():
    params = {"a": jnp.ones((1, 2)), "b": jnp.ones((1, 2))}
    tx = fusedopt.adamw(LR)
    _, state = tx.update(params, tx.init(params), params)
    updates, new = tx.update({"a": None, "b": jnp.array([[jnp.nan, 1.0]])}, state, params)
    assert_equal(updates, jax.tree.map(jnp.zeros_like, params))
    assert_equal((new.mu, new.nu, new.count), (state.mu, state.nu, state.count))
    assert bool(new.skipped)


def test_r116_a_leaf_that_gets_gradients_late_has_the_common_count():
    params = {"early": jnp.ones((1, 2)), "late": jnp.ones((1, 2))}
    tx = fusedopt.adam(1.0)
    state = tx.init(params)
    for t in range(11):
        grads = {"early": jnp.ones((1, 2)), "late": jnp.ones((1, 2)) if t == 10 else None}
        updates, state = tx.update(grads, state, params)
    assert int(state.count) == 11
    np.testing.assert_allclose(updates["early"], -1.0, rtol=1e-5)
    m, v = 0.1 / (1 - 0.9**11), 0.001 / (1 - 0.999**11)
    np.testing.assert_allclose(updates["late"], -m / np.sqrt(v), rtol=1e-5)


def test_r117_an_empty_group_still_counts():
    params = {"w": jnp.ones((1, 2))}
    tx = fusedopt.adam(1.0)
    state = tx.init(params)
    for t in range(1, 4):
        _, state = tx.update(params, state, params)
        assert int(state.count) == t
