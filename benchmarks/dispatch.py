"""How long a jitted, donated call of `apply` on FlatParams keeps the caller: `python -m benchmarks.dispatch`.

2,000 arrays of 32 elements as FlatParams, beside two programs with the same arguments: one that returns them, which is
what JAX's own call costs, and one that adds one to each. The three take turns; medians.

A training loop runs ahead of its device: it calls the next step while the device computes the last, and what matters is
how soon the call returns. So the calls timed here wait for an array that is not ready yet. Without that the caller
shares its processors with the step itself, and part of the step's time is taken for the call's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

AHEAD, CALLS = 8, 16
"""Calls before the clock starts, which are slower because the caller has slept, and calls that are timed. JAX holds the
caller back when 32 programs wait for one CPU device."""

SECONDS_A_ROUND = 0.5e-6
"""At least what a round of `_late` takes."""

LEAVES, SAMPLES = 2000, 50


@jax.jit
def _late(x: jax.Array, rounds: jax.Array, zeros: jax.Array) -> jax.Array:
    """`x`, once one thread has computed about a microsecond for each round.

    Args:
        zeros: of shape `ZEROS`. JAX runs a program that looks cheap before its call returns, and sees one round of the
            loop: adding these up looks expensive.
    """
    y = jax.lax.fori_loop(0, rounds, lambda _, y: jnp.cos(y), zeros.sum(0))
    return jnp.where(y[0] > 2, jnp.zeros((), x.dtype), x)  # never: but the compiler does not know that


ZEROS = (64, 512)


class Queue:
    """Times calls that wait for a device. It learns how much the device must be given to do meanwhile."""

    def __init__(self):
        self.rounds = 100

    def seconds_a_call(self, call: Callable[[Any, jax.Array], Any], held: Any, x: jax.Array) -> tuple[float, Any]:
        """Seconds until a call returns, the mean of `CALLS`, and what the last one returned.

        Args:
            call: takes what it returned before and the array it has to wait for.
            held: for the first call.
            x: the array.
        """
        while True:
            begun = time.perf_counter()
            late = _late(x, np.int32(self.rounds), np.zeros(ZEROS, np.float32))
            for _ in range(AHEAD):
                held = call(held, late)
            start = time.perf_counter()
            for _ in range(CALLS):
                held = call(held, late)
            end, waited = time.perf_counter(), not late.is_ready()
            jax.block_until_ready(held)  # before others are timed: these calls count among the 32
            if waited:
                return (end - start) / CALLS, held
            self.rounds = max(2 * self.rounds, int((end - begun) / SECONDS_A_ROUND))


def programs(tx: Any) -> dict[str, Callable[[Any, Any, Any], tuple]]:
    """Steps `(params, state, grads) -> (params, state)` that differ in what they compute, not in what they are given."""

    def add_one(x):
        return ~x if x.dtype == jnp.bool_ else x + jnp.ones((), x.dtype)

    return {
        "apply": lambda params, state, grads: tx.apply(grads, state, params),
        "add one": lambda params, state, grads: jax.tree.map(add_one, (params, state)),
        "pass on": lambda params, state, grads: (params, state),
    }


def measure(leaves: int, samples: int) -> tuple[dict[str, list[float]], int]:
    """Seconds of each sample by program, and how many arrays a call has as arguments."""
    import fusedopt

    tx = fusedopt.adamw(1e-3)
    params = fusedopt.pack({f"layer_{i:04}": np.ones((4, 8), np.float32) for i in range(leaves)})
    grads = jax.tree.map(jnp.ones_like, params)
    (grad,), treedef = jax.tree.flatten(grads)
    # keep_unused: two of them do nothing with the gradients, and wait for them all the same.
    steps = {name: jax.jit(p, donate_argnums=(0, 1), keep_unused=True) for name, p in programs(tx).items()}
    # Compiled by a first call: the clock is for later ones.
    held = {name: step(*jax.tree.map(jnp.copy, (params, tx.init(params))), grads) for name, step in steps.items()}
    queue = Queue()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(samples):
        for name, step in steps.items():

            def call(held, grad, step=step):
                return step(*held, jax.tree.unflatten(treedef, [grad]))

            seconds, held[name] = queue.seconds_a_call(call, held[name], grad)
            times[name].append(seconds)
    return times, len(jax.tree.leaves((held["apply"], grads)))


def main() -> None:
    times, arguments = measure(LEAVES, SAMPLES)
    medians = {name: 1e6 * float(np.median(seconds)) for name, seconds in times.items()}
    print(f"{LEAVES:,} arrays as FlatParams: a call has {arguments} arguments (jax {jax.__version__})")
    for name, microseconds in medians.items():
        low, high = 1e6 * np.percentile(times[name], (25, 75))
        print(f"{name:8} returns after {microseconds:5.1f} us (middle half {low:.1f} to {high:.1f})")
    for name in ("pass on", "add one"):
        ratios = np.divide(times["apply"], times[name])
        print(f"apply / {name} = {np.median(ratios):.2f} (median of {SAMPLES} ratios)")


if __name__ == "__main__":
    main()
