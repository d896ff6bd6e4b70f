"""FlatParams: a pytree of buffers that stands for the tree."""

from __future__ import annotations

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fusedopt
from fusedopt import FlatParams, Group, Packing
from tests.helpers import assert_close, assert_equal, counted, filled, flat_runs, ragged

SHAPES = {"fc": {"kernel": (3, 5), "bias": (5,)}, "conv": {"kernel": (2, 2, 1, 3)}, "big": (40, 30), "t": ()}
PACKING = Packing(solo_from=1000)


@functools.cache
def params_and_flat():
    params = jax.tree.map(jnp.asarray, filled(SHAPES))
    return params, jax.jit(lambda p: fusedopt.pack(p, packing=PACKING))(params)


tree_of = jax.jit(lambda flat: flat.tree)


def loss(tree):
    x = jnp.sin(tree["fc"]["kernel"]) @ tree["fc"]["bias"]
    return jnp.sum(x**2) * tree["t"] + jnp.sum(tree["conv"]["kernel"] ** 3) + jnp.sum(jnp.cos(tree["big"]))


# ------------------------------------------------------------------------------ pack and tree


@pytest.mark.parametrize("packing", [Packing(), Packing(solo_from=100, align=256)])
def test_the_tree_comes_back_bit_for_bit(packing):
    params = ragged()
    flat = jax.jit(lambda p: fusedopt.pack(p, packing=packing))(params)
    assert_equal(tree_of(flat), jax.tree.map(jnp.asarray, params))
    assert [x.shape for x in flat.buckets] == [b.shape for b in flat.layout.buckets]
    for buffer, bucket in zip(flat.buckets, flat.layout.buckets, strict=True):
        used = np.zeros(buffer.size, bool)
        for s in flat.layout.segments_of(bucket):
            used[s.offset : s.offset + s.size] = True
        assert not np.any(np.asarray(buffer).ravel()[~used])


def test_none_and_integer_leaves_are_carried_along():
    tree = {
        "w": jnp.ones((2, 2)),
        "n": None,
        "step": jnp.int32(7),
        "flags": np.array([True, False]),
        "key": jax.random.key(3),
    }
    flat = fusedopt.pack(tree)
    back = flat.tree
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    assert back["n"] is None
    assert (back["step"], back["step"].dtype) == (7, jnp.int32)
    np.testing.assert_array_equal(back["flags"], [True, False])
    assert (jax.random.key_data(back["key"]) == jax.random.key_data(tree["key"])).all()
    assert len(jax.tree.leaves(flat)) == 1 + 3
    grads = flat.tree_unflatten(flat.layout, [jnp.ones_like(flat.buckets[0]), *flat.rest])
    tx = fusedopt.sgd(0.5)
    new, _ = tx.apply(grads, tx.init(flat), flat)
    np.testing.assert_array_equal(new.tree["w"], 0.5)
    assert new.tree["step"] == 7
    updates, _ = tx.update(grads, tx.init(flat), flat)
    assert optax.apply_updates({"step": flat.tree["step"]}, {"step": updates.tree["step"]})["step"] == 7


def test_python_and_numpy_numbers_are_packed():
    flat = fusedopt.pack({"a": 1.5, "b": np.float32(2.5), "c": np.ones((2, 2), np.float32)})
    assert {k: float(jnp.sum(v)) for k, v in flat.tree.items()} == {"a": 1.5, "b": 2.5, "c": 4.0}


@pytest.mark.parametrize("tree", [{}, (), {"a": {}}, {"a": None}, {"a": np.zeros((0, 3), np.float32)}])
def test_empty_trees(tree):
    flat = fusedopt.pack(tree)
    assert jax.tree.structure(flat.tree) == jax.tree.structure(tree)
    tx = fusedopt.adamw(0.1)
    new, state = tx.apply(flat, tx.init(flat), flat)
    assert jax.tree.structure(new.tree) == jax.tree.structure(tree)
    assert state.count == 1


