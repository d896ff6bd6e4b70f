"""Proximal policy optimization (Schulman et al. 2017) on cart-poles: what an iteration learns from, and its loss.

A network is a function `apply_fn(tree, states)` of states (batch, 4) to logits (batch, 2) and values (batch,).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from examples import cart_pole

CARTS, STEPS, EPOCHS, BATCH = 8, 64, 4, 64
UPDATES = EPOCHS * CARTS * STEPS // BATCH
"""Gradient steps of an iteration."""

DISCOUNT, TRACE, CLIP, ENTROPY = 0.99, 0.95, 0.2, 0.01


def rollout(
    apply_fn: Callable, tree: Any, carts: cart_pole.Carts, key: jax.Array
) -> tuple[cart_pole.Carts, dict[str, jax.Array]]:
    """Plays STEPS steps of all carts. What they teach comes in random batches, as arrays (UPDATES, BATCH, ...)."""
    play_key, shuffle_key = jax.random.split(key)

    def play(carts, key):
        choose, again = jax.random.split(key)
        actions = jax.random.categorical(choose, apply_fn(tree, carts.states)[0])
        new, *outcome = cart_pole.step(carts, actions, again)
        return new, (carts.states, actions, *outcome)

    carts, (states, actions, then, failed, over) = jax.lax.scan(play, carts, jax.random.split(play_key, STEPS))
    logits, values = (out.reshape(STEPS, CARTS, *out.shape[1:]) for out in apply_fn(tree, states.reshape(-1, 4)))
    following = apply_fn(tree, then.reshape(-1, 4))[1].reshape(STEPS, CARTS)
    advantages = estimate(values, following, failed, over)
    data = {
        "states": states,
        "actions": actions,
        "log_probs": _log_probs(logits, actions),
        "advantages": advantages,
        "targets": advantages + values,
    }
    orders = jax.vmap(lambda k: jax.random.permutation(k, STEPS * CARTS))(jax.random.split(shuffle_key, EPOCHS))
    return carts, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[orders.reshape(UPDATES, BATCH)], data)


def estimate(values: jax.Array, following: jax.Array, failed: jax.Array, over: jax.Array) -> jax.Array:
    """Generalised advantages (Schulman et al. 2016) of rewards of 1.

    Args, all (steps, carts):
      values: of the states acted in.
      following: of the states that came of it, before any new episode. An episode that was cut off has not failed, so what
        would have followed it counts (Pardo et al. 2018, "Time limits in reinforcement learning").
      failed, over: whether the episode failed, and whether it ended.
    """
    errors = 1 + DISCOUNT * jnp.where(failed, 0, following) - values

    def back(later, now):
        error, ended = now
        advantage = error + DISCOUNT * TRACE * jnp.where(ended, 0, later)
        return advantage, advantage

    return jax.lax.scan(back, jnp.zeros_like(values[0]), (errors, over), reverse=True)[1]


def loss(apply_fn: Callable, tree: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """Of one batch, arrays (BATCH, ...): clipped policy gain, squared error of the values, entropy."""
    logits, values = apply_fn(tree, batch["states"])
    ratio = jnp.exp(_log_probs(logits, batch["actions"]) - batch["log_probs"])
    advantages = jax.nn.standardize(batch["advantages"])
    gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages)
    entropy = -jnp.sum(jax.nn.softmax(logits) * jax.nn.log_softmax(logits), axis=1)
    return jnp.mean(0.5 * (values - batch["targets"]) ** 2 - gain - ENTROPY * entropy)


def _log_probs(logits: jax.Array, actions: jax.Array) -> jax.Array:
    return -optax.losses.softmax_cross_entropy_with_integer_labels(logits, actions)
