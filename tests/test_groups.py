"""Groups: leaves with hyperparameters of their own, and frozen ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusedopt
from fusedopt import Group
from tests.helpers import assert_equal, counted, normal


def layout_of(tree, tx=None, packing=None) -> fusedopt.FlatLayout:
    return jax.eval_shape(lambda p: fusedopt.pack(p, tx, packing=packing), tree).layout


def updates_of(tx, grads, params):
    return jax.jit(lambda g, p: tx.update(g, tx.init(p), p)[0])(grads, params)


PARAMS = {"body": {"kernel": jnp.asarray(normal((3, 4))), "bias": jnp.ones(4)}, "head": {"kernel": jnp.ones((4, 2))}}
ZEROS = jax.tree.map(jnp.zeros_like, PARAMS)
MATCHES = {
    "predicate": lambda path, leaf: path[0] == "head" and leaf.shape == (4, 2),
    "tree": {"body": {"kernel": False, "bias": False}, "head": {"kernel": True}},
    "prefix": {"body": False, "head": True},
    "labels": {"body": {"kernel": "body", "bias": "body"}, "head": {"kernel": "head"}},
    "labels of a prefix": {"body": "body", "head": "head"},
}


@pytest.mark.parametrize("match", MATCHES)
def test_a_group_is_matched_by_a_predicate_a_tree_a_prefix_or_labels(match):
    layout = layout_of(PARAMS, fusedopt.adamw(0.1, groups=[Group("head", MATCHES[match])]))
    assert {s.path: s.group for s in layout.segments} == {
        ("head", "kernel"): "head",
        ("body", "bias"): "bias",
        ("body", "kernel"): "weight",
    }


def test_a_group_has_a_weight_decay_and_a_learning_rate_of_its_own():
    group = Group("head", MATCHES["prefix"], weight_decay=0.5, learning_rate_scale=4.0)
    tx = fusedopt.adamw(0.1, weight_decay=0.2, groups=[group])
    state = tx.init(PARAMS)
    names = {"weight_decay/head": 0.5, "learning_rate_scale/head": 4.0}
    assert names.items() <= {k: float(v) for k, v in tx.hyperparams(state).items()}.items()
    update, traces = counted(tx.update)
    update = jax.jit(update)
    u, _ = update(ZEROS, state, PARAMS, **{"learning_rate_scale/head": 4.0})
    np.testing.assert_allclose(u["head"]["kernel"], -0.1 * 4 * 0.5 * PARAMS["head"]["kernel"], rtol=2.5e-7)
    np.testing.assert_allclose(u["body"]["kernel"], -0.1 * 0.2 * PARAMS["body"]["kernel"], rtol=2.5e-7)
    np.testing.assert_array_equal(u["body"]["bias"], 0.0)
    state = tx.set_hyperparams(state, **{"weight_decay/head": 0.25})
    u, _ = update(ZEROS, state, PARAMS, **{"learning_rate_scale/head": 2.0})
    np.testing.assert_allclose(u["head"]["kernel"], -0.1 * 2 * 0.25 * PARAMS["head"]["kernel"], rtol=2.5e-7)
    assert len(traces) == 1


def test_the_first_group_that_matches_wins():
    first = Group("first", lambda path, leaf: path[0] == "head", learning_rate_scale=3.0)
    second = Group("second", True, learning_rate_scale=2.0)
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    u = updates_of(fusedopt.sgd(1.0, groups=[first, second]), grads, PARAMS)
    assert [float(x.ravel()[0]) for x in jax.tree.leaves(u)] == [-2.0, -2.0, -3.0]
    layout = layout_of(PARAMS, fusedopt.sgd(1.0, groups=[first, second]))
    assert [b.group for b in layout.buckets] == ["first", "second"]
    u = updates_of(fusedopt.sgd(1.0, groups=[second, first]), grads, PARAMS)
    assert {float(x.ravel()[0]) for x in jax.tree.leaves(u)} == {-2.0}


def test_a_frozen_group_has_no_slots_and_keeps_its_bits():
    frozen = Group("frozen", {"body": True, "head": False}, frozen=True)
    tx = fusedopt.adamw(0.1, groups=[frozen])
    params = {**PARAMS, "body": {"kernel": PARAMS["body"]["kernel"], "bias": jnp.array([-0.0, 1e-40, np.nan, np.inf])}}
    grads = jax.tree.map(jnp.ones_like, params)
    state = tx.init(params)
    assert [m.shape for m in state.mu] == [(1024,)]
    assert [(b.name, b.frozen) for b in layout_of(params, tx).buckets] == [
        ("frozen.float32", True),
        ("weight.float32", False),
    ]
    u, _ = jax.jit(tx.update)(grads, state, params)
    assert_equal(u["body"], jax.tree.map(jnp.zeros_like, params["body"]))
    assert np.all(np.asarray(u["head"]["kernel"]) < 0)
    flat, flat_grads = fusedopt.pack(params, tx), fusedopt.pack(grads, tx)
    new = jax.jit(tx.apply)(grads, state, params)[0]
    flat_update, flat_new = jax.jit(lambda g, s, p: (tx.update(g, s, p)[0].tree, tx.apply(g, s, p)[0].tree))(
        flat_grads, state, flat
    )
    assert_equal(flat_update["body"], u["body"])
    for tree in (new, flat_new):
        assert_equal(tree["body"], params["body"])
        assert not np.array_equal(tree["head"]["kernel"], params["head"]["kernel"])


def test_a_group_without_trust_ratio_takes_plain_steps():
    group = Group("head", {"body": False, "head": True}, trust_ratio=False, weight_decay=0)
    tx = fusedopt.lars(0.1, 0.5, groups=[group])
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    u, state = jax.jit(tx.update)(grads, tx.init(PARAMS), PARAMS)
    np.testing.assert_allclose(u["head"]["kernel"], np.full((4, 2), -0.1), rtol=2.5e-7)
    assert list(tx.trust_ratios(state)) == [("body", "kernel")]


def test_a_group_of_biases_may_decay_and_have_a_ratio():
    group = Group("bias_too", lambda path, leaf: path[-1] == "bias")
    u = updates_of(fusedopt.adamw(0.1, weight_decay=0.5, groups=[group]), ZEROS, PARAMS)
    np.testing.assert_allclose(u["body"]["bias"], np.full(4, -0.05), rtol=2.5e-7)
    tx = fusedopt.lars(0.1, groups=[group])
    assert set(tx.trust_ratios(tx.init(PARAMS))) == {("body", "bias"), ("body", "kernel"), ("head", "kernel")}


def test_a_group_with_decay_needs_params_though_the_optimizer_has_none():
    tx = fusedopt.sgd(1.0, groups=[Group("head", {"body": False, "head": True}, weight_decay=0.5)])
    with pytest.raises(ValueError, match="`params` are needed"):
        tx.update(ZEROS, tx.init(PARAMS))
    u = updates_of(tx, ZEROS, PARAMS)
    np.testing.assert_allclose(u["head"]["kernel"], -0.5 * PARAMS["head"]["kernel"], rtol=2.5e-7)
    assert_equal(jax.tree.map(jnp.abs, u["body"]), ZEROS["body"])


@pytest.mark.parametrize("name", ["", "bias", "weight", 3])
def test_group_names_are_checked(name):
    with pytest.raises(ValueError, match=r"`Group.name`: expected a name other than"):
        Group(name, True)


def test_groups_are_checked():
    with pytest.raises(ValueError, match=r"names must differ, got \['a', 'a'\]"):
        fusedopt.sgd(0.1, groups=[Group("a", True), Group("a", True)])
    with pytest.raises(TypeError, match="`groups`: expected Group objects, got dict"):
        fusedopt.sgd(0.1, groups=[{"name": "a"}])
    with pytest.raises(TypeError, match=r"`Group.frozen` of group 'a' is static"):
        Group("a", True, frozen=1)
    with pytest.raises(ValueError, match=r"`weight_decay/a`: expected a number in \[0, inf\), got -1"):
        fusedopt.sgd(0.1, groups=[Group("a", True, weight_decay=-1)])
    with pytest.raises(ValueError, match=r"`learning_rate_scale/a`.*got -1"):
        fusedopt.sgd(0.1, groups=[Group("a", True, learning_rate_scale=-1)])
    with pytest.raises(ValueError, match="has no entry for leaf `head/kernel`"):
        fusedopt.sgd(0.1, groups=[Group("a", {"body": True})]).init(PARAMS)
