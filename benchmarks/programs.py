"""A jitted step with the arrays it works on: its stages timed, its memory read, its calls timed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from benchmarks.dispatch import Queue

TOLERANCE = 1e-5
"""Of the largest parameter: how far two candidates may be apart after one step."""

OUTLIERS = 1e-3
"""Share of parameters that may be further apart where gradients are computed, not given: Adam's first step is the sign
of a gradient, and of a gradient that is zero but for rounding the sign is anyone's."""


class MissingError(Exception):
    """What a candidate needs is not here."""


class WrongResultError(Exception):
    """A candidate computes something else than the baseline. How fast it does so is of no interest."""


@contextlib.contextmanager
def relaxed() -> Iterator[None]:
    """JAX's own rules of promotion, which optax and Flax count on, whatever the caller has set."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Compiles everything anew: times of compilation that come from a cache on disk say nothing."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it looks at the setting once
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


class Program:
    """A step `step(*held, *rest)` that donates `held` and returns it, renewed, as the first of its results.

    Args:
        held: parameters and state, in the order in which the step returns them. Each candidate needs its own.
        rest: gradients or a batch; not donated, may be shared.
        tree: gives the parameters as a tree, from `held`.
    """

    def __init__(
        self,
        step: Callable[..., tuple],
        held: Sequence[Any],
        rest: Sequence[Any],
        tree: Callable[[Sequence[Any]], Any] = lambda held: held[0],
    ):
        self.step, self.held, self.rest, self._tree = step, list(held), tuple(rest), tree
        self.executable: Any = None
        self._queue = Queue()

    def trace(self) -> Any:
        """The first stage, done anew each time."""

        def fresh(*args):  # JAX remembers by the function what it has traced
            return self.step(*args)

        with relaxed():
            return jax.jit(fresh, donate_argnums=tuple(range(len(self.held)))).trace(*self.held, *self.rest)

    def build(self, compiles: bool = True) -> dict[str, float]:
        """Goes through the stages and keeps the executable. Milliseconds of each."""
        clock = time.perf_counter
        start = clock()
        traced = self.trace()
        after_trace = clock()
        lowered = traced.lower()
        after_lower = clock()
        stages = {"trace_ms": 1e3 * (after_trace - start), "lower_ms": 1e3 * (after_lower - after_trace)}
        if compiles:
            self.executable = lowered.compile()
            stages["compile_ms"] = 1e3 * (clock() - after_lower)
        return stages

    def call(self) -> tuple:
        out = self.executable(*self.held, *self.rest)
        self.held[:] = out[: len(self.held)]
        return out

    def run(self, steps: int) -> None:
        """Steps back to back and one wait at the end, as a training loop does it."""
        for _ in range(steps):
            out = self.call()
        jax.block_until_ready(out)

    def dispatch(self) -> float:
        """Seconds until a call returns while the device is busy: see `benchmarks.dispatch`."""
        leaves, treedef = jax.tree.flatten(self.rest)

        def call(held: Sequence[Any], waited_for: jax.Array) -> tuple:
            return self.executable(*held, *jax.tree.unflatten(treedef, [waited_for, *leaves[1:]]))[: len(held)]

        seconds, held = self._queue.seconds_a_call(call, self.held, leaves[0])
        self.held[:] = held
        return seconds

    def parameters(self) -> list[np.ndarray]:
        return [np.asarray(x) for x in jax.tree.leaves(self._tree(self.held))]

    def memory(self) -> dict[str, int]:
        """Bytes that a step needs besides its arguments and results, and those that it writes in place."""
        analysis = self.executable.memory_analysis()
        if analysis is None:
            return {}
        return {"temp_bytes": analysis.temp_size_in_bytes, "aliased_bytes": analysis.alias_size_in_bytes}


def check(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray], outliers: float = 0.0) -> None:
    """That two candidates have the same parameters.

    Args:
        outliers: the share of parameters that may differ by more than `TOLERANCE` of the largest.

    Raises:
        WrongResultError: they differ, or are not finite.
    """
    if [x.shape for x in ours] != [x.shape for x in theirs]:
        raise WrongResultError("the parameters have other shapes")
    largest = max((float(np.max(np.abs(x))) for x in theirs if x.size), default=0.0)
    if not np.isfinite(largest):
        raise WrongResultError("the baseline's parameters are not finite")
    limit, bad = TOLERANCE * largest, 0
    for mine, other in zip(ours, theirs, strict=True):
        bad += int(np.count_nonzero(~(np.abs(mine - other) <= limit)))  # NaN is not within any limit
    total = sum(x.size for x in theirs)
    if bad > outliers * total:
        raise WrongResultError(f"{bad} of {total} parameters are further than {limit:.1e} from the baseline's")
