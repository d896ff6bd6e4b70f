"""Rows of results: candidates built, checked against the baseline, and timed in turns."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import timing
from benchmarks.dispatch import CALLS
from benchmarks.programs import MissingError, Program, WrongResultError, check

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Setup:
    """How thoroughly to measure.

    Attributes:
        seconds: for the samples of a case.
        rounds: at least.
        sample_seconds: length of a sample.
        compiles: how often a program is compiled where that is what is measured.
        compile_seconds: no further round of compiling that would end later than this.
    """

    seconds: float = 4.0
    rounds: int = timing.ROUNDS
    sample_seconds: float = timing.SAMPLE_SECONDS
    compiles: int = 3
    compile_seconds: float = 30.0


@dataclasses.dataclass
class Comparison:
    """Candidates of one case.

    Attributes:
        labels: what their rows have in common: section, case and size.
        builds: the candidates, the baseline first.
        baselines: the ratio is to the first; the others' ratios go to `against`.
        compiles: rounds of compiling.
        outliers: see `programs.check`.
        dispatch: times how long a call takes to return, instead of whole steps.
    """

    labels: Mapping[str, Any]
    builds: Mapping[str, Callable[[], Any]]
    baselines: Sequence[str] = ("optax",)
    compiles: int = 1
    outliers: float = 0.0
    dispatch: bool = False

    def __post_init__(self):
        self.rows: dict[str, Row] = {name: {**self.labels, "candidate": name} for name in self.builds}
        self.programs: dict[str, Any] = {}

    def prepare(self, setup: Setup) -> None:
        """Builds, compiles and checks. A candidate that cannot be had or is wrong says so in its row."""
        for name, build in self.builds.items():
            self._try(name, lambda name=name, build=build: self.programs.__setitem__(name, build()))
        jitted = {name: p for name, p in self.programs.items() if isinstance(p, Program)}
        for name, program in jitted.items():
            self._try(name, program.trace)  # the first trace of a process pays for more than its own
        stages: dict[str, list[dict[str, float]]] = {name: [] for name in jitted}
        start, done = time.perf_counter(), 0
        while done < self.compiles:
            for name in [name for name in jitted if name in self.programs]:
                self._try(name, lambda name=name: stages[name].append(jitted[name].build()))
            done += 1
            if (time.perf_counter() - start) * (done + 1) / done > setup.compile_seconds:
                break
        self._stage_rows({name: s for name, s in stages.items() if name in self.programs})
        for name, program in list(self.programs.items()):
            self._try(name, lambda program=program: program.run(1))
        if self.baselines[0] in self.programs:
            truth = self.programs[self.baselines[0]].parameters()
            for name in self.rivals():
                self._try(name, lambda name=name: check(self.programs[name].parameters(), truth, self.outliers))

    def rivals(self) -> list[str]:
        return [name for name in self.programs if name != self.baselines[0]]

    def _try(self, name: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except MissingError as why:
            self.rows[name]["skipped"] = str(why)
        except WrongResultError as why:
            self.rows[name]["error"] = str(why)
        except Exception as error:
            # Its text may hold paths of this machine, which have no place in the results.
            print(f"{self.labels['case']}, {name}: {error!r:.500}", file=sys.stderr)
            self.rows[name]["error"] = type(error).__name__
        else:
            return
        self.programs.pop(name, None)

    def _stage_rows(self, stages: Mapping[str, list[dict[str, float]]]) -> None:
        totals = {}
        for name, samples in stages.items():
            for key in samples[0]:
                self.rows[name][key] = float(np.median([s[key] for s in samples]))
            totals[name] = [s["lower_ms"] + s["compile_ms"] for s in samples]
            low, middle, high = timing.quartiles(totals[name])
            self.rows[name] |= {"build_ms": middle, "build_p25_ms": low, "build_p75_ms": high, "builds": len(samples)}
            self.rows[name] |= self.programs[name].memory()
        if (base := totals.get(self.baselines[0])) is not None:
            for name, samples in totals.items():
                figures = timing.ratio(samples, base)
                self.rows[name] |= {f"build_{key}": value for key, value in figures.items()}

    def measure(self, setup: Setup, copies: Mapping[str, Any] | None = None, bytes: int = 0) -> list[Row]:
        """Times what `prepare` has left.

        Args:
            copies: ways to copy, timed in the same rounds.
            bytes: that a step must move, to be compared with the fastest copy.
        """
        samplers, counts = {}, {}
        for name, program in {**self.programs, **(copies or {})}.items():
            if self.dispatch:
                samplers[name], counts[name] = program.dispatch, CALLS
            else:
                counts[name] = timing.steps_a_sample(program.run, setup.sample_seconds)
                samplers[name] = _sampler(program.run, counts[name])
        times = timing.interleave(samplers, setup.seconds, setup.rounds)
        first, *others = self.baselines
        for name in self.programs:
            self.rows[name] |= {**timing.summary(times[name]), "steps_a_sample": counts[name]}
            if first in times:
                self.rows[name] |= {"baseline": first, **timing.ratio(times[name], times[first])}
            against = {other: timing.ratio(times[name], times[other]) for other in others if other in times}
            if against:
                self.rows[name]["against"] = against
        rows = list(self.rows.values())
        return rows + self._copy_rows(times, counts, copies, bytes) if copies else rows

    def _copy_rows(self, times, counts, copies, bytes: int) -> list[Row]:
        rows, rates = [], {}
        for name, copy in copies.items():
            figures = timing.summary(times[name])
            rates[name] = 1e6 * copy.bytes / figures["median_us"]
            row = {**self.labels, "candidate": name, **figures, "steps_a_sample": counts[name]}
            rows.append({**row, "gigabytes_per_second": 1e-9 * rates[name]})
        best = max(rates, key=rates.__getitem__)
        for name in self.programs:
            limits = [c * bytes / copies[best].bytes for c in times[best]]  # what a copy of as many bytes would take
            low, middle, high = timing.quartiles([100 * x / t for t, x in zip(times[name], limits, strict=True)])
            self.rows[name] |= {"percent_of_copy": middle, "percent_of_copy_p25": low, "percent_of_copy_p75": high}
        return rows


def _sampler(run: Callable[[int], Any], count: int) -> timing.Sampler:
    def sample() -> float:
        start = time.perf_counter()
        run(count)
        return (time.perf_counter() - start) / count

    return sample
