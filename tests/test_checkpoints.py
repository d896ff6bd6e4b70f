"""Parameters and states through orbax, flax.serialization and pickle; other layouts are refused or repacked."""

from __future__ import annotations

import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization

import fusedopt
from tests.helpers import assert_close, assert_equal, filled, gradients, standard_promotion

SHAPES = {"a": (2, 3), "b": (3,), "large": (129, 128), "list": [(5,), ()]}
TX = fusedopt.adamw(1e-2, ema_decay=0.9)
ONE = fusedopt.Packing(solo_from=None)


def some_params():
    return {**jax.tree.map(jnp.asarray, filled(SHAPES)), "n": jnp.int32(3), "none": None}


def trained(params, tx=TX):
    """Parameters and a state with numbers in all places."""
    grads = jax.tree.map(lambda x: 0.1 * x if x.dtype != jnp.int32 else jnp.zeros_like(x), params)
    return jax.jit(tx.apply)(grads, tx.init(params), params)


def zeros_like(tree):
    return jax.tree.map(jnp.zeros_like, tree)


class Standard:
    @staticmethod
    def save(path, tree):
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, tree)

    @staticmethod
    def restore(path, like):
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(path, like)


class PyTree:
    @staticmethod
    def save(path, tree):
        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(path, tree)

    @staticmethod
    def restore(path, like):
        with warnings.catch_warnings(), ocp.PyTreeCheckpointer() as checkpointer:
            warnings.simplefilter("ignore")  # that no sharding is given
            return checkpointer.restore(path, item=like)


class MsgPack:
    @staticmethod
    def save(path, tree):
        path.write_bytes(serialization.to_bytes(tree))

    @staticmethod
    def restore(path, like):
        return serialization.from_bytes(like, path.read_bytes())


class Pickle:
    @staticmethod
    def save(path, tree):
        path.write_bytes(pickle.dumps(jax.device_get(tree)))

    @staticmethod
    def restore(path, like):
        return pickle.loads(path.read_bytes())


WAYS = [Standard, PyTree, MsgPack, Pickle]


@pytest.mark.parametrize("flat", [False, True], ids=["tree", "flat"])
@pytest.mark.parametrize("way", WAYS)
def test_parameters_and_states_come_back_bit_for_bit(way, flat, tmp_path):
    params = some_params()
    saved = trained(fusedopt.pack(params) if flat else params)
    way.save(tmp_path / "x", saved)
    got = way.restore(tmp_path / "x", zeros_like(saved))
    assert_equal(got, saved)
    assert isinstance(got[1], fusedopt.FusedState)
    if flat:
        assert got[0].layout is saved[0].layout


@pytest.mark.parametrize("way", [Standard, PyTree, MsgPack])
def test_the_form_by_path_comes_back_through_every_library(way, tmp_path):
    params, state = trained(some_params())
    saved = fusedopt.to_optax_state(TX, state, params)
    way.save(tmp_path / "x", saved)
    assert_equal(fusedopt.from_optax_state(TX, *_two(way.restore(tmp_path / "x", zeros_like(saved)), params)), state)


def _two(restored, params):
    return restored[0], params, restored[1]


# ------------------------------------------------------------------------------ R127: other leaves

# (leaves saved, leaves of the target): the row's, and a pair whose buckets have the same names and shapes.
OTHER_LEAVES = [
    ({"a": (2, 3), "b": (3,)}, {"a": (3, 3)}),
    ({"a": (2, 3), "c": (1, 3)}, {"a": (3, 3)}),
    ({"a": (2, 3), "c": (1, 3)}, {"a": (1, 3), "c": (2, 3)}),
]