def test_pack_twice_and_of_what_is_no_array():
    flat = fusedopt.pack({"w": jnp.ones(2)})
    with pytest.raises(TypeError, match="`params` is FlatParams already"):
        fusedopt.pack(flat)
    with pytest.raises(TypeError, match="`params` leaf `a/name`: expected an array or a number, got str"):
        fusedopt.pack({"a": {"name": "x"}})


def test_pack_works_under_eval_shape_jit_and_vmap():
    params, flat = params_and_flat()
    make = lambda p: fusedopt.pack(p, packing=PACKING)  # noqa: E731
    abstract = jax.eval_shape(make, params)
    assert abstract.layout is flat.layout
    assert [x.shape for x in abstract.buckets] == [x.shape for x in flat.buckets]
    assert_equal(jax.jit(make)(params), flat)
    stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), params)
    batch = jax.jit(jax.vmap(make))(stacked)
    assert batch.layout is flat.layout
    assert_equal(tree_of(batch), stacked)  # leading axes stay in front
    assert_equal(jax.jit(jax.vmap(lambda f: f.tree))(batch), stacked)


# ------------------------------------------------------------------------------ differentiation


def test_gradients_arrive_flat_and_equal_those_of_the_tree():
    params, flat = params_and_flat()
    value, grads = jax.jit(jax.value_and_grad(lambda f: loss(f.tree)))(flat)
    want_value, want = jax.jit(jax.value_and_grad(loss))(params)
    assert isinstance(grads, FlatParams)
    assert grads.layout is flat.layout
    # The same operations in another program: a few roundings.
    np.testing.assert_allclose(value, want_value, rtol=5e-7)
    assert_close(tree_of(grads), want, 5e-7)
    assert_equal(grads, jax.jit(lambda c: fusedopt.pack(c.tree, packing=PACKING))(grads))  # padding: no gradient


def test_an_unused_leaf_has_a_gradient_of_zero():
    _, flat = params_and_flat()
    grads = tree_of(jax.jit(jax.grad(lambda f: jnp.sum(f.tree["fc"]["kernel"])))(flat))
    np.testing.assert_array_equal(grads["big"], 0.0)
    np.testing.assert_array_equal(grads["fc"]["kernel"], 1.0)


def test_jvp_vmap_and_remat_go_through_the_tree():
    params, flat = params_and_flat()
    flat_loss = lambda f: loss(f.tree)  # noqa: E731
    ones = jax.tree.map(jnp.ones_like, flat)
    tangent = jax.jit(lambda f, t: jax.jvp(flat_loss, (f,), (t,))[1])(flat, ones)
    want = jax.jit(lambda f, t: jax.jvp(loss, (f,), (t,))[1])(params, jax.tree.map(jnp.ones_like, params))
    np.testing.assert_allclose(tangent, want, rtol=1e-6)
    grads = jax.jit(jax.grad(flat_loss))(flat)
    assert_close(jax.jit(jax.grad(jax.checkpoint(flat_loss)))(flat), grads, 5e-7)
    batch = jax.tree.map(lambda x: jnp.stack([x, x]), flat)
    per_example = jax.jit(jax.vmap(jax.grad(flat_loss)))(batch)
    for i in range(2):
        assert_close(jax.tree.map(lambda x, i=i: x[i], per_example), grads, 5e-7)
    hvp = jax.jit(lambda f: jax.jvp(jax.grad(flat_loss), (f,), (ones,))[1])(flat)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(hvp))


@pytest.mark.parametrize("name", ["adamw", "lars"])
def test_padding_is_zero_after_100_steps(name):
    for flat, state in flat_runs(name).values():
        for buffers in (flat.buckets, state.mu, state.nu or flat.buckets):
            for buffer, bucket in zip(buffers, flat.layout.buckets, strict=True):
                used = np.zeros(buffer.size, bool)
                for s in flat.layout.segments_of(bucket):
                    used[s.offset : s.offset + s.size] = True
                assert np.any(~used) or bucket.solo
                assert np.any(np.asarray(buffer).ravel()[used])
                np.testing.assert_array_equal(np.asarray(buffer).ravel()[~used], 0.0)


