"""Mistakes at the construction of an optimizer: the message names the argument, what was got and what was expected."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fusedopt

P = {"l": {"kernel": jnp.ones((8, 4)), "bias": jnp.zeros(4)}}


def no_leaf(path, leaf):
    return path[0] == "embedding"


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: fusedopt.adamw(True), TypeError, "`learning_rate`: expected a number, a 0-d array or a schedule"),
        (lambda: fusedopt.adamw(0.1, nu_dtype=jnp.int32), TypeError, "`nu_dtype`: expected a floating point dtype"),
        (lambda: fusedopt.adamw(0.1, mu_dtype="floot"), TypeError, "`mu_dtype`: .* got 'floot'"),
        (lambda: fusedopt.sgd(0.1, 0.9, accumulator_dtype=bool), TypeError, "`accumulator_dtype`: expected"),
        (lambda: fusedopt.sgd(0.1, groups=fusedopt.Group("h", no_leaf)), TypeError, r"`groups`: .* write \[group\]"),
        (lambda: fusedopt.Group("h", "n"), TypeError, "`Group.match` of group 'h': .* got a str"),
        (
            lambda: fusedopt.sgd(0.1, groups=[fusedopt.Group("h", no_leaf, frozen=True)]).init(P),
            ValueError,
            r"`groups`: 'h' matches no leaf; a path is .* such as \('l', 'bias'\)",
        ),
        (lambda: fusedopt.pack(P, packing="x"), TypeError, "`packing`: expected a Packing, got str"),
        (
            lambda: fusedopt.chain("clip", fusedopt.sgd(0.1)),
            TypeError,
            "`chain`: expected optax transformations, got str",
        ),
        (
            lambda: fusedopt.sgd(0.1).hyperparams(optax.chain(fusedopt.sgd(0.1)).init(P)),
            ValueError,
            r"expected the FusedState .* got tuple; inside optax\.chain",
        ),
        (
            lambda: fusedopt.sgd(0.1).update(P, {"count": 0}, P),
            ValueError,
            r"got dict \(restore a checkpoint into the structure of `tx\.init\(params\)`\)",
        ),
    ],
)
def test_a_mistake_is_named(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_optimizers_can_be_copied_inside_train_states():
    tx = fusedopt.adamw(1e-3)
    assert copy.deepcopy({"tx": tx})["tx"] is tx
    assert copy.copy(tx) is tx


def test_hyperparams_of_an_ensemble_keep_its_axis():
    """A state made under vmap is read and set outside of it: for all members, or one value for each."""
    tx = fusedopt.adamw(1e-2)
    state = jax.vmap(tx.init)(jax.tree.map(lambda x: jnp.stack([x] * 3), P))
    np.testing.assert_array_equal(tx.hyperparams(state)["learning_rate"], np.full(3, 1e-2, np.float32))
    same = tx.hyperparams(tx.set_hyperparams(state, learning_rate=0.5))
    np.testing.assert_array_equal(same["learning_rate"], np.full(3, 0.5, np.float32))
    np.testing.assert_array_equal(same["eps"], np.full(3, 1e-8, np.float32))
    each = tx.hyperparams(tx.set_hyperparams(state, b1=jnp.array([0.5, 0.75, 0.25])))
    np.testing.assert_array_equal(each["b1"], np.array([0.5, 0.75, 0.25], np.float32))
    with pytest.raises(ValueError, match=r"`b1`: expected a 0-d array, got shape \(2,\)"):
        tx.set_hyperparams(state, b1=jnp.array([0.5, 0.75]))