@pytest.mark.parametrize("way", [Standard, PyTree, MsgPack])
@pytest.mark.parametrize(("shapes", "target"), OTHER_LEAVES, ids=["row", "joined", "swapped"])
def test_R127_flat_params_of_another_layout_are_refused(way, shapes, target, tmp_path):
    flat, like = (fusedopt.pack(jax.tree.map(jnp.asarray, filled(s))) for s in (shapes, target))
    way.save(tmp_path / "x", flat)
    with pytest.raises(ValueError, match=r"`FlatParams` leaf `[abc]`|tree structures do not match") as refused:
        way.restore(tmp_path / "x", like)
    if way is not MsgPack:  # orbax names both fingerprints
        assert flat.layout.fingerprint in str(refused.value)
        assert like.layout.fingerprint in str(refused.value)
    assert "`a`" in flat.layout.difference(like.layout) or "`b`" in flat.layout.difference(like.layout)


@pytest.mark.parametrize("way", [PyTree, MsgPack])
@pytest.mark.parametrize(
    ("shapes", "target"), [*OTHER_LEAVES, ({"a": (2, 3)}, {"a": (40, 30)})], ids=["row", "joined", "swapped", "larger"]
)
def test_R127_a_raw_state_of_another_layout_is_refused(way, shapes, target, tmp_path):
    """By its shapes at the latest in the next step; where those fit, by its padding."""
    old, new = (jax.tree.map(jnp.asarray, filled(s)) for s in (shapes, target))
    tx = fusedopt.adamw(0.1)
    _, state = trained(old, tx)
    way.save(tmp_path / "x", state)
    if len(state.mu) != len(tx.init(new).mu):
        with pytest.raises(ValueError, match="mu"):
            way.restore(tmp_path / "x", tx.init(new))
        return
    state = way.restore(tmp_path / "x", tx.init(new))
    fits = [x.shape for x in state.mu] == [x.shape for x in tx.init(new).mu]
    message = r"`state\.mu` is of another layout" + (r".* in the padding behind leaf `a` \([13], 3\)" if fits else "")
    with pytest.raises(ValueError, match=message):
        fusedopt.check_restored(tx, state, new)
    if not fits:
        with pytest.raises(ValueError, match=message):
            tx.update(new, state, new)


def test_check_restored_is_content_with_what_is_right():
    tx = fusedopt.chain(optax.clip(1.0), fusedopt.adamw(0.1, ema_decay=0.9, master_weights=True, accumulate=2))
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, some_params())
    flat = fusedopt.pack(half)
    with standard_promotion():
        for params in (half, flat):
            new, state = trained(params, tx)
            fusedopt.check_restored(tx, state, new)
    wrong = jax.tree.map(lambda x: x if x.ndim != 1 else x.at[3:].set(1), flat)
    with pytest.raises(
        ValueError, match=r"`params` is of another layout: bucket `bias\.bfloat16` has 1 at element 3, in the"
    ):
        fusedopt.check_restored(tx, tx.init(flat), wrong)
    with pytest.raises(TypeError, match="`tx`: expected an optimizer made by fusedopt"):
        fusedopt.check_restored(optax.adam(0.1), None, flat)


def test_a_difference_is_in_words():
    one = fusedopt.pack({"a": jnp.ones((2, 3)), "b": jnp.ones(3), "c": jnp.ones((1, 3))}).layout
    two = fusedopt.pack({"a": jnp.ones((3, 3)), "c": jnp.ones((1, 3)), "d": jnp.ones(1)}).layout
    assert one.difference(two) == (
        "`b` only in the first; `d` only in the second; `a` is float32 (2, 3) in the first, float32 (3, 3) in the second"
    )
    wide = fusedopt.pack(
        {"a": jnp.ones((2, 3)), "b": jnp.ones(3), "c": jnp.ones((1, 3))}, packing=fusedopt.Packing(align=512)
    )
    assert one.difference(wide.layout) == (
        "`c` begins at element 128 of `weight.float32` in the first, at 512 of `weight.float32` in the second"
    )
    assert one.difference(one) == ""
    assert one.fingerprint != wide.layout.fingerprint
    # Which optimizer sees them does not matter to where they lie.
    tx = fusedopt.lars(0.1, weight_decay_mask={"a": True, "b": True, "c": True})
    params = {"a": jnp.ones((2, 3)), "b": jnp.ones(3), "c": jnp.ones((1, 3))}
    assert fusedopt.pack(params, tx).layout.fingerprint == one.fingerprint
    assert fusedopt.pack(params, tx).layout != one


