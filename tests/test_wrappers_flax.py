"""Inside Flax's own TrainState and nnx.Optimizer: the same numbers as optax's own optimizer there."""

from __future__ import annotations

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import fusedopt
from tests.helpers import assert_close, case, normal, standard_promotion

# optax's bias corrections are off by 1e-5 in the first steps (R32), and a network's gradients feed that back.
TRAINED = 2e-5
LR = 0.1


def params():
    return {
        "dense": {"kernel": jnp.asarray(normal((3, 5), 1)), "bias": jnp.asarray(normal((5,), 2))},
        "out": {"kernel": jnp.asarray(normal((5, 2), 3))},
    }


def adamw():
    return fusedopt.adamw(LR, weight_decay=0.1)


def twin():
    return optax.adamw(LR, weight_decay=0.1, mask=fusedopt.weight_mask)


class Net(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        return flax.linen.Dense(2)(jnp.tanh(flax.linen.Dense(4)(x)))


def train(tx, flat=False):
    """Three steps of a Flax Linen model in its own TrainState."""
    model, x = Net(), jnp.asarray(normal((6, 3), 8))
    start = model.init(jax.random.key(0), x)["params"]
    if flat:
        start = fusedopt.pack(start, tx)
    state = TrainState.create(apply_fn=model.apply, params=start, tx=tx)

    @jax.jit
    def step(state):
        def loss(p):
            return jnp.mean((state.apply_fn({"params": p.tree if flat else p}, x) - 1.0) ** 2)

        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    for _ in range(3):
        state = step(state)
    assert int(state.step) == 3
    assert step._cache_size() == 2  # TrainState.create starts at the Python number 0: one of Flax's own
    return state.params.tree if flat else state.params


@pytest.mark.parametrize("flat", [False, True], ids=["tree", "flat"])
def test_train_state(flat):
    with standard_promotion():
        want = train(twin())
        got = train(adamw(), flat)
    assert_close(got, want, TRAINED)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)
        self.calls = nnx.Variable(jnp.int32(0))

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


def train_nnx(tx, poison=False):
    model, x = Model(nnx.Rngs(0)), jnp.asarray(normal((6, 3), 8))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, target):
        grads = nnx.grad(lambda m: jnp.mean((m(x) - target) ** 2))(model)
        optimizer.update(model, grads)

    for t in range(3):
        step(model, optimizer, jnp.float32(np.nan if poison and t == 1 else 1.0))
    return nnx.to_pure_dict(nnx.state(model, nnx.Param)), optimizer


@pytest.mark.parametrize("name", ["adamw", "lars_optax"])
def test_nnx_optimizer(name):
    """`init` sees a State of wrapped variables and `update` plain ones: the same paths, the same layout."""
    with standard_promotion():
        want, _ = train_nnx(case(name).twin(LR))
        got, optimizer = train_nnx(case(name).make(LR))
    assert_close(got, want, TRAINED)
    assert int(optimizer.opt_state.count[...]) == 3


def test_r63_nnx_optimizer_with_a_nan():
    """Flax's own step counts every call; the optimizer's count only finite steps."""
    with standard_promotion():
        skipped, optimizer = train_nnx(adamw(), poison=True)
    assert int(optimizer.step[...]) == 3
    assert (int(optimizer.opt_state.count[...]), int(optimizer.opt_state.total_skipped[...])) == (2, 1)
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(skipped))


def test_r87_a_mask_made_of_an_nnx_state():
    """A State of bools, or a function: decay of what they say."""
    model = Model(nnx.Rngs(0))
    state = nnx.state(model, nnx.Param)
    flags = jax.tree.map(lambda x: x.ndim == 2, state)
    zeros = jax.tree.map(jnp.zeros_like, state)
    for mask in (flags, lambda p: jax.tree.map(lambda x: x.ndim == 2, p)):
        tx = fusedopt.adamw(LR, weight_decay=0.5, mask=mask)
        updates, _ = tx.update(zeros, tx.init(state), state)
        for u, p in zip(jax.tree.leaves(updates), jax.tree.leaves(state), strict=True):
            np.testing.assert_allclose(u, -LR * 0.5 * np.asarray(p) if p.ndim == 2 else 0 * p, rtol=1e-6)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        optimizer.update(model, zeros)
        assert int(optimizer.opt_state.count[...]) == 1
