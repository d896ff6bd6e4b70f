"""The cart-pole in JAX: many carts at once, each pushed left or right at every step so that its pole stays upright.

Equations and numbers of Barto, Sutton and Anderson (1983, "Neuronlike adaptive elements that can solve difficult learning
control problems") without friction: a cart of 1 kg on a track, on it a pole of 0.1 kg and 1 m, pushed by 10 N for 0.02 s,
one step of Euler's method. An episode ends when the pole has fallen by 12 degrees or the cart is 2.4 m away, and is cut
off after 500 steps. Each step is worth 1.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

CART, POLE, HALF_LENGTH, GRAVITY, FORCE, SECONDS = 1.0, 0.1, 0.5, 9.8, 10.0, 0.02
FALLEN, AWAY, LIMIT = np.deg2rad(12), 2.4, 500


class Carts(NamedTuple):
    """All carts. `states` (carts, 4): position in m, velocity, angle from upright in rad, angular velocity."""

    states: jax.Array
    ages: jax.Array  # (carts,) int32: steps of this episode
    returns: jax.Array  # (carts,) int32: steps of the episode before, 0 in the first


def reset(key: jax.Array, count: int) -> Carts:
    return Carts(_fresh(key, count), jnp.zeros(count, jnp.int32), jnp.zeros(count, jnp.int32))


def physics(states: jax.Array, actions: jax.Array) -> jax.Array:
    """The states (carts, 4) after one push: to the right where the action is 1, to the left where it is 0."""
    _, velocity, angle, spin = states.T
    sin, cos, mass = jnp.sin(angle), jnp.cos(angle), CART + POLE
    push = (jnp.where(actions == 1, FORCE, -FORCE) + POLE * HALF_LENGTH * spin**2 * sin) / mass
    turn = (GRAVITY * sin - push * cos) / (HALF_LENGTH * (4 / 3 - POLE * cos**2 / mass))
    acceleration = push - POLE * HALF_LENGTH * turn * cos / mass
    return states + SECONDS * jnp.stack([velocity, acceleration, spin, turn], axis=1)


def step(carts: Carts, actions: jax.Array, key: jax.Array) -> tuple[Carts, jax.Array, jax.Array, jax.Array]:
    """One push for each cart; where its episode is over, the next begins.

    Returns:
      the carts; the states (carts, 4) before any new beginning; whether the pole fell or the cart got away (carts,); and
      whether the episode is over, for that or by its limit (carts,).
    """
    states, ages = physics(carts.states, actions), carts.ages + 1
    failed = (jnp.abs(states[:, 2]) > FALLEN) | (jnp.abs(states[:, 0]) > AWAY)
    over = failed | (ages >= LIMIT)
    begun = jnp.where(over[:, None], _fresh(key, len(ages)), states)
    return Carts(begun, jnp.where(over, 0, ages), jnp.where(over, ages, carts.returns)), states, failed, over


def _fresh(key: jax.Array, count: int) -> jax.Array:
    return jax.random.uniform(key, (count, 4), minval=-0.05, maxval=0.05)