def test_gradients_of_another_layout_are_refused_with_the_difference():
    params = {"a": jnp.ones((2, 3)), "c": jnp.ones((1, 3))}
    flat, other = fusedopt.pack(params), fusedopt.pack(params, packing=fusedopt.Packing(align=512))
    with pytest.raises(ValueError, match=r"`c` begins at element 512 of .* in the first, at 128 of .*repack"):
        TX.apply(other, TX.init(flat), flat)


# ------------------------------------------------------------------------------ flax.serialization


def test_msgpack_of_flat_params_is_that_of_their_tree():
    params = some_params()
    flat, other = fusedopt.pack(params), fusedopt.pack(params, packing=ONE)
    data = serialization.to_bytes(flat)
    assert data == serialization.to_bytes(params)
    assert_equal(serialization.from_bytes(zeros_like(other), data), other)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, params)
    assert_equal(serialization.from_bytes(fusedopt.pack(half), data), fusedopt.pack(half))
    with pytest.raises(ValueError, match=r"`FlatParams` leaf `a`: got shape \(2, 3\), expected \(3, 2\)"):
        serialization.from_bytes(fusedopt.pack({**params, "a": jnp.ones((3, 2))}), data)
    with pytest.raises(ValueError, match="`FlatParams` leaf `z` is in the target but not stored"):
        serialization.from_bytes(fusedopt.pack({**params, "z": jnp.ones(2)}), data)
    with pytest.raises(ValueError, match="`FlatParams` leaf `a` is stored but not in the target"):
        serialization.from_bytes(fusedopt.pack({k: v for k, v in params.items() if k != "a"}), data)
    with pytest.raises(ValueError, match="`FlatParams` leaf `a`: got None, expected an array of shape"):
        serialization.from_bytes(flat, serialization.to_bytes({**params, "a": None}))


def test_R103_what_orbax_restores_without_a_target_is_refused_until_it_has_the_right_containers(tmp_path):
    params, state = trained(some_params())
    Standard.save(tmp_path / "x", state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no sharding is given
        restored = Standard.restore(tmp_path / "x", None)
    assert (type(restored), type(restored["mu"])) == (dict, list)
    step = jax.jit(TX.apply)
    with pytest.raises(
        ValueError, match=r"expected the FusedState .*got dict \(restore .* structure of `tx.init\(params\)`"
    ):
        step(params, restored, params)
    lists = fusedopt.FusedState(**restored)
    for call in (lambda: step(params, lists, params), lambda: fusedopt.check_restored(TX, lists, params)):
        with pytest.raises(ValueError, match=r"`state\.mu`: expected a tuple of buffers, got a list"):
            call()
    # Made whole by hand or by a target, it is what was saved, and a branch of a cond as well.
    tuples = {name: tuple(x) if isinstance(x, list) else x for name, x in restored.items()}
    for whole in (fusedopt.FusedState(**tuples), Standard.restore(tmp_path / "x", zeros_like(state))):
        assert_equal(whole, state)
        new = jax.jit(lambda s: jax.lax.cond(s.count > 0, lambda s: TX.apply(params, s, params)[1], lambda s: s, s))(
            whole
        )
        assert int(new.count) == 2


def test_R130_checkpoints_hold_arrays_only(tmp_path):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    params = nnx.state(model, nnx.Param)
    for state in (nnx.state(optimizer), TX.init(params), fusedopt.pack(params)):
        assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))
        path = tmp_path / str(id(state))
        Standard.save(path, state)
        assert_equal(Standard.restore(path, zeros_like(state)), state)
    # What nnx.Optimizer holds can be moved to optax as it is.
    moments, _ = fusedopt.to_optax_state(TX, optimizer.opt_state, nnx.state(model, nnx.Param))
    assert int(moments[0].count) == 0


