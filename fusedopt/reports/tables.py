"""The tables of a report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusedopt.reports import backends, contents
from fusedopt.reports.render import Table, count, seconds, size

if TYPE_CHECKING:
    from fusedopt.reports.report import Report

_HOW = {
    "optax": "tx.update(grads, state, params), optax.apply_updates",
    "apply": "tx.apply(grads, state, params)",
    "flat": "tx.apply(grads, state, flat)",
}


def tables(report: Report) -> list[Table]:
    """All of them."""
    return [layout_table(report), memory_table(report), backend_table(report), step_table(report)]


def layout_table(report: Report) -> Table:
    """Regions with their leaves, in memory order."""
    rows = []
    for r in report.regions:
        flags = {"frozen": r.frozen, "decay": r.decays, "trust ratio": r.trust}
        said = ", ".join(name for name, here in flags.items() if here)
        numbers = (r.leaves, r.solo, r.parameters, r.padding)
        rows.append((r.group, r.region, r.dtype, said, *map(count, numbers), size(r.bytes)))
    sums = [
        sum(column) for column in zip(*((r.leaves, r.solo, r.parameters, r.padding, r.bytes) for r in report.regions))
    ]
    rows.append(("all", "", "", "", *map(count, sums[:4]), size(sums[4])))
    packed, solo = (sum(b.solo == wanted for b in report.layout.buckets) for wanted in (False, True))
    groups = len({r.group for r in report.regions})
    notes = [
        f"{_s(len(report.layout.buckets), 'bucket')} in {_s(groups, 'group')}: {count(packed)} packed, {count(solo)} of one "
        "large leaf each (solo)"
    ]
    if carried := len(report.layout.others) - len(report.layout.absent):
        notes.append(
            f"{_s(carried, 'leaf')} besides that {'is' if carried == 1 else 'are'} not floating point: carried along"
        )
    head = ("group", "region", "dtype", "", "leaves", "solo", "parameters", "padding", "bytes")
    return Table("Layout", head, rows, left=4, total=True, notes=notes)


def memory_table(report: Report) -> Table:
    """Bytes of parameters and state, beside optax's."""
    rows = [("parameters", *_memory(report.params_memory), "")]
    for name, m in report.state_memory.items():
        theirs = report.optax_memory.get(name)
        rows.append((name, *_memory(m), "" if theirs is None else size(theirs.bytes)))
    rows.append(("all state", "", "", "", size(report.state_bytes), size(report.optax_bytes)))
    notes = []
    if report.devices > 1:
        notes.append(f"on each of {report.devices} devices: {size(report.device_state_bytes)} of the state")
    notes.append(f"in optax: the state of {report.optax_name} for the leaves that are updated")
    head = ("", "dtype", "buffers", "padding", "bytes", "in optax")
    return Table("Memory", head, rows, left=2, total=True, notes=notes)


def backend_table(report: Report) -> Table:
    """What updates which buckets, and why nothing else does."""
    rows = []
    for c in report.choices:
        lines = [f"{name}: {why}" for name, why in c.reasons.items()]
        rows += [("", "", line) for line in lines]
        rows[-len(lines)] = (c.what, c.backend or "none: it cannot run", lines[0])
    notes = []
    if any(c.backend == "triton" for c in report.choices) and (said := backends.deprecated(report.target)):
        notes.append(said)
    return Table("Backends", ("buckets", "updated by", "not by"), rows, left=3, notes=notes)


def step_table(report: Report) -> Table:
    """What a step costs: known from shapes, and counted if it has been compiled."""

    def row(what: str, n: int) -> tuple[str, ...]:
        return what, size(n), f"{n / report.layout.size:.2f}"

    rows = [row(f"  {name}", n) for name, n in report.needed.items()] if len(report.needed) > 1 else []
    rows = [row("bytes moved, at least", report.needed_bytes), *rows]
    notes = []
    if report.devices > 1:
        notes.append(f"on each of {report.devices} devices; at least: without what is communicated")
    p = report.program
    if p is None:
        notes.append("kernels, and what they move: not counted; `compile` does")
    else:
        if p.accessed is not None:
            rows.append(row("bytes moved, as compiled", p.accessed))
        if p.temporary is not None and p.aliased is not None:
            rows.append(row("temporary memory, as compiled", p.temporary))
            rows.append(row(f"written in place, of {size(p.donated)}", p.aliased))
        if p.kernels is not None:
            makers = ", ".join(f"{count(n)} {name}" for name, n in sorted(p.kernels.items()))
            rows.append(("kernels, as compiled", count(sum(p.kernels.values())), ""))
            notes.append(f"kernels: {makers}, those for scalars and copies included")
        if p.uncountable:
            what = "bytes" if p.kernels is not None else "kernels and bytes"
            notes.append(f"{what} not counted, for the program has: {p.uncountable}")
    expected = report.expected_seconds
    if report.bandwidth is not None and expected is not None:
        speed, way = report.bandwidth
        of_what = "what is moved at least" if p is None or p.accessed is None else "what is moved as compiled"
        rows.append(("time at the speed of a copy", seconds(expected), ""))
        notes.append(
            f"time: of {of_what}; a copy here moves {size(speed)}/s ({way}). Launches and calls come on top, and caches "
            "may save some"
        )
    return Table(f"A step: {_HOW[report.mode]}", ("", "", "bytes a parameter"), rows, notes=notes)


def _memory(m: contents.Memory) -> tuple[str, ...]:
    return ", ".join(m.dtypes), count(m.buffers), size(m.padding), size(m.bytes)


def _s(n: int, word: str) -> str:
    plural = {"leaf": "leaves"}.get(word, f"{word}s")
    return f"{count(n)} {word if n == 1 else plural}"
