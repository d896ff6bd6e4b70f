"""Rows of results: written as they come, one JSON object a line, so that a run that is cut short keeps what it has."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import pathlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# In every row, null where it has no meaning.
LABELS = ("part", "what", "model", "rule", "mode", "backend")
VALUES = ("median_us", "p25_us", "p75_us", "ratio", "bytes", "percent_of_ceiling", "error")

RESERVE = 2.0
"""Seconds that a row is supposed to take if nothing else is known."""


class Run:
    """One run: where its rows go, how much time it has left, and what its parts tell each other.

    Attributes:
        tiny: small sizes and few repetitions, to see that everything runs.
        seed: of all random numbers.
        models: those that `optimizers` takes, all of its own if empty.
        ceiling: bytes a second of the fastest copy, None until measured.
    """

    def __init__(
        self, path: pathlib.Path, budget: float, *, tiny: bool = False, seed: int = 0, models: Sequence[str] = ()
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.tiny, self.seed, self.models = tiny, seed, tuple(models)
        self.ceiling: float | None = None
        self.started = time.monotonic()
        self.deadline = self.part_deadline = self.started + budget

    def left(self) -> float:
        """Seconds left to the part in progress."""
        return min(self.deadline, self.part_deadline) - time.monotonic()

    def give(self, share: float) -> None:
        """Begins a part that may use this share of the time left."""
        now = time.monotonic()
        self.part_deadline = now + share * max(self.deadline - now, 0.0)

    def write(self, row: Mapping[str, Any]) -> None:
        row = {**dict.fromkeys((*LABELS, *VALUES)), **row, "at": round(time.monotonic() - self.started, 2)}
        with self.path.open("a") as file:
            file.write(json.dumps(_plain(row), allow_nan=False) + "\n")
        if row["error"]:
            print(f"failed: {_name(row)}: {row['error']}", flush=True)

    def skip(self, labels: Mapping[str, Any], why: str) -> None:
        self.write({**labels, "skipped": why})

    def fail(self, labels: Mapping[str, Any], error: Exception) -> None:
        self.write({**labels, "error": f"{type(error).__name__}: {str(error)[:300]}"})

    def affords(self, labels: Mapping[str, Any], seconds: float = RESERVE) -> bool:
        """Whether there is time for a row that takes about `seconds`; if not, the row says so."""
        left = self.left()
        if left < seconds:
            self.skip(labels, f"takes about {seconds:.0f} s, {max(left, 0):.0f} s are left")
        return left >= seconds

    def attempt(self, labels: Mapping[str, Any], measure: Callable[[], Any], seconds: float = RESERVE) -> Any:
        """`measure()`, its result written as a row if it is a dict; None if there was no time or it failed.

        Whatever a row raises is recorded and ends that row alone.
        """
        if not self.affords(labels, seconds):
            return None
        try:
            result = measure()
        except Exception as error:
            self.fail(labels, error)
            return None
        if isinstance(result, dict):
            self.write({**labels, **result})
        return result


def _plain(value: Any) -> Any:
    """What JSON can hold: it has no NaN and no infinity."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def header(kind: str, seed: int) -> dict[str, Any]:
    """What the rows behind it were measured on."""
    packages = ("jax", "jaxlib", "numpy", "optax", "flax", "torch")
    now = datetime.datetime.now(datetime.UTC)
    return {
        "part": "run",
        "device": kind,
        "date": now.isoformat(timespec="seconds"),
        "seed": seed,
        **{name: version(name) for name in packages},
    }


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def slug(kind: str) -> str:
    """A device kind as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")


def read(path: pathlib.Path, offset: int = 0) -> list[dict[str, Any]]:
    """The rows of a file from a byte offset on; a last line that was cut off is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_bytes()[offset:].decode().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def failed(row: Mapping[str, Any]) -> bool:
    """Whether a row says that the library computes something wrong, or could not compute it."""
    return row["part"] == "correctness" and (bool(row["error"]) or row.get("ok") is False)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The end of a run in plain text: the times, those compared with each other under one heading, and what failed."""
    head = ("", "mode", "backend", "us", "ratio", "% of copy", "host us")
    groups: dict[str, list[tuple[str, ...]]] = {}
    for r in rows:
        if r["median_us"] is None:
            continue
        numbers = (r["median_us"], r["ratio"], r["percent_of_ceiling"], r.get("host_us"))
        shown = ("" if x is None else f"{x:.{d}f}" for x, d in zip(numbers, (1, 3, 1, 1), strict=True))
        heading = _name(r, ("part", "model", "rule"))
        groups.setdefault(heading, []).append((*(r[k] or "" for k in ("what", "mode", "backend")), *shown))
    lines = [head, *(line for group in groups.values() for line in group)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def aligned(line):
        cells = (x.ljust(w) if i < 3 else x.rjust(w) for i, (x, w) in enumerate(zip(line, widths, strict=True)))
        return "  " + "  ".join(cells).rstrip()

    text = []
    if groups:
        text = [aligned(head)]
        for heading, group in groups.items():
            text += [heading, *map(aligned, group)]
        text.append("ratio: to optax, in `tuning` to plain XLA; host us: how long the host took to hand a step over")
    checks = [r for r in rows if r["part"] == "correctness" and ("ok" in r or r["error"])]
    bad = [r for r in checks if failed(r)]
    text.append(f"correctness: {len(checks) - len(bad)} of {len(checks)} rows are right")
    text += [f"  wrong: {_name(r)} {r.get('measured', '')} {(r['error'] or '')[:120]}".rstrip() for r in bad]
    text += [f"  failed: {_name(r)} {r['error'][:120]}" for r in rows if r["error"] and r not in bad]
    text.append(f"{sum('skipped' in r for r in rows)} rows were skipped")
    return "\n".join(text)


def _name(row: Mapping[str, Any], keys: Sequence[str] = LABELS) -> str:
    return " ".join(str(row[k]) for k in keys if row[k] is not None)