# ------------------------------------------------------------------------ other people's functions


def test_tree_map_apply_updates_and_norms_see_the_buffers():
    params, flat = params_and_flat()
    doubled = jax.tree.map(lambda x: 2 * x, flat)
    assert isinstance(doubled, FlatParams)
    assert_equal(tree_of(doubled), jax.tree.map(lambda x: 2 * x, params))
    assert_equal(tree_of(optax.apply_updates(flat, doubled)), jax.tree.map(lambda x: x + 2 * x, params))
    np.testing.assert_allclose(optax.tree.norm(flat), optax.tree.norm(params), rtol=2.5e-7)
    clip = optax.clip_by_global_norm(0.5)
    update = jax.jit(clip.update)
    clipped, _ = update(flat, clip.init(flat))
    want, _ = update(params, clip.init(params))
    assert_close(tree_of(clipped), want, 2.5e-7)
    assert_equal(clipped, jax.jit(lambda c: fusedopt.pack(c.tree, packing=PACKING))(clipped))


def test_flax_train_state_takes_flat_params():
    from flax.training.train_state import TrainState

    tx = fusedopt.adamw(0.1, packing=PACKING)
    params = params_and_flat()[0]
    flat = jax.jit(lambda p: fusedopt.pack(p, tx))(params)
    state = TrainState.create(apply_fn=loss, params=flat, tx=tx)

    @jax.jit
    def step(state):
        return state.apply_gradients(grads=jax.grad(lambda f: state.apply_fn(f.tree))(state.params))

    state = step(state)
    assert state.step == 1
    updates, _ = jax.jit(tx.update)(jax.grad(loss)(params), tx.init(params), params)
    # Adam's first step is the sign of the gradient where it is far from eps: a few roundings of the parameters.
    assert_close(state.params.tree, optax.apply_updates(params, updates), 1e-6)


def test_donating_flat_params_keeps_the_parameters_of_the_caller():
    params = {"w": jnp.ones((64, 16)), "solo": jnp.ones((40, 30)), "exact": jnp.ones(1024), "s": jnp.float32(1.0)}
    for packing in (Packing(solo_from=None), Packing(solo_from=1)):
        tx = fusedopt.adamw(0.1, packing=packing)
        flat = fusedopt.pack(params, tx)
        state = tx.init(flat)
        grads = jax.tree.map(jnp.ones_like, flat)
        flat, state = jax.jit(tx.apply, donate_argnums=(1, 2))(grads, state, flat)
        jax.block_until_ready(flat)
        for x in jax.tree.leaves(params):
            assert not x.is_deleted()
            np.testing.assert_array_equal(x, 1.0)


# ----------------------------------------------------------------------- layouts that do not fit


def test_flat_gradients_and_tree_parameters_do_not_mix():
    params, flat = params_and_flat()
    tx = fusedopt.adamw(0.1)
    state = tx.init(params)
    with pytest.raises(ValueError, match="`grads` are FlatParams but `params` are dict"):
        tx.update(flat, state, params)
    with pytest.raises(ValueError, match="`grads` are dict but `params` are FlatParams"):
        tx.apply(params, state, flat)


def test_other_layouts_are_refused():
    params, flat = params_and_flat()
    tx = fusedopt.adamw(0.1)
    other = fusedopt.pack(params, packing=Packing(solo_from=None))
    with pytest.raises(ValueError, match=r"`grads` have layout FlatLayout.*`params` FlatLayout"):
        tx.update(other, tx.init(flat), flat)
    with pytest.raises(ValueError, match=r"`state\.mu` is of another layout: got \d buffers, expected \d"):
        tx.update(other, tx.init(flat), other)
    wrong = FlatParams(
        [x[:-1] for x in flat.buckets if x.ndim] + [x for x in flat.buckets if not x.ndim], [], flat.layout
    )
    with pytest.raises(ValueError, match=r"`grads` bucket `bias.float32`: got shape"):
        tx.update(wrong, tx.init(flat), flat)


