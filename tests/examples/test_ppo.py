"""Proximal policy optimization against its definitions, written out in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from examples import cart_pole, ppo
from tests.helpers import standard_promotion


def test_advantages_are_discounted_sums_of_errors():
    rng = np.random.default_rng(0)
    values, following = rng.standard_normal((2, 6, 3)).astype(np.float32)
    over = np.zeros((6, 3), bool)
    over[2, 0] = over[4, 1] = True
    failed = over.copy()
    failed[4, 1] = False  # cut off
    got = ppo.estimate(*map(jnp.asarray, (values, following, failed, over)))
    want = np.zeros((6, 3))
    for cart in range(3):
        for t in range(6):
            for later in range(t, 6):
                future = 0.0 if failed[later, cart] else 0.99 * following[later, cart]
                want[t, cart] += (0.99 * 0.95) ** (later - t) * (1 + future - values[later, cart])
                if over[later, cart]:
                    break
    np.testing.assert_allclose(got, want, rtol=1e-5)  # float32, sums of six


def test_the_loss_of_its_definition():
    """Two actions of logits (x, 0): one whose probability has grown beyond the clip, one where it may yet grow."""
    x, value = np.array([1.0, -0.5]), np.array([2.0, 3.0])

    def apply_fn(tree, states):
        return jnp.stack([states[:, 0], jnp.zeros(2)], 1), states[:, 1]

    p0 = 1 / (1 + np.exp(-x))
    old = np.array([p0[0] / 1.5, p0[1] / 1.1])  # ratios of 1.5 and 1.1
    batch = {
        "states": np.stack([x, value], 1),
        "actions": np.array([0, 0]),
        "log_probs": np.log(old),
        "advantages": np.array([5.0, 1.0]),  # standardised: 1 and -1
        "targets": np.array([1.0, 5.0]),
    }
    batch = {k: jnp.asarray(v, jnp.int32 if k == "actions" else jnp.float32) for k, v in batch.items()}
    gain = np.array([1.2, -1.1])
    entropy = -(p0 * np.log(p0) + (1 - p0) * np.log(1 - p0))
    want = np.mean(0.5 * (value - [1, 5]) ** 2 - gain - 0.01 * entropy)
    with standard_promotion():
        np.testing.assert_allclose(ppo.loss(apply_fn, None, batch), want, rtol=1e-5)


def test_each_epoch_sees_each_step_once(monkeypatch):
    for name, value in {"CARTS": 2, "STEPS": 6, "EPOCHS": 3, "BATCH": 4, "UPDATES": 9}.items():
        monkeypatch.setattr(ppo, name, value)

    def apply_fn(tree, states):  # to the right always, but for one in e^20 times
        return jnp.stack([jnp.zeros(len(states)), jnp.full(len(states), 20.0)], 1), states[:, 0]

    with standard_promotion():
        carts, data = ppo.rollout(apply_fn, None, cart_pole.reset(jax.random.key(0), 2), jax.random.key(1))
    assert data["states"].shape == (9, 4, 4)
    assert {x.shape for name, x in data.items() if name != "states"} == {(9, 4)}
    epochs = np.asarray(data["states"]).reshape(3, 12, 4)
    first = epochs[0][np.lexsort(epochs[0].T)]
    assert len(np.unique(first, axis=0)) == 12
    for epoch in epochs[1:]:
        assert not np.array_equal(epoch, epochs[0])
        np.testing.assert_array_equal(epoch[np.lexsort(epoch.T)], first)
    assert np.all(data["actions"] == 1)
    np.testing.assert_allclose(data["log_probs"], 0, atol=1e-6)
    # The value is the cart's position here: the target is the advantage above it.
    np.testing.assert_allclose(data["targets"] - data["advantages"], data["states"][..., 0], atol=1e-6)
    np.testing.assert_array_equal(carts.ages, 6)
