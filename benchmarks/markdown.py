"""The README's tables of ratios, from the file of results: `python -m benchmarks.markdown`."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Sequence

from benchmarks import storage
from benchmarks.comparison import Row

RESULTS = pathlib.Path(__file__).parent / "results"

MODES = ("flat", "apply", "update")
HEAD = {"flat": "`FlatParams`", "apply": "`apply`", "update": "optax protocol"}

SECTIONS = {
    "step": ("AdamW step", "optax.adamw"),
    "guarded": ("AdamW step that is skipped where a gradient is not finite", "optax.apply_if_finite(optax.adamw)"),
    "parts": ("The same, clipped and averaged as well", "the same of optax's parts"),
    "lars": ("LARS step", "optax.lars"),
    "train": ("Forward, backward and AdamW step", "optax.adamw"),
}
"""Section -> what is timed, and what the ratios are to."""


def tables(rows: Sequence[Row]) -> str:
    """A table for each section: a line for each case; what is slower than optax is bold."""
    found = {storage.key(row): row for row in rows}
    blocks = []
    for section, (what, rival) in SECTIONS.items():
        cases = list(dict.fromkeys(r["case"] for r in rows if r["section"] == section))
        modes = [m for m in MODES if any((section, case, m) in found for case in cases)]
        if not cases:
            continue
        torch = section == "step" and any("ratio" in found.get((section, c, "torch fused"), {}) for c in cases)
        heads = ["", "arrays", "parameters", *(HEAD[m] for m in modes), *(["`FlatParams` to torch"] if torch else [])]
        lines = [heads, ["---", *(["---:"] * (len(heads) - 1))]]
        for case in cases:
            baseline = found[(section, case, "optax")]
            line = [f"`{case}`", f"{baseline['leaves']:,}", size(baseline["parameters"])]
            line += [cell(ratio(found.get((section, case, mode), {}))) for mode in modes]
            if torch:
                line.append(cell(to_torch(found, section, case)))
            lines.append(line)
        text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        rival = f"`{rival}`" if "optax." in rival else rival
        blocks.append(f"{what}, times as fast as {rival}:\n\n{text}\n")
    return "\n".join(blocks)


def ratio(row: Row) -> float | None:
    """To optax, or to what guards it where there is such a thing."""
    return row.get("against", {}).get("apply_if_finite", row).get("ratio")


def to_torch(found: dict, section: str, case: str) -> float | None:
    ours, theirs = (found.get((section, case, name), {}).get("ratio") for name in ("flat", "torch fused"))
    return None if ours is None or theirs is None else ours / theirs


def cell(value: float | None) -> str:
    if value is None:
        return ""
    text = f"{value:.2f}" if value < 10 else f"{value:.0f}"
    return f"**{text}**" if float(text) < 1 else text


def size(parameters: int) -> str:
    for unit, factor in (("M", 1e6), ("k", 1e3)):
        if parameters >= factor:
            return f"{parameters / factor:.3g}{unit}"
    return str(parameters)


def main(write: Callable[[str], object] = sys.stdout.write) -> int:
    path = RESULTS / storage.name()
    rows = storage.read(path)
    if not rows:
        print(f"no results in {path.name}: run `python -m benchmarks`", file=sys.stderr)
        return 1
    write(tables(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
