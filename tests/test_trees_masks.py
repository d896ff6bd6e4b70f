"""Masks and groups on trees of every kind."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fusedopt
from tests.helpers import assert_equal, normal

LR = 0.1


def kernel():
    return jnp.asarray(normal((3, 4), 1))


def bias():
    return jnp.asarray(normal((4,), 2))


def test_masks_need_no_entry_for_leaves_that_are_not_updated():
    params = {"none": None, "i": jnp.array([1]), "w": jnp.ones((1, 2)), "v": jnp.ones((1, 2))}
    grads = {"none": None, "i": jnp.array([0]), "w": jnp.zeros((1, 2)), "v": jnp.zeros((1, 2))}
    for mask in (
        {"w": True, "v": False},
        {"none": None, "i": True, "w": True, "v": False},
        lambda p: jax.tree.map(lambda x: x is p["w"], p),
    ):
        tx = fusedopt.adamw(LR, weight_decay=1.0, mask=mask)
        updates, _ = tx.update(grads, tx.init(params), params)
        np.testing.assert_allclose(updates["w"], -LR, rtol=1e-6)
        np.testing.assert_array_equal(updates["v"], 0.0)


@pytest.mark.parametrize("mode", ["tree", "flat"])
def test_a_tree_that_selects_a_group_needs_no_entry_for_them_either(mode):
    params = {"none": None, "i": jnp.array([1]), "w": jnp.ones((1, 2)), "v": jnp.ones((1, 2))}
    group = fusedopt.Group("still", {"w": True, "v": False}, frozen=True)
    tx = fusedopt.sgd(LR, groups=[group])
    start = fusedopt.pack(params, tx) if mode == "flat" else params
    grads = jax.tree.map(jnp.ones_like, start)
    out, _ = tx.apply(grads, tx.init(start), start)
    out = out.tree if mode == "flat" else out
    np.testing.assert_array_equal(out["w"], 1.0)
    np.testing.assert_allclose(out["v"], 0.9, rtol=1e-6)


def test_a_missing_entry_of_a_mask_is_named():
    params = {"a": {"w": jnp.ones((1, 2))}, "b": {"w": jnp.ones((1, 2))}}
    with pytest.raises(ValueError, match=r"`mask` has no entry for leaf `b/w`; it covers `a`"):
        fusedopt.adamw(LR, mask={"a": True}).init(params)


class Valued(NamedTuple):
    value: Any
    scale: Any


@pytest.mark.parametrize("flags", [(True, False), (False, True)])
def test_a_field_called_value_is_masked_apart_from_its_neighbour(flags):
    # Paths drop a trailing `.value`, as Flax NNX wraps every variable in it.
    params = {"a": Valued(jnp.ones((1, 2)), jnp.ones((1, 2)))}
    tx = fusedopt.adamw(LR, weight_decay=1.0, mask={"a": Valued(*flags)})
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    for got, decays in zip(updates["a"], flags, strict=True):
        np.testing.assert_allclose(got, -LR * decays, rtol=1e-6)


@jax.tree_util.register_pytree_node_class
class CallableModel:
    def __init__(self, w, b):
        self.w, self.b = w, b

    def __call__(self, x):
        raise AssertionError("a model or a mask that is a pytree must not be called")

    def tree_flatten(self):
        return (self.w, self.b), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_r85_a_model_that_can_be_called_is_a_tree():
    params, mask = CallableModel(jnp.ones((1, 2)), jnp.ones(2)), CallableModel(True, True)
    for tx in (
        fusedopt.adamw(LR, weight_decay=1.0, mask=mask),
        optax.inject_hyperparams(fusedopt.adamw, static_args=("mask",))(LR, weight_decay=1.0, mask=mask),
    ):
        updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
        for u in (updates.w, updates.b):
            np.testing.assert_allclose(u, -LR, rtol=1e-6)


def test_r90_the_three_forms_of_a_mask_agree():
    params = {"Dense": {"kernel": jnp.ones((1, 2)), "bias": jnp.ones(2)}, "other": jnp.ones((1, 2))}
    zeros = jax.tree.map(jnp.zeros_like, params)
    full = {"Dense": {"kernel": True, "bias": True}, "other": False}
    results = []
    for mask in (full, {"Dense": True, "other": False}, lambda _: full):
        tx = fusedopt.adamw(LR, weight_decay=1.0, mask=mask)
        results.append(tx.update(zeros, tx.init(params), params)[0])
    for got in results:
        np.testing.assert_allclose(got["Dense"]["bias"], -LR, rtol=1e-6)
        np.testing.assert_array_equal(got["other"], 0.0)
        assert_equal(got, results[0])
    tx = fusedopt.adamw(LR, weight_decay=1.0, mask=True)
    np.testing.assert_allclose(tx.update(zeros, tx.init(params), params)[0]["other"], -LR, rtol=1e-6)


def test_r92_masks_of_arrays_and_tracers_are_refused():
    params = {"w": jnp.ones((1, 2))}
    with pytest.raises(TypeError, match="a mask is static"):
        fusedopt.adamw(LR, mask={"w": np.array([[True, False]])}).init(params)
    with pytest.raises(TypeError, match="a mask is static"):
        jax.jit(lambda flag: fusedopt.adamw(LR, mask={"w": flag}).init(params))(True)
    with pytest.raises(TypeError, match="static_args"):
        fusedopt.adamw(LR, mask=jnp.array(True))
