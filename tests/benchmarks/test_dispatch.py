"""The benchmark of a call's own time: what it times waits for a busy device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import dispatch


@pytest.mark.parametrize("size", [1, 4096])
def test_calls_are_timed_while_the_device_is_busy(size):
    """Also where the array is small: JAX computes what is cheap before a call returns."""
    x, ready = jnp.arange(size, dtype=jnp.float32), []

    def call(held, late):
        ready.append(late.is_ready())
        if len(ready) == 1:
            jax.block_until_ready(late)  # as a call that compiles: by then the device has nothing left to do
        return held, late

    seconds, (_, late) = dispatch.Queue().seconds_a_call(call, None, x)
    calls = dispatch.AHEAD + dispatch.CALLS
    assert seconds > 0
    assert len(ready) >= 2 * calls  # the first try did not count
    assert not any(ready[-calls:])
    np.testing.assert_array_equal(late, x)


def test_programs_differ_in_what_they_compute_only():
    times, arguments = dispatch.measure(leaves=3, samples=2)
    assert (
        arguments == 8
    )  # of an AdamW: a weight, a gradient, two moments; count, hyperparameters, two of skipped steps
    assert {name: len(t) for name, t in times.items()} == {"apply": 2, "add one": 2, "pass on": 2}
    assert min(min(t) for t in times.values()) > 0
