"""A typed program over the public API: pyright checks what it says (`make types`), pytest runs it.

`assert_type` does nothing at run time. A mistake that must be refused has a `pyright: ignore` with its rule, and an ignore
that is not needed is an error here: so a signature that takes anything again does not pass.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=error

from __future__ import annotations

from collections.abc import Callable
from typing import Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fusedopt
import pallas_kernels

Tree = dict[str, jax.Array]


def params() -> Tree:
    return {"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2)}


def loss_fn(tree: Tree, x: jax.Array) -> jax.Array:
    return jnp.square(x @ tree["kernel"] + tree["bias"][None]).mean()


def test_a_step_gives_back_what_it_takes():
    tx, tree, x = fusedopt.adamw(1e-3), params(), jnp.ones((4, 3))
    assert_type(tx, fusedopt.FusedTransformation[fusedopt.FusedState])
    state = tx.init(tree)
    assert_type(state, fusedopt.FusedState)
    grads: Tree = jax.grad(loss_fn)(tree, x)
    tree, state = tx.apply(grads, state, tree, loss_scale=1.0, has_nan=False, learning_rate=0.1)
    assert_type(tree, Tree)
    updates, state = tx.update(updates=grads, state=state, params=tree)  # by the names of optax
    tree = optax.apply_updates(tree, updates)
    assert_type(state.skipped, jax.Array)
    assert_type(state.mu, tuple[jax.Array, ...])
    assert not state.skipped

    flat = fusedopt.pack(params(), tx)
    flat_grads: fusedopt.FlatParams = jax.grad(lambda flat: loss_fn(flat.tree, x))(flat)
    flat, flat_state = tx.apply(flat_grads, tx.init(flat), flat)
    assert_type(flat, fusedopt.FlatParams)
    assert_type(flat_state, fusedopt.FusedState)
    assert_type(flat.buckets, tuple[jax.Array, ...])
    assert flat.layout.num_leaves == 2


def test_hyperparameters():
    state = fusedopt.lars(fusedopt.warmup_cosine(0.1, 1, 10), momentum=jnp.float32(0.9)).init(params())
    fusedopt.lamb(optax.cosine_decay_schedule(0.1, 10), max_trust_ratio=np.float32(10), mu_dtype=jnp.bfloat16)
    tx = fusedopt.lars(lambda count: 0.1 * count.astype("float32"), weight_decay_mask=fusedopt.weight_mask)
    assert_type(tx.hyperparams(state), dict[str, jax.Array])
    state = tx.set_hyperparams(tx.init(params()), momentum=0.5)
    assert_type(state, fusedopt.FusedState)
    assert_type(tx.trust_ratios(state), dict[tuple[str, ...], jax.Array])
    with pytest.raises(TypeError):
        fusedopt.adamw("0.1")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="`backend`"):
        fusedopt.adamw(0.1, backend="cuda")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError):
        fusedopt.sgd(0.1, groups=fusedopt.Group("all", True))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError):
        fusedopt.sgd(0.1, groups=["all"])  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError):
        fusedopt.chain(fusedopt.sgd)  # pyright: ignore[reportArgumentType]


def test_what_takes_an_optax_transformation_takes_ours():
    def optimizer_of(tx: optax.GradientTransformationExtraArgs) -> optax.GradientTransformation:
        return tx

    tx = fusedopt.chain(optax.clip_by_global_norm(1.0), fusedopt.sgd(0.1))
    tree, state = tx.apply(params(), tx.init(params()), params())
    assert_type(tree, Tree)
    assert optimizer_of(tx) is tx
    optax.chain(optax.clip(1.0), fusedopt.sgd(0.1)).init(params())
    optax.MultiSteps(fusedopt.sgd(0.1), 2).init(params())
    assert_type(tx.set_hyperparams(state, learning_rate=0.2), Any)


def test_states_move():
    tx, new_tx = fusedopt.adam(0.1, ema_decay=0.9), fusedopt.adam(0.1, ema_decay=0.9, packing=fusedopt.Packing(None))
    state = tx.init(params())
    optax_state, extras = fusedopt.to_optax_state(tx, state, params())
    assert_type(fusedopt.from_optax_state(tx, optax_state, params(), extras), fusedopt.FusedState)
    flat = fusedopt.pack(params(), tx)
    assert_type(tx.ema_params(tx.init(flat), flat), fusedopt.FlatParams)
    flat, moved = fusedopt.repack(flat, tx.init(flat), tx, new_tx)
    assert_type(flat, fusedopt.FlatParams)
    fusedopt.check_restored(new_tx, moved, flat)


def test_around_a_step():
    scale = fusedopt.DynamicLossScale(period=100)
    assert_type(scale.loss_scale, jax.Array)
    assert_type(scale.update(fusedopt.has_nan(params())), fusedopt.DynamicLossScale)

    class TrainState(fusedopt.TrainState):
        dropout_key: Any = None

    state = TrainState.create(apply_fn=loss_fn, params=params(), tx=fusedopt.sgd(0.1), flat=True)
    assert_type(state, TrainState)
    state = state.apply_gradients(grads=state.params, loss_scale=2.0)
    assert_type(state, TrainState)

    tx = fusedopt.zero1(fusedopt.adamw(1e-3), jax.make_mesh((8,), ("data",)))
    assert_type(tx.axis, str)
    assert_type(tx.train_step(loss_fn), Callable[..., tuple[Any, ...]])


def test_kernels():
    (w,), emitted = pallas_kernels.elementwise(
        lambda s, w, g: (w - s[0] * g,), jnp.array([0.5]), [jnp.ones(8)], [jnp.ones(8)], backend="xla"
    )
    assert (float(w[0]), emitted) == (0.5, ())
    assert_type(pallas_kernels.supported_backends()["xla"].reason, str)
    with pytest.raises(ValueError, match="`backend`"):
        pallas_kernels.resolve_backend("cuda")  # pyright: ignore[reportArgumentType]
