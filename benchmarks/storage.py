"""The file of results: a header that says what was measured with what, and one object a row."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from benchmarks.comparison import Row

PACKAGES = ("jax", "jaxlib", "optax", "flax", "numpy", "torch")

ABOUT = (
    "median_us, p25_us, p75_us: of the samples, each of steps_a_sample steps. spread: (p75 - p25) / median. ratio: how many "
    "times faster than the baseline, the median of the rounds' ratios: below 1 is slower. against: the same to other "
    "baselines. trace_ms, lower_ms, compile_ms: medians; build: lower and compile. percent_of_copy: of the speed at which "
    "the fastest copy moved memory in the same rounds. Made by `python -m benchmarks`."
)


def header() -> dict[str, Any]:
    """The environment, without anything that names the machine or its owner."""
    return {
        "about": ABOUT,
        **{name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "architecture": platform.machine(),
        "device": jax.default_backend(),
        "cpus": os.cpu_count(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def name(version: str = jax.__version__) -> str:
    return f"cpu-jax-{version}.json"


def key(row: Row) -> tuple[str, str, str]:
    return row["section"], row["case"], row["candidate"]


def merge(old: Iterable[Row], new: Sequence[Row]) -> list[Row]:
    """New rows take the place of old ones of the same section, case and candidate; the others stay, in their order."""
    merged = {key(row): row for row in old}
    merged.update({key(row): row for row in new})
    return list(merged.values())


def read(path: pathlib.Path) -> list[Row]:
    """The rows of a file, whatever they were measured with; none if there is no file."""
    return json.loads(path.read_text())["rows"] if path.exists() else []


def load(path: pathlib.Path) -> list[Row]:
    """The rows of a file, none if it was measured in another environment: its times are not comparable with ours."""
    if not path.exists():
        return []
    document = json.loads(path.read_text())
    return document["rows"] if _environment(document["header"]) == _environment(header()) else []


def _environment(head: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in head.items() if k != "about"}


def save(path: pathlib.Path, rows: Sequence[Row]) -> list[Row]:
    """Merges rows into the file. All rows that it holds then."""
    now = datetime.datetime.now(datetime.UTC).date().isoformat()
    merged = merge(load(path), [{**row, "date": now} for row in rows])
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"header": header(), "rows": [_rounded(row) for row in merged]}, indent=1, allow_nan=False)
    path.write_text(text + "\n")
    return merged


def _rounded(value: Any) -> Any:
    """Five digits: more would be noise."""
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value
