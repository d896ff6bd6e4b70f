"""The cart-pole against its equations of motion, solved in float64, and the ends of its episodes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import cart_pole


def next_state(state, action):
    """Newton and Euler for a uniform rod: two equations in the two accelerations, then one step of Euler's method."""
    cart, pole, half, gravity, force = 1.0, 0.1, 0.5, 9.8, 10.0 if action else -10.0
    x, velocity, angle, spin = state
    sin, cos = np.sin(angle), np.cos(angle)
    inertia = pole * (2 * half) ** 2 / 3  # about its end
    matrix = [[cart + pole, pole * half * cos], [pole * half * cos, inertia]]
    acceleration, turn = np.linalg.solve(matrix, [force + pole * half * spin**2 * sin, pole * gravity * half * sin])
    return np.array([x + 0.02 * velocity, velocity + 0.02 * acceleration, angle + 0.02 * spin, spin + 0.02 * turn])


def test_physics_solves_the_equations_of_motion():
    rng = np.random.default_rng(0)
    states = rng.uniform([-2.4, -3, -0.3, -3], [2.4, 3, 0.3, 3], (50, 4))
    actions = rng.integers(0, 2, 50)
    want = [next_state(*both) for both in zip(states, actions)]
    got = cart_pole.physics(jnp.asarray(states, jnp.float32), jnp.asarray(actions))
    # float32 of numbers up to 3.3, some roundings each.
    np.testing.assert_allclose(got, want, atol=2e-6)


def test_a_pole_that_nobody_balances_falls():
    """Pushed to one side only, the pole falls to the other, within ten steps."""
    carts = cart_pole.reset(jax.random.key(0), 3)
    for i in range(1, 20):
        carts, states, failed, over = cart_pole.step(carts, jnp.ones(3, jnp.int32), jax.random.key(i))
        if failed[0]:
            break
    assert 8 <= i <= 11
    assert states[0, 2] < -np.deg2rad(12)
    assert over[0]
    # The next episode has begun.
    assert carts.ages[0] == 0
    assert carts.returns[0] == i
    assert np.all(np.abs(carts.states[0]) <= 0.05)


@pytest.mark.parametrize(
    ("state", "age", "failed", "over"),
    [
        ([2.39, 0, 0, 0], 0, False, False),
        ([2.41, 0, 0, 0], 0, True, True),
        ([-2.41, 0, 0, 0], 0, True, True),
        ([0, 0, 0.208, 0], 0, False, False),  # 12 degrees are 0.2094
        ([0, 0, -0.211, 0], 0, True, True),
        ([0, 0, 0, 0], 498, False, False),
        ([0, 0, 0, 0], 499, False, True),  # cut off, not failed
        ([0, 0, 0.211, 0], 499, True, True),
    ],
)
def test_ends(state, age, failed, over):
    start = cart_pole.Carts(jnp.asarray([state], jnp.float32), jnp.asarray([age]), jnp.asarray([7]))
    carts, states, *ends = cart_pole.step(start, jnp.zeros(1, jnp.int32), jax.random.key(0))
    assert [bool(x[0]) for x in ends] == [failed, over]
    assert (carts.ages[0], carts.returns[0]) == ((0, age + 1) if over else (age + 1, 7))
    # What came of the push is there even if a new episode has begun.
    np.testing.assert_allclose(states[0], next_state(state, 0), atol=1e-6)
    if not over:
        np.testing.assert_array_equal(carts.states, states)
