"""A small convolutional network on real digits, in 16 bits: what it reaches in float32, it reaches here."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn.datasets import load_digits

import fusedopt
from tests.helpers import standard_promotion

pytestmark = pytest.mark.slow

BATCH, EPOCHS = 64, 4


class Cnn(nn.Module):
    dtype: object

    @nn.compact
    def __call__(self, x):
        x = x.astype(self.dtype)
        for features, stride in ((16, 1), (32, 2), (32, 2)):
            x = nn.Conv(features, (3, 3), stride, dtype=self.dtype, param_dtype=self.dtype)(x)
            x = nn.relu(nn.GroupNorm(4, dtype=self.dtype, param_dtype=self.dtype)(x))
        return nn.Dense(10, dtype=self.dtype, param_dtype=self.dtype)(x.reshape(x.shape[0], -1))


@functools.cache
def digits():
    """Training and test images (n, 8, 8, 1) in [0, 1] and labels: 1,797 scans of handwritten digits."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images, labels = (data.images[order] / 16)[..., None].astype(np.float32), data.target[order].astype(np.int32)
    return (images[:1437], labels[:1437]), (images[1437:], labels[1437:])


def train(dtype, tx, scale=None):
    """Test accuracy in percent, the last state and the last loss scale, after `EPOCHS` epochs."""
    (images, labels), (test_images, test_labels) = digits()
    model = Cnn(dtype)

    def loss_fn(params, x, y):
        logits = model.apply(params, x).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def step(carry, batch):
        params, state, scale = carry
        if scale is None:
            grads = jax.grad(loss_fn)(params, *batch)
            return (*tx.apply(grads, state, params), None), None
        _, grads = scale.value_and_grad(loss_fn)(params, *batch)
        params, state = tx.apply(grads, state, params, loss_scale=scale.loss_scale)
        return (params, state, scale.update(state.skipped)), None

    rng, steps = np.random.default_rng(1), len(labels) // BATCH
    order = np.concatenate([rng.permutation(len(labels))[: steps * BATCH] for _ in range(EPOCHS)]).reshape(-1, BATCH)
    with standard_promotion(), jax.numpy_rank_promotion("allow"):
        params = model.init(jax.random.key(0), images[:1])
        run = jax.jit(lambda carry: jax.lax.scan(step, carry, (images[order], labels[order]))[0])
        params, state, scale = run((params, tx.init(params), scale))
        predicted = np.argmax(model.apply(params, test_images), axis=1)
    return 100 * np.mean(predicted == test_labels), state, scale


@functools.cache
def in_float32():
    return train(jnp.float32, fusedopt.adamw(1e-3))[0]


def test_float16_recovers_from_a_loss_scale_that_is_far_too_high():
    scale = fusedopt.DynamicLossScale(2.0**30)
    accuracy, state, scale = train(jnp.float16, fusedopt.adamw(1e-3, master_weights=True), scale)
    assert in_float32() > 95
    assert accuracy >= in_float32() - 1
    # Each halving is a skipped step: that many are reported, and no more than it takes to come down.
    assert 2.0**30 / scale.loss_scale == 2.0**state.total_skipped
    assert 5 <= state.total_skipped <= 25
    assert state.count + state.total_skipped == EPOCHS * (1437 // BATCH)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))


def test_bfloat16_with_master_weights_reaches_float32():
    accuracy, state, _ = train(jnp.bfloat16, fusedopt.adamw(1e-3, master_weights=True))
    assert accuracy >= in_float32() - 1
    assert state.total_skipped == 0


def test_bfloat16_without_master_weights_hardly_learns_at_a_small_learning_rate():
    """A weight of 0.1 has neighbours 5e-4 away: steps of 1e-4 round back to it. With masters they add up."""
    float32, _, _ = train(jnp.float32, fusedopt.adamw(1e-4))
    with_masters, _, _ = train(jnp.bfloat16, fusedopt.adamw(1e-4, master_weights=True))
    without, _, _ = train(jnp.bfloat16, fusedopt.adamw(1e-4))
    assert with_masters >= float32 - 5
    assert without < with_masters - 25
