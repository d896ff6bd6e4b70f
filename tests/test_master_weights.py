"""Master weights: float32 copies that are updated, of which the parameters are the rounded view."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fusedopt
from tests.helpers import (
    assert_close,
    assert_equal,
    case,
    each_once,
    filled,
    final_params,
    gradients,
    standard_promotion,
)

SHAPES = {"conv": {"kernel": (3, 1, 2, 5), "bias": (129,)}, "wide": {"kernel": (140, 130)}, "scale": ()}


def mixed(dtype=jnp.bfloat16):
    """Two leaves of lower precision in each group, packed and solo, beside float32 ones."""
    params = filled(SHAPES)
    low = jax.tree.map(lambda x: jnp.asarray(x, dtype), {"conv": params["conv"], "wide": params["wide"]})
    return {"low": low, "full": jax.tree.map(jnp.asarray, params)}


def in_float32(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float32), tree)


def rounded(tree, like):
    return jax.tree.map(lambda x, y: np.asarray(np.asarray(x, np.float32), y.dtype), tree, like)


def updated(tx, params, grads, n=1, protocol="apply", **extra):
    state = tx.init(params)
    step = jax.jit(tx.apply if protocol == "apply" else tx.update)
    for _ in range(n):
        out, state = step(grads, state, params, **extra)
        with standard_promotion():
            params = out if protocol == "apply" else optax.apply_updates(params, out)
    return params, state


@pytest.mark.parametrize("protocol", ["apply", "update"])
def test_R23_bfloat16_weights_move_with_a_master_and_stand_still_without(protocol):
    p, g = {"w": jnp.ones((1, 3), jnp.bfloat16)}, {"w": jnp.ones((1, 3), jnp.bfloat16)}
    with_master, state = updated(fusedopt.sgd(1e-3, master_weights=True), p, g, 100, protocol)
    np.testing.assert_allclose(state.master[0][:3], 0.9, rtol=2e-6)  # 100 roundings of half an ulp at most
    assert with_master["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(with_master["w"].astype(jnp.float32), 0.8984375)
    without, _ = updated(fusedopt.sgd(1e-3), p, g, 100, protocol)
    np.testing.assert_array_equal(without["w"].astype(jnp.float32), 1.0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_R24_each_leaf_of_lower_precision_has_a_float32_master_and_no_other_has(dtype):
    params = mixed(dtype)
    tx = fusedopt.adamw(1e-3, master_weights=True)
    state = tx.init(params)
    low = [b for b in fusedopt.pack(params, tx).layout.buckets if b.dtype == dtype]
    assert [(m.shape, m.dtype) for m in state.master] == [(b.shape, jnp.float32) for b in low]
    assert len(low) == 3  # biases, weights, and the large weight
    assert tx.init(in_float32(params)).master == ()


MASTERED = [(n, m, jnp.bfloat16) for n, m in each_once(["apply", "flat", "update"], all_of=("adamw", "lars", "lamb"))]
MASTERED += [("adamw", mode, jnp.float16) for mode in ("apply", "flat", "update")]


@pytest.mark.parametrize(
    ("name", "mode", "dtype"),
    [
        pytest.param(n, m, d, marks=() if (n, m, d) == ("adamw", "flat", jnp.bfloat16) else pytest.mark.slow)
        for n, m, d in MASTERED
    ],
)
def test_parameters_are_the_rounded_masters_which_take_the_steps_of_float32_parameters(name, mode, dtype):
    params = mixed(dtype)
    stacked = gradients(in_float32(params), 3)
    grads = [jax.tree.map(lambda x, p, i=i: jnp.asarray(x[i], p.dtype), stacked, params) for i in range(3)]
    tx = case(name).make(1e-2, master_weights=True)
    plain = case(name).make(1e-2)
    held = fusedopt.pack(params, tx) if mode == "flat" else params
    state, reference, reference_state = tx.init(held), in_float32(params), plain.init(in_float32(params))
    step, reference_step = jax.jit(tx.update if mode == "update" else tx.apply), jax.jit(plain.apply)
    for g in grads:
        given = fusedopt.pack(g, tx) if mode == "flat" else g
        out, state = step(given, state, held)
        with standard_promotion():
            held = optax.apply_updates(held, out) if mode == "update" else out
        reference, reference_state = reference_step(in_float32(g), reference_state, reference)
    got = held.tree if mode == "flat" else held
    low, full = got["low"], got["full"]
    masters = jax.tree.leaves(masters_of(tx, state, params)["low"])
    # The same formula in float32 in another program: an fma here and there.
    for master, want in zip(masters, jax.tree.leaves(reference["low"]), strict=True):
        assert_close(master, want, 3 * 6e-8)
    assert_close(full, reference["full"], 3 * 6e-8)
    assert_equal(jax.tree.leaves(low), [x.astype(dtype) for x in masters])  # bit for bit


def masters_of(tx, state, params):
    """The masters by leaf, for the leaves that have one."""
    leaves, treedef = jax.tree.flatten(jax.tree.map(lambda x: None, params), is_leaf=lambda x: x is None)
    layout = fusedopt.pack(params, tx).layout
    masters = iter(state.master)
    for b in layout.buckets:
        if b.dtype.itemsize > 2:
            continue
        buffer = np.asarray(next(masters)).reshape(-1)
        for s in layout.segments_of(b):
            leaves[s.leaf] = buffer[s.offset : s.offset + s.size].reshape(s.shape)
    return treedef.unflatten(leaves)


@pytest.mark.parametrize("mode", ["apply", "update"])
def test_the_update_is_float32_and_ends_exactly_at_the_rounded_master(mode):
    """A bfloat16 difference could not say every step, for example from 1 to 0.004."""
    p = {"w": jnp.ones((1, 4), jnp.bfloat16)}
    g = {"w": jnp.asarray([[0.99609375, 0.9971, 1.0, 3.14159]], jnp.float32)}
    tx = fusedopt.sgd(1.0, master_weights=True)
    new, state = updated(tx, p, g, 1, mode)
    want = np.asarray(1 - np.asarray(g["w"]), jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(new["w"]), want)
    np.testing.assert_allclose(state.master[0][:4], 1 - g["w"][0], rtol=1e-6)
    u = jax.eval_shape(tx.update, g, tx.init(p), p)[0]
    assert u["w"].dtype == jnp.float32


def test_float16_parameters_below_its_normal_numbers_are_the_rounded_masters_too():
    values = np.asarray([[1e-6, 3e-8, 2.9e-8, 6e-5, -1e-7, 6.1e-5]], np.float32)
    p = {"w": jnp.zeros((1, 6), jnp.float16)}
    tx = fusedopt.sgd(1.0, master_weights=True)
    for mode in ("apply", "update"):
        new, _ = updated(tx, p, {"w": jnp.asarray(-values)}, 1, mode)
        np.testing.assert_array_equal(np.asarray(new["w"]), values.astype(np.float16))


@pytest.mark.parametrize("mode", ["apply", "update"])
def test_a_skipped_step_keeps_parameters_that_are_not_their_masters(mode):
    """Someone may have changed a parameter without its master: a skip is no occasion to put that right."""
    params = {"w": jnp.full((1, 5), 2.0, jnp.bfloat16)}
    tx = fusedopt.adamw(0.1, master_weights=True)
    state = tx.init({"w": jnp.ones((1, 5), jnp.bfloat16)})
    step = jax.jit(getattr(tx, mode))
    out, new = step({"w": jnp.full((1, 5), jnp.nan, jnp.bfloat16)}, state, params)
    assert_equal(out, params if mode == "apply" else {"w": np.zeros((1, 5), np.float32)})
    assert_equal(new._replace(skipped=state.skipped, total_skipped=state.total_skipped), state)
    out, _ = step({"w": jnp.zeros((1, 5), jnp.bfloat16)}, state._replace(master=state.master), params)
    with standard_promotion():
        moved = out["w"] if mode == "apply" else optax.apply_updates(params, out)["w"]
    np.testing.assert_array_equal(moved.astype(jnp.float32), 1.0)  # where its master is


def test_R25_a_state_without_masters_says_how_to_get_them():
    params = mixed()
    old = fusedopt.adamw(1e-3).init(params)
    tx = fusedopt.adamw(1e-3, master_weights=True)
    with pytest.raises(ValueError, match=r"`state.master`.*got 0 buffers, expected 3.*_replace\(master=tx.init"):
        tx.apply(params, old, params)
    state = old._replace(master=tx.init(params).master)
    new, state = jax.jit(tx.apply)(jax.tree.map(jnp.ones_like, params), state, params)
    leaves, treedef = jax.tree.flatten(state)  # as a checkpoint stores it: leaves in and out
    restored = treedef.unflatten([np.array(x) for x in leaves])
    assert all(m.dtype == np.float32 for m in restored.master)
    assert_equal(jax.jit(tx.apply)(params, restored, new), jax.jit(tx.apply)(params, state, new))


def test_no_two_leaves_of_a_state_share_memory_and_none_is_a_parameter():
    params = {"w": jnp.ones((200, 200)), "v": jnp.ones((200, 200), jnp.bfloat16)}
    tx = fusedopt.adamw(1e-3, master_weights=True, ema_decay=0.9)
    for held in (params, fusedopt.pack(params, tx)):
        state = tx.init(held)
        leaves = jax.tree.leaves((held, state))
        places = [x.unsafe_buffer_pointer() for x in leaves]
        assert len(set(places)) == len(places)


def test_abstract_parameters_need_eval_shape():
    abstract = {"w": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)}
    tx = fusedopt.adamw(1e-3, master_weights=True)
    with pytest.raises(TypeError, match=r"`params` leaf `w`.*jax\.eval_shape"):
        tx.init(abstract)
    assert jax.eval_shape(tx.init, abstract).master[0].dtype == jnp.float32


def test_vmap_scan_and_grad_go_through_masters():
    p = {"w": jnp.ones((4, 1, 3), jnp.bfloat16)}
    tx = fusedopt.adamw(0.1, master_weights=True, ema_decay=0.5, clip_norm=1.0)
    state = jax.vmap(tx.init)(p)
    g = {"w": jnp.linspace(0.1, 2, 12).reshape(4, 1, 3).astype(jnp.bfloat16)}
    together, _ = jax.jit(jax.vmap(tx.apply))(g, state, p)
    for i in range(4):
        one = jax.tree.map(lambda x, i=i: x[i], (g, p))
        alone, _ = jax.jit(tx.apply)(one[0], tx.init(one[1]), one[1])
        assert_equal(jax.tree.map(lambda x, i=i: x[i], together), alone)

    def body(carry, _):
        params, state = carry
        return tx.apply(jax.tree.map(lambda x: x[0], g), state, params), None

    first = jax.tree.map(lambda x: x[0], p)
    (scanned, _), _ = jax.jit(lambda c: jax.lax.scan(body, c, None, length=2))((first, tx.init(first)))
    stepped, _ = updated(tx, first, jax.tree.map(lambda x: x[0], g), 2)
    assert_equal(scanned, stepped)


def test_final_params_of_all_modes_agree():
    params = {"w": jnp.asarray(filled({"w": (5, 7)})["w"], jnp.bfloat16)}
    grads = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), gradients(in_float32(params), 4))
    tx = fusedopt.lamb(1e-2, master_weights=True)
    with standard_promotion():
        results = [in_float32(final_params(tx, mode, params, grads)) for mode in ("update", "apply", "flat_apply")]
    assert_equal(results[1], results[0])
    assert_equal(results[2], results[0])
