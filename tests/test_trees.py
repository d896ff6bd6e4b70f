"""Every kind of pytree: containers, empty leaves, odd sizes, layouts of XLA."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fusedopt
from tests.helpers import ROUNDING, assert_close, assert_equal, case, normal

LR = 0.1

# A step of ours against float64 at magnitudes near 1: two or three roundings of float32.
TOLERANCE = 1e-6


class Pair(NamedTuple):
    kernel: Any
    bias: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: Any
    bias: Any
    name: str = dataclasses.field(default="layer", metadata={"static": True})


def kernel():
    return jnp.asarray(normal((3, 4), 1))


def bias():
    return jnp.asarray(normal((4,), 2))


CONTAINERS = {
    "dict": lambda: {"a": {"kernel": kernel(), "bias": bias()}},
    "list": lambda: [kernel(), [bias()]],
    "tuple": lambda: (kernel(), (bias(), ())),
    "root leaf": kernel,
    "frozen dict": lambda: flax.core.freeze({"a": {"kernel": kernel(), "bias": bias()}}),
    "namedtuple": lambda: {"a": Pair(kernel(), bias())},
    "dataclass": lambda: [Layer(kernel(), bias())],
    "none": lambda: {"a": None, "b": Pair(kernel(), None)},
    "masked node": lambda: {"a": optax.MaskedNode(), "b": kernel()},
    "empty branches": lambda: {"a": {}, "b": (), "c": {"d": []}, "e": kernel()},
    "integer keys": lambda: {0: kernel(), 1: {2: bias()}},
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("mode", ["update", "apply", "flat"])
def test_structure_and_values_survive(container, mode):
    params = CONTAINERS[container]()
    grads = jax.tree.map(lambda x: 2 * x, params)
    tx = fusedopt.sgd(LR)
    want = jax.tree.map(lambda x: np.asarray(x, np.float64) * (1 - 2 * LR), params)
    if mode == "update":
        updates, _ = tx.update(grads, tx.init(params), params)
        got = optax.apply_updates(params, updates)
    elif mode == "apply":
        got, _ = tx.apply(grads, tx.init(params), params)
    else:
        flat = fusedopt.pack(params)
        assert_equal(flat.tree, params)
        got = tx.apply(jax.tree.map(lambda x: 2 * x, flat), tx.init(flat), flat)[0].tree
    assert_close(got, want, TOLERANCE)


EMPTY = {
    "dict": {},
    "tuple": (),
    "nested": {"a": {}, "b": [(), {}]},
    "only none": {"a": None},
    "zero-size": {"a": np.zeros((0,), np.float32), "b": np.zeros((3, 0), np.float32)},
}


@pytest.mark.parametrize("name", ["sgd", "adamw", "lars_optax"])
@pytest.mark.parametrize("tree", EMPTY)
def test_r98_r109_trees_without_elements(tree, name):
    tx, params = case(name).make(LR), jax.tree.map(jnp.asarray, EMPTY[tree])

    def three_steps(params):
        updates, state = tx.update(params, tx.init(params), params)
        out, state = tx.apply(params, state, params)
        flat = fusedopt.pack(params, tx)
        flat, state = tx.apply(flat, state, flat)
        return updates, out, flat.tree, state

    *results, state = three_steps(params)
    for got in results:
        assert_equal(got, params)
    assert (int(state.count), bool(state.skipped)) == (3, False)


@pytest.mark.parametrize("name", ["adamw", pytest.param("lars_optax", marks=pytest.mark.slow)])
@pytest.mark.parametrize("solo_from", [1, None])
def test_r107_an_empty_leaf_anywhere_hides_no_other(name, solo_from):
    tx = case(name).make(LR, packing=fusedopt.Packing(solo_from=solo_from))
    trees = []
    for position in range(3):
        params = [jnp.ones((1, 8)), jnp.ones((2, 3))]
        params.insert(position, jnp.zeros((1, 0)))
        trees.append(params)
    for params, updates in zip(trees, [tx.update(p, tx.init(p), p)[0] for p in trees]):
        for u, p in zip(updates, params, strict=True):
            assert u.shape == p.shape
            assert np.all(np.asarray(u) < 0)


def test_r109_sizes_1_1_0_1_0():
    params = [jnp.ones((n,)) for n in (1, 1, 0, 1, 0)]
    tx = fusedopt.sgd(LR)
    updates, _ = tx.update(params, tx.init(params), params)
    np.testing.assert_array_equal(updates[3], np.float32(-0.1))
    assert [u.size for u in updates] == [1, 1, 0, 1, 0]


NUMBERS = {"python": 2.0, "numpy 0-d": np.float32(2.0), "numpy array": np.array([2.0, 2.0]), "numpy f64": np.float64(2)}


@pytest.mark.parametrize("kind", NUMBERS)
def test_python_and_numpy_leaves(kind):
    params, tx = {"x": NUMBERS[kind]}, fusedopt.adam(LR)
    state = tx.init(params)
    updates, state = tx.update(params, state, params)
    assert updates["x"].dtype == jnp.float32  # what JAX holds it as without x64
    assert updates["x"].shape == np.shape(params["x"])
    np.testing.assert_allclose(updates["x"], -LR, rtol=1e-6)
    new, state = jax.jit(tx.apply)(params, state, params)
    np.testing.assert_allclose(new["x"], 2.0 - LR, rtol=1e-6)
    flat = fusedopt.pack(params)
    np.testing.assert_array_equal(flat.tree["x"], params["x"])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_r139_odd_sizes_equal_each_leaf_alone(dtype):
    sizes = [1, 3, 5, 128, 129, 1025, 4096, 7]
    params = [jnp.asarray(normal((n, 1), i)).astype(dtype) for i, n in enumerate(sizes)]
    grads = [jnp.asarray(normal((n, 1), 50 + i)).astype(dtype) for i, n in enumerate(sizes)]
    tx = fusedopt.adamw(LR, weight_decay=0.1)
    together = tx.update(grads, tx.init(params), params)[0]
    for i in (0, 2, 5):
        alone = tx.update([grads[i]], tx.init([params[i]]), [params[i]])[0][0]
        # XLA contracts products and sums differently in vectors and in their remainders: one rounding.
        assert_close(together[i], alone, ROUNDING[np.dtype(dtype)])


@pytest.mark.parametrize("shape", [(4096,), (32, 32), (8, 128), (1024,), (16384,)])
def test_pack_copies_leaves_that_fill_their_bucket(shape):
    # A reshape, a concatenation of one and an astype may all hand out their operand.
    leaf = jnp.ones(shape)
    flat = fusedopt.pack({"x": leaf})
    assert flat.buckets[0].unsafe_buffer_pointer() != leaf.unsafe_buffer_pointer()
    jax.jit(lambda f: jax.tree.map(lambda x: x + 1, f), donate_argnums=0)(flat)
    np.testing.assert_array_equal(leaf, np.ones(shape, np.float32))


def test_r112_gradients_out_of_transposes_and_convolutions():
    params = {"w": jnp.asarray(normal((6, 4), 3)), "k": jnp.asarray(normal((3, 3, 2, 4), 4))}
    x, image = jnp.asarray(normal((5, 4), 5)), jnp.asarray(normal((1, 8, 8, 2), 6))
    tx = fusedopt.adamw(LR, packing=fusedopt.Packing(solo_from=30))  # w packed, k alone

    def loss(p):
        y = jax.lax.conv_general_dilated(image, p["k"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.sum((x @ p["w"].T) ** 2) + jnp.sum(y**2)

    @jax.jit
    def fused(p):
        g = jax.grad(loss)(p)
        return g, tx.update(g, tx.init(p), p)[0], tx.apply(g, tx.init(p), p)[0]

    grads, updates, applied = fused(params)
    grads = jax.tree.map(lambda g: jnp.asarray(np.ascontiguousarray(g)), grads)
    want = tx.update(grads, tx.init(params), params)[0]
    assert_close(updates, want, TOLERANCE)
    assert_close(applied, optax.apply_updates(params, want), TOLERANCE)


def test_r102_equal_trees_have_one_layout_object():
    def tree():
        return {"a": jnp.ones((2, 3)), "b": jnp.ones(3)}

    first, second = fusedopt.pack(tree()), fusedopt.pack(jax.tree.map(lambda x: 5 * x, tree()))
    assert first.layout is second.layout
    assert jax.tree.structure(first) == jax.tree.structure(second)
    tx = fusedopt.adamw(LR)
    assert jax.tree.structure(tx.init(first)) == jax.tree.structure(tx.init(tree()))
