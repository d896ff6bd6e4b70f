"""Flax NNX with the optimizers and with FlatParams."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import fusedopt
from tests.helpers import assert_close, assert_equal, filled, standard_promotion

X = jnp.asarray(filled((16, 4), seed=5))
Y = jnp.asarray(filled((16, 3), seed=6))


TWIN = optax.adamw(1e-2, mask=fusedopt.weight_mask)


class Small(nnx.Module):
    def __init__(self):
        self.hidden, self.norm = nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.BatchNorm(8, rngs=nnx.Rngs(1))
        self.out = nnx.Linear(8, 3, rngs=nnx.Rngs(2))

    def __call__(self, x):
        return self.out(jnp.tanh(self.norm(self.hidden(x))))


def nnx_loss(module):
    return jnp.square(module(X) - Y).mean()


def test_nnx_optimizer_under_nnx_jit_is_that_of_optax():
    with standard_promotion():
        models = Small(), Small()
        optimizers = [nnx.Optimizer(m, tx, wrt=nnx.Param) for m, tx in zip(models, (fusedopt.adamw(1e-2), TWIN))]
        traces = []

        @nnx.jit
        def train(module, optimizer):
            traces.append(1)
            optimizer.update(module, nnx.grad(nnx_loss)(module))

        for _ in range(3):
            for module, optimizer in zip(models, optimizers):
                train(module, optimizer)
    ours, theirs = (nnx.to_pure_dict(nnx.state(m.out, nnx.Param)) for m in models)
    assert_close(ours, theirs, 1e-6)
    assert len(traces) == 2
    assert int(optimizers[0].opt_state.count[...]) == int(optimizers[0].step[...]) == 3
    assert len(jax.tree.leaves(nnx.state(optimizers[0]))) < len(jax.tree.leaves(nnx.state(optimizers[1])))


def test_what_nnx_holds_of_an_optax_run_goes_on_here():
    module = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    theirs, tx = nnx.Optimizer(module, TWIN, wrt=nnx.Param), fusedopt.adamw(1e-2)
    with standard_promotion():
        theirs.update(module, nnx.grad(nnx_loss)(module))
        params = nnx.state(module, nnx.Param)
        state = fusedopt.from_optax_state(tx, theirs.opt_state, params)
        back, _ = fusedopt.to_optax_state(tx, state, params, like=theirs.opt_state)
    assert int(state.count) == 1
    assert_equal(back, theirs.opt_state)


def test_nnx_split_and_merge_with_flat_params():
    with standard_promotion():
        reference, module = Small(), Small()
        graph, params, rest = nnx.split(module, nnx.Param, ...)
        flat, tx = fusedopt.pack(params), fusedopt.adamw(1e-2)
        state, twin_state = tx.init(flat), TWIN.init(nnx.state(reference, nnx.Param))

        @jax.jit
        def train(flat, state, rest):
            def loss(flat):
                merged = nnx.merge(graph, flat.tree, rest, copy=True)
                return nnx_loss(merged), nnx.split(merged, nnx.Param, ...)[2]

            grads, rest = jax.grad(loss, has_aux=True)(flat)
            return *tx.apply(grads, state, flat), rest

        @nnx.jit
        def train_reference(module, twin_state):
            grads = nnx.grad(nnx_loss)(module)
            updates, twin_state = TWIN.update(grads, twin_state, nnx.state(module, nnx.Param))
            nnx.update(module, optax.apply_updates(nnx.state(module, nnx.Param), updates))
            return twin_state

        for _ in range(3):
            flat, state, rest = train(flat, state, rest)
            twin_state = train_reference(reference, twin_state)
        nnx.update(module, flat.tree, rest)
    got, want = (nnx.to_pure_dict(nnx.state(m.out, nnx.Param)) for m in (module, reference))
    assert_close(got, want, 1e-6)
    # The bias before the norm moves by rounding errors alone, and the mean with it; the variance does not.
    assert_close(module.norm.var[...], reference.norm.var[...], 1e-5)
