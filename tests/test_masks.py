"""Masks of what decays, in every form that optax takes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fusedopt
from fusedopt import Group
from tests.helpers import normal


def layout_of(tree, tx=None, packing=None) -> fusedopt.FlatLayout:
    return jax.eval_shape(lambda p: fusedopt.pack(p, tx, packing=packing), tree).layout


def updates_of(tx, grads, params):
    return jax.jit(lambda g, p: tx.update(g, tx.init(p), p)[0])(grads, params)


PARAMS = {"body": {"kernel": jnp.asarray(normal((3, 4))), "bias": jnp.ones(4)}, "head": {"kernel": jnp.ones((4, 2))}}
ZEROS = jax.tree.map(jnp.zeros_like, PARAMS)


def decayed(mask, params=PARAMS):
    """The paths of the leaves that decay."""
    layout = layout_of(params, fusedopt.adamw(0.1, mask=mask))
    return sorted("/".join(s.path) for b in layout.buckets if b.decays for s in layout.segments_of(b))


def test_R90_masks_may_be_callables_trees_prefixes_or_one_bool():
    full = {"body": {"kernel": True, "bias": True}, "head": {"kernel": True}}
    everything = ["body/bias", "body/kernel", "head/kernel"]
    for mask in (full, lambda tree: jax.tree.map(lambda x: True, tree), {"body": True, "head": True}, True, np.True_):
        assert decayed(mask) == everything
    assert decayed(False) == []
    assert decayed({"body": {"kernel": True, "bias": False}, "head": False}) == ["body/kernel"]
    assert decayed(None) == decayed(fusedopt.weight_mask) == ["body/kernel", "head/kernel"]
    with pytest.raises(ValueError, match="`mask` has no entry for leaf `head/kernel`; it covers `body`"):
        decayed({"body": True})
    with pytest.raises(ValueError, match="`mask` has no entry for leaf `body/bias`"):
        decayed({"body": {"kernel": True}, "head": True})


def test_R92_masks_of_arrays_and_tracers_are_type_errors():
    with pytest.raises(TypeError, match="`mask` at `body/kernel`: expected Python bools"):
        decayed({"body": {"kernel": jnp.ones((3, 4), bool), "bias": True}, "head": True})

    @jax.jit
    def traced(flag):
        decayed({"body": flag, "head": True})

    with pytest.raises(TypeError, match="`mask` at `body`: expected Python bools"):
        traced(True)
    with pytest.raises(TypeError, match=r"expected Python bools .*got int"):
        decayed({"body": 1, "head": True})


@jax.tree_util.register_pytree_with_keys_class
class Model:
    """A model that can be called, as Equinox models can."""

    def __init__(self, kernel, bias):
        self.kernel, self.bias = kernel, bias

    def __call__(self, x):
        raise AssertionError("a tree was called")

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey
        return ((key("kernel"), self.kernel), (key("bias"), self.bias)), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_R85_a_mask_that_is_a_callable_tree_is_a_tree():
    params = Model(jnp.ones((2, 2)), jnp.ones(2))
    assert decayed(Model(False, True), params) == ["bias"]
    tx = fusedopt.adamw(1.0, weight_decay=0.5, mask=Model(False, True), groups=[Group("g", Model(True, False))])
    u = updates_of(tx, jax.tree.map(jnp.zeros_like, params), params)
    assert isinstance(u, Model)
    np.testing.assert_array_equal(u.kernel, 0.0)
    np.testing.assert_array_equal(u.bias, -0.5)
    injected = optax.inject_hyperparams(fusedopt.adamw, static_args=("mask",))(1.0, mask=Model(False, True))
    injected.init(params)


def test_a_dict_may_mask_a_frozen_dict():
    from flax.core import freeze

    params = freeze(PARAMS)
    mask = {"body": {"kernel": False, "bias": True}, "head": False}
    assert decayed(mask, params) == ["body/bias"]
    u = updates_of(fusedopt.adamw(1.0, weight_decay=0.5, mask=mask), freeze(ZEROS), params)
    assert jax.tree.structure(u) == jax.tree.structure(params)
    np.testing.assert_array_equal(u["body"]["bias"], -0.5)
