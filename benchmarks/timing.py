"""Times of candidates that take turns, and the ratios between them.

On a shared machine the speed changes from second to second, so times taken after one another cannot be compared. Here
the candidates take turns, A B C, C B A, A B C, and each round gives one ratio of times that were taken next to each
other. The ratio reported is the median of these, not the ratio of the medians.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

SAMPLE_SECONDS = 0.02
"""How long a sample should last: far longer than what the clock and the wait at its end cost."""

ROUNDS, MOST_ROUNDS = 9, 400

Sampler = Callable[[], float]
"""Takes one sample: the seconds of one step."""


def steps_a_sample(
    run: Callable[[int], object], seconds: float = SAMPLE_SECONDS, clock: Callable[[], float] = time.perf_counter
) -> int:
    """How many steps last about `seconds`, at least 1. `run(n)` takes n steps and waits for the last one."""
    run(1)  # the first may set something up
    start = clock()
    run(1)
    once = clock() - start
    if once >= seconds / 2:
        return 1
    few = max(1, min(10, int(seconds / max(once, 1e-9))))
    start = clock()
    run(few)
    return max(1, round(seconds * few / max(clock() - start, 1e-9)))


def interleave(
    samplers: Mapping[str, Sampler],
    seconds: float,
    rounds: int = ROUNDS,
    most: int = MOST_ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Samples of each candidate, one in each round: the i-th samples of all were taken next to each other.

    Args:
        samplers: the candidates by name.
        seconds: to go on for, once there are `rounds` rounds; `most` rounds end it earlier.
    """
    times: dict[str, list[float]] = {name: [] for name in samplers}
    order = list(samplers)
    start, done = clock(), 0
    while done < rounds or (done < most and clock() - start < seconds):
        # Each second round runs backwards: what a candidate leaves in the caches is not always there for the same one.
        for name in order if done % 2 == 0 else reversed(order):
            times[name].append(samplers[name]())
        done += 1
    return times


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """The 25th percentile, the median and the 75th percentile."""
    low, middle, high = np.percentile(samples, (25, 50, 75))
    return float(low), float(middle), float(high)


def summary(samples: Sequence[float]) -> dict[str, float | int]:
    """What a row says of the seconds of one candidate. `spread` is the width of the middle half over the median."""
    low, middle, high = quartiles(samples)
    return {
        "median_us": 1e6 * middle,
        "p25_us": 1e6 * low,
        "p75_us": 1e6 * high,
        "spread": (high - low) / middle if middle else 0.0,
        "samples": len(samples),
    }


def ratio(samples: Sequence[float], baseline: Sequence[float]) -> dict[str, float]:
    """How many times faster than the baseline, round by round: above 1 is faster, 0.5 takes twice as long."""
    low, middle, high = quartiles([b / s for s, b in zip(samples, baseline, strict=True)])
    return {"ratio": middle, "ratio_p25": low, "ratio_p75": high}
