"""Trees that do not fit are refused by the path of a leaf."""

from __future__ import annotations

import flax.core
import jax
import jax.numpy as jnp
import optax
import pytest

import fusedopt
from tests.helpers import assert_equal, case, normal

LR = 0.1


def kernel():
    return jnp.asarray(normal((3, 4), 1))


def bias():
    return jnp.asarray(normal((4,), 2))


def refuse(error, tx, grads, params, *words, state=None):
    state = tx.init(params) if state is None else state
    for step in (tx.update, tx.apply):
        with pytest.raises(error) as info:
            step(grads, state, params)
        for word in words:
            assert word in str(info.value), str(info.value)


@pytest.mark.parametrize("solo_from", [1, None])
@pytest.mark.parametrize("shape", [(2,), (1, 2), (3, 1), (), (2, 3), (6,)])
def test_r100_a_broadcastable_shape_is_an_error(shape, solo_from):
    params = {"layer": {"w": jnp.ones((3, 2))}}
    grads = {"layer": {"w": jnp.ones(shape)}}
    tx = fusedopt.adam(LR, packing=fusedopt.Packing(solo_from=solo_from))
    refuse(ValueError, tx, grads, params, "layer/w", f"got shape {shape}", "expected (3, 2)")
    if shape == (2,):  # optax takes it
        twin = optax.sgd(LR)
        with jax.numpy_rank_promotion("allow"):
            assert twin.update(grads, twin.init(params), params)[0]["layer"]["w"].shape == (2,)


def test_a_missing_and_an_extra_leaf_are_named():
    params = {"a": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}}
    grads = {"a": {"kernel": jnp.ones((2, 2)), "scale": jnp.ones(2)}}
    refuse(
        ValueError, fusedopt.sgd(LR), grads, params, "different structures", "`a/scale`", "`a/bias`", "grads", "params"
    )


def test_trees_that_differ_only_in_their_containers_are_the_same():
    params = {"a": [jnp.ones((2, 2)), jnp.ones(2)]}
    grads = flax.core.freeze({"a": (jnp.ones((2, 2)), jnp.ones(2))})
    tx = fusedopt.sgd(LR)
    updates, _ = tx.update(grads, tx.init(params), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)


@pytest.mark.parametrize("name", ["momentum", "adamw", "lars"])
def test_a_state_of_another_layout_is_refused(name):
    params = {"deep": {"w": jnp.ones((40, 40))}}
    tx = case(name).make(LR)
    other = tx.init({"deep": {"w": jnp.ones((10, 10))}})
    refuse(
        ValueError, tx, params, params, "another layout", "deep/w", "got shape (1024,)", "expected (2048,)", state=other
    )
    fewer = tx.init({"deep": {"w": jnp.ones((40, 40)), "b": jnp.ones(3)}})
    refuse(ValueError, tx, params, params, "another layout", "got 2 buffers", "expected 1", state=fewer)


def test_a_state_of_another_library_is_refused():
    params = {"w": jnp.ones((2, 2))}
    refuse(ValueError, fusedopt.sgd(LR), params, params, "`state`", "got tuple", state=optax.sgd(LR).init(params))


@pytest.mark.parametrize("name", ["sgd", "momentum", "adamw", "adam_l2", "lars", "lars_optax"])
def test_r101_params_are_asked_for(name):
    params, tx = {"w": jnp.ones((2, 2))}, case(name).make(LR)
    with pytest.raises(ValueError, match="`params` are needed"):
        tx.update(params, tx.init(params))


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_params_are_not_asked_for_without_decay(name):
    factory = {"sgd": fusedopt.sgd, "momentum": lambda lr: fusedopt.sgd(lr, 0.9), "adam": fusedopt.adam}[name]
    params, tx = {"w": jnp.ones((2, 2)), "n": None}, factory(LR)
    without, _ = tx.update(params, tx.init(params))
    with_params, _ = tx.update(params, tx.init(params), params)
    assert_equal(without, with_params)
    with pytest.raises(ValueError, match="`params` are needed"):
        tx.apply(params, tx.init(params), None)


@pytest.mark.parametrize("factory", [fusedopt.sgd, fusedopt.adam, fusedopt.adamw, fusedopt.lars])
def test_complex_leaves_are_refused_by_name(factory):
    with pytest.raises(TypeError, match=r"`params` leaf `a/z` is complex64"):
        factory(LR).init({"a": {"z": jnp.ones((2, 2), jnp.complex64)}})
    with pytest.raises(TypeError, match=r"`params` leaf `a/z` is complex64"):
        fusedopt.pack({"a": {"z": 1j}})


def test_complex_and_integer_gradients_of_a_weight_are_refused():
    params = {"a": {"w": jnp.ones((1, 2))}}
    tx = fusedopt.adamw(LR)
    refuse(TypeError, tx, {"a": {"w": jnp.ones((1, 2), jnp.int32)}}, params, "a/w", "int32")
    refuse(TypeError, tx, {"a": {"w": jnp.ones((1, 2), jnp.complex64)}}, params, "a/w", "complex64")
    refuse(TypeError, tx, {"a": {"w": jnp.ones((1, 2), jnp.bool_)}}, params, "a/w", "bool")


@pytest.mark.parametrize("leaf", ["text", object(), {1, 2}])
def test_leaves_that_are_no_arrays_are_refused_by_name(leaf):
    for make in (fusedopt.adam(LR).init, fusedopt.pack):
        with pytest.raises(
            TypeError, match=r"`params` leaf `a/x`: expected an array or a number, got " + type(leaf).__name__
        ):
            make({"a": {"x": leaf}})


def test_trees_and_flat_params_do_not_mix():
    params = {"w": jnp.ones((2, 2))}
    flat, tx = fusedopt.pack(params), fusedopt.adamw(LR)
    with pytest.raises(ValueError, match=r"`grads` are dict but `params` are FlatParams"):
        tx.update(params, tx.init(flat), flat)
    other = fusedopt.pack({"v": jnp.ones((2, 2))})
    with pytest.raises(ValueError, match=r"`grads` have layout .* `params`"):
        tx.update(other, tx.init(flat), flat)
    with pytest.raises(TypeError, match="FlatParams already"):
        fusedopt.pack(flat)
    with pytest.raises(TypeError, match="expected an optimizer made by fusedopt"):
        fusedopt.pack(params, optax.sgd(LR))