# ------------------------------------------------------------------------------------------ repack

SOLO, ALIGNED = fusedopt.Packing(solo_from=1), fusedopt.Packing(solo_from=None, align=1024)


@pytest.mark.parametrize(
    ("flat", "packing"),
    [(True, ALIGNED), *(pytest.param(*p, marks=pytest.mark.slow) for p in ((True, ONE), (False, SOLO)))],
    ids=["aligned", "one", "solo"],
)
def test_repacked_runs_go_on_as_before(flat, packing):
    options = dict(ema_decay=0.9, accumulate=2, trust_ratio="optax")
    old, new = fusedopt.lars(0.1, **options), fusedopt.lars(0.1, packing=packing, **options)
    params = jax.tree.map(jnp.asarray, filled(SHAPES))
    grads = [jax.tree.map(lambda x, t=t: x[t], gradients(params, 3)) for t in range(3)]

    def packed(tree, tx):
        return fusedopt.pack(tree, tx) if flat else tree

    applies = {tx: jax.jit(tx.apply) for tx in (old, new)}

    def step(tx, g, state, p):
        return applies[tx](packed(g, tx), state, p)

    p, state = packed(params, old), old.init(packed(params, old))
    for g in grads:
        p, state = step(old, g, state, p)
    q, other = fusedopt.repack(p, state, old, new)
    assert_equal(fusedopt.repack(q, other, new, old), (p, state))
    p, state = step(old, grads[0], state, p)
    q, other = step(new, grads[0], other, q)
    assert_close(q.tree if flat else q, p.tree if flat else p, 1e-6)
    assert old.trust_ratios(state, p).keys() == new.trust_ratios(other, q).keys()


def test_repack_carries_chains_and_drops_or_begins_what_only_one_keeps():
    flat = fusedopt.pack(some_params())
    old = fusedopt.chain(optax.trace(0.5), fusedopt.adamw(0.1, ema_decay=0.9))
    new = fusedopt.chain(optax.trace(0.5), fusedopt.adamw(0.3, packing=ONE, clip_norm=1.0))
    state = old.init(flat)
    state = (
        jax.tree.map(lambda x: x + jnp.ones((), x.dtype), state[0]),
        old.set_hyperparams(state, learning_rate=0.2)[1],
    )
    params, got = fusedopt.repack(flat, state, old, new)
    assert_equal(params, fusedopt.pack(flat.tree, new))
    assert_equal(got[0].trace.tree, state[0].trace.tree)
    assert got[1].ema == ()
    assert float(new.hyperparams(got)["learning_rate"]) == np.float32(0.2)
    assert float(new.hyperparams(got)["clip_norm"]) == 1.0
    params, got = fusedopt.repack(flat, state, old, packing=ONE)
    assert params.layout == fusedopt.pack(flat.tree, old, packing=ONE).layout
    with standard_promotion():
        jax.eval_shape(old.apply, params, got, params)


def test_repack_refuses():
    params = {"w": jnp.ones((2, 2))}
    sgd, adam = fusedopt.sgd(0.1, momentum=0.9), fusedopt.adam(0.1)
    state = sgd.init(params)
    with pytest.raises(ValueError, match="`state` has no `nu`, which `new_tx` needs"):
        fusedopt.repack(params, state, sgd, adam)
    with pytest.raises(TypeError, match="`new_tx`: expected an optimizer made by fusedopt"):
        fusedopt.repack(params, state, sgd, optax.sgd(0.1))
    with pytest.raises(ValueError, match="`packing` is for FlatParams"):
        fusedopt.repack(params, state, sgd, packing=ONE)
    with pytest.raises(ValueError, match=r"`state`: got .*, expected the tuple of a chain of 2"):
        fusedopt.repack(params, state, sgd, fusedopt.chain(optax.clip(1.0), sgd))
    with pytest.raises(ValueError, match=r"`state\.mu` is of another layout"):
        fusedopt.repack({"bias": jnp.ones(2), **params}, state, sgd)
