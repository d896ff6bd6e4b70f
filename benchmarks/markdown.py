"""Tables of the README and of docs/, from the files of results: `python -m benchmarks.markdown` prints the README's."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Sequence

import fusedopt
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


def packing(rows: Sequence[Row]) -> str:
    """Steps with other `Packing(solo_from=...)` than the default, both modes in a cell: `FlatParams`, `apply`."""
    found = {storage.key(row): row for row in rows}
    here = [r for r in rows if r["section"] == "packing" and r["candidate"].startswith("flat ")]
    cases = list(dict.fromkeys(r["case"] for r in here))

    def both(case: str, solo_from: str) -> str:
        return ", ".join(
            cell(ratio(found.get(("packing", case, f"{mode} {solo_from}"), {}))) for mode in ("flat", "apply")
        )

    body = [
        [f"`{solo_from}`", *(both(case, solo_from) for case in cases)]
        for solo_from in dict.fromkeys(r["candidate"].removeprefix("flat ") for r in here)
    ]
    return table(["`solo_from`", *(f"`{case}`" for case in cases)], body)


def builds(rows: Sequence[Row]) -> str:
    """How many times as fast as optax's the train steps are lowered and compiled."""
    found = {storage.key(row): row for row in rows}
    cases = dict.fromkeys(r["case"] for r in rows if r["section"] == "train")
    modes = ("flat", "apply")
    body = [
        [f"`{case}`", f"{found['train', case, 'optax']['leaves']:,}"]
        + [cell(found.get(("train", case, mode), {}).get("build_ratio")) for mode in modes]
        for case in cases
    ]
    return table(["", "arrays", *(HEAD[mode] for mode in modes)], body)


def compiled(text: str) -> str:
    """Launches, and accesses for each parameter, of a ResNet-50's steps on an H200; ours look for NaN.

    Args:
        text: what `python -m benchmarks.aot` writes.
    """
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    rows = [dict(zip(lines[0], line)) for line in lines[2:]]
    rows = [r for r in rows if (r["target"], r["model"]) == ("h200", "resnet50")]
    found = {(r["rule"], r["mode"], r["packing"], r["has_nan"]): f"{r['launches']}, {r['accesses']}" for r in rows}
    default = f"< {fusedopt.Packing().solo_from}"
    columns = {"flat": ("flat", default), "packed": ("flat", "all"), "apply": ("apply", default)}
    heads = ["", HEAD["flat"], HEAD["flat"] + ", everything packed", HEAD["apply"], "optax"]
    body = [
        [f"`{rule}`", *(found[rule, *column, "yes"] for column in columns.values()), ""]
        for rule in dict.fromkeys(r["rule"] for r in rows if r["rule"] != "optax")
    ]
    body[0][-1] = found["optax", "", "", "no"]  # of AdamW, the first rule
    return table(heads, body)


def table(heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---", *(["---:"] * (len(heads) - 1))], *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


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