def test_a_bucket_that_a_mask_would_split_says_how_to_pack():
    params = {"w": jnp.ones((2, 2)), "v": jnp.ones((2, 3))}
    flat = fusedopt.pack(params)
    group = Group("v", {"w": False, "v": True}, learning_rate_scale=2.0)
    for tx in (fusedopt.adamw(1.0, weight_decay=0.5, mask={"w": True, "v": False}), fusedopt.sgd(1.0, groups=[group])):
        with pytest.raises(ValueError, match=r"bucket `weight\.float32`.*`v`.*`w`.*fusedopt\.pack\(params, tx\)"):
            tx.init(flat)
        packed = fusedopt.pack(params, tx)
        assert len(packed.buckets) == 2
        zeros = jax.tree.map(jnp.zeros_like, packed)
        new, _ = jax.jit(tx.apply)(zeros, tx.init(packed), packed)
        want, _ = jax.jit(tx.apply)(zeros.tree, tx.init(params), params)
        assert_equal(new.tree, want)


def test_flat_params_of_one_optimizer_serve_another_with_compatible_groups():
    _, flat = params_and_flat()
    for tx in (fusedopt.sgd(0.1), fusedopt.adamw(0.1), fusedopt.adamw(0.1, mask=True), fusedopt.lars(0.1)):
        new, _ = jax.eval_shape(tx.apply, flat, tx.init(flat), flat)
        assert new.layout is flat.layout


def test_pack_with_and_without_tx_agree_for_the_default_groups():
    params, flat = params_and_flat()
    tx = fusedopt.adamw(0.1, packing=PACKING)
    packed = fusedopt.pack(params, tx)
    assert [x.shape for x in packed.buckets] == [x.shape for x in flat.buckets]
    new, _ = jax.eval_shape(tx.apply, packed, tx.init(packed), packed)
    assert new.layout is packed.layout


# -------------------------------------------------------------------------------- as an object


def test_keys_are_the_names_of_the_buckets_and_the_fingerprint_of_the_layout():
    flat = fusedopt.pack({**filled(SHAPES), "n": jnp.int32(1)}, packing=PACKING)
    entries, _ = jax.tree_util.tree_flatten_with_path(flat)
    mark = "@" + flat.layout.fingerprint
    assert [str(k[0].key) for k, _ in entries] == [b.name + mark for b in flat.layout.buckets] + ["other.0"]
    assert "weight.float32.big" + mark in {k[0].key for k, _ in entries}


def test_in_repr_and_pickle():
    _, flat = params_and_flat()
    assert "fc" in flat
    assert "kernel" not in flat
    assert "weight.float32" not in flat
    assert repr(flat).startswith("FlatParams(FlatLayout(5 leaves, 1233 elements, 3 buckets,")
    twin = pickle.loads(pickle.dumps(jax.device_get(flat)))
    assert twin.layout is flat.layout
    assert_equal(jax.tree.map(jnp.asarray, twin), flat)


def test_a_jitted_step_takes_new_flat_params_without_a_retrace():
    params, flat = params_and_flat()
    tx = fusedopt.adamw(0.1, packing=PACKING)
    step, traces = counted(tx.apply)
    step = jax.jit(step)
    state = tx.init(flat)
    new, state = step(flat, state, flat)
    step(new, state, new)
    other = fusedopt.pack(jax.tree.map(lambda x: 2 * x, params), packing=PACKING)
    step(other, state, pickle.loads(pickle.dumps(jax.device_get(new))))
    assert len(traces) == 1


def test_every_top_level_key_of_the_tree_is_in_it():
    flat = fusedopt.pack({"w": jnp.ones((2, 3)), "step": jnp.int32(1)})
    assert "w" in flat
    assert "step" in flat
    assert "v" not in flat
    assert "w" not in fusedopt.pack([jnp.ones((2, 3))])
