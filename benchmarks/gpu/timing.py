"""Times of programs beside each other, and of a plain copy, which no update can beat.

Each candidate is compiled before any is timed, several at once. Then they take turns, A B C A B C, so that a change of
the clocks meets all of them. A sample is a number of steps back to back and one wait at its end: what a training loop
sees, the host's calls included where they take longer than the device.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.record import RESERVE, Run

WARM_UP, SAMPLES, SAMPLE_SECONDS = 3, 9, 0.02
UNHINDERED = 4  # steps that the host can hand over before the device makes it wait
WORKERS = max(1, min(8, (os.cpu_count() or 2) // 2))


class Steps(Protocol):
    """Something to time."""

    inner: int

    def compile(self) -> None: ...

    def run(self, steps: int) -> float:
        """Runs the steps and waits for the device. The time at which the last one was handed over."""
        ...


def lower(step: Callable[..., Any], args: Sequence[Any], donated: int) -> Any:
    """The program of a step that donates its first arguments, ready to be compiled.

    Traced by the caller: the threads that compile do not know its context.
    """
    return jax.jit(step, donate_argnums=tuple(range(donated))).lower(*args)


class JaxSteps:
    """A jitted `step(*held, *rest)`.

    Args:
        held: donated, and replaced by what the step returns, in the order in which it takes them. A list, which
            several candidates may share.
        rest: not donated.
        donate: False keeps `held` as it is.
        inner: steps in one call.
    """

    def __init__(
        self, step: Callable[..., Any], held: list, rest: Sequence[Any] = (), *, donate: bool = True, inner: int = 1
    ):
        self.held, self.rest, self.donate, self.inner = held, tuple(rest), donate, inner
        self.lowered = lower(step, (*held, *self.rest), len(held) if donate else 0)

    def compile(self) -> None:
        self.call = self.lowered.compile()

    def run(self, steps: int) -> float:
        for _ in range(steps):
            out = self.call(*self.held, *self.rest)
            if self.donate:
                self.held[:] = out
        enqueued = time.perf_counter()
        jax.block_until_ready(out)
        return enqueued


class Compiler:
    """Compiles programs on all cores, while the caller traces the next one. A program has a method `compile`."""

    def __init__(self):
        self._pool = concurrent.futures.ThreadPoolExecutor(WORKERS)
        self._pending: dict[Any, concurrent.futures.Future] = {}

    def start(self, key: Any, program: Any) -> None:
        self._pending[key] = self._pool.submit(program.compile)

    def errors(self) -> dict[Any, Exception]:
        """Waits for all. What was raised, by the programs' keys."""
        with self._pool:
            errors = {key: future.exception() for key, future in self._pending.items()}
        return {key: error for key, error in errors.items() if error is not None}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One of the programs to compare.

    Attributes:
        labels: of its row.
        build: makes it; `MissingError` if it cannot be had here.
        bytes: that a step must move, None if unknown.
        seconds: that building it takes, roughly.
        baseline: whether the others' ratios are to this one.
    """

    labels: Mapping[str, Any]
    build: Callable[[], Steps]
    bytes: int | None = None
    seconds: float = RESERVE
    baseline: bool = False


class MissingError(Exception):
    """A library that a candidate needs is not here, or sees no device."""


def compare(run: Run, candidates: Sequence[Candidate], *, together: bool = True) -> list[dict[str, Any]]:
    """Times candidates, most important first, and writes a row for each. The rows of those that were timed.

    Compiled one after the other if not `together`: where XLA tries out algorithms on the device, programs that are
    compiled at once disturb each other's choice, while one after the other they share it.
    """
    built: dict[int, Steps] = {}
    compiler, waiting, slowest = Compiler(), 0.0, 0.0
    for i, c in enumerate(candidates):
        if not run.affords(c.labels, max(waiting + c.seconds, slowest)):
            continue
        begun = time.monotonic()
        try:
            steps = c.build()
            if not together:
                steps.compile()
                slowest = max(slowest, time.monotonic() - begun)
        except MissingError as why:
            run.skip(c.labels, str(why))
        except Exception as error:
            run.fail(c.labels, error)
        else:
            built[i] = steps
            if together:
                compiler.start(i, steps)
                waiting += c.seconds / WORKERS

    def drop(i: int, error: Exception) -> None:
        run.fail(candidates[i].labels, error)
        del built[i]

    for i, error in compiler.errors().items():
        drop(i, error)
    counts = {}
    for i, steps in list(built.items()):
        try:
            counts[i] = _steps_of_a_sample(steps, run.tiny)
        except Exception as error:
            drop(i, error)
    times: dict[int, list[tuple[float, float]]] = {i: [] for i in built}
    for _ in range(2 if run.tiny else SAMPLES):
        for i, steps in list(built.items()):
            start = time.perf_counter()
            try:
                steps.run(counts[i])
                end, few = time.perf_counter(), min(counts[i], UNHINDERED)
                host = steps.run(few) - end
            except Exception as error:
                drop(i, error)
                continue
            times[i].append(((end - start) / counts[i] / steps.inner, host / few / steps.inner))
    return _rows(run, candidates, built, times, counts)


def _steps_of_a_sample(steps: Steps, tiny: bool) -> int:
    steps.run(1 if tiny else WARM_UP)
    if tiny:
        return 1
    start = time.perf_counter()
    steps.run(WARM_UP)
    return max(1, round(SAMPLE_SECONDS * WARM_UP / (time.perf_counter() - start)))


def _rows(run, candidates, built, times, counts) -> list[dict[str, Any]]:
    medians = {i: float(np.median([t for t, _ in times[i]])) for i in built}
    base = next((medians[i] for i in built if candidates[i].baseline), None)
    rows = []
    for i, median in medians.items():
        c = candidates[i]
        low, high = np.percentile([t for t, _ in times[i]], (25, 75))
        rate = None if c.bytes is None else c.bytes / median
        row = {
            **c.labels,
            "median_us": 1e6 * median,
            "p25_us": 1e6 * float(low),
            "p75_us": 1e6 * float(high),
            "host_us": 1e6 * float(np.median([t for _, t in times[i]])),
            "ratio": None if base is None else median / base,
            "bytes": c.bytes,
            "bytes_per_second": rate,
            "percent_of_ceiling": None if rate is None or run.ceiling is None else 100 * rate / run.ceiling,
            "samples": len(times[i]),
            "steps_a_sample": counts[i],
        }
        run.write(row)
        rows.append(row)
    return rows


def ceilings(run: Run) -> None:
    """How fast the device copies: the best of three ways is the ceiling of all the percents of this run."""
    n = 2**16 if run.tiny else 2**28

    def candidate(what: str, step: Callable[..., Any], donate: bool) -> Candidate:
        def build() -> Steps:
            x = jax.random.normal(jax.random.key(run.seed), (n,), jnp.float32)
            return JaxSteps(step, [x], donate=donate)

        return Candidate({"part": "ceilings", "what": what}, build, 8 * n, seconds=1.0)

    rows = compare(
        run,
        [
            candidate("add one, in place", lambda x: (x + 1,), True),
            candidate("add one", lambda x: (x + 1,), False),
            candidate("copy", lambda x: (jnp.copy(x),), False),
        ],
    )
    if rows:
        run.ceiling = max(row["bytes_per_second"] for row in rows)
        run.write({"part": "ceilings", "what": "ceiling", "bytes_per_second": run.ceiling})
