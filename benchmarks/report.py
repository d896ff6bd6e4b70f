"""Rows as tables for the terminal, one for each section: what is slower than optax is shown like what is faster."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from benchmarks.comparison import Row
from benchmarks.sections import ABOUT

COLUMNS = ("case", "leaves", "candidate", "median", "spread", "times as fast", "middle half")


def tables(rows: Sequence[Row]) -> list[Table]:
    """Without candidates of which there is no figure at all: see `missing`."""
    rows = [r for r in rows if "skipped" not in r or "trace_ms" in r]
    return [_table(section, here) for section in ABOUT if (here := [r for r in rows if r["section"] == section])]


def missing(rows: Sequence[Row]) -> list[str]:
    """A line for each candidate that could not be had."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if "skipped" in row and "trace_ms" not in row:
            reasons.setdefault((row["candidate"], row["skipped"]), []).append(row["case"])
    return [f"not measured: {name} on {', '.join(cases)}: {why}" for (name, why), cases in reasons.items()]


def _extra(rows: Sequence[Row]) -> list[str]:
    """Columns that only some sections have."""
    extra = []
    if any("against" in row for row in rows):
        extra.append("as apply_if_finite")
    if any("percent_of_copy" in row for row in rows):
        extra.append("% of copy")
    if any("dispatch_us" in row for row in rows):
        extra += ["ns/parameter", "call", "call times as fast"]
    return [*extra, "trace", "lower", "compile", "build times as fast", "temp MB"]


def _table(section: str, rows: Sequence[Row]) -> Table:
    extra = _extra(rows)
    table = Table(title=f"{section}: {ABOUT[section]}", title_justify="left")
    for column in (*COLUMNS, *extra):
        table.add_column(column, justify="left" if column in ("case", "candidate") else "right")
    before = None
    for row in rows:
        if before not in (None, row["case"]):
            table.add_section()
        first, before = before != row["case"], row["case"]
        name = [row["case"] if first else "", str(row["leaves"]) if first else "", row["candidate"]]
        table.add_row(*name, *_figures(row), *(_cell(row, column) for column in extra))
    return table


def _figures(row: Row) -> list[Text | str]:
    if "error" in row:
        return [Text(row["error"], style="bold red"), "", "", ""]
    if "median_us" not in row:
        return [Text(row.get("skipped", ""), style="dim"), "", "", ""]
    figures: list[Text | str] = [duration(row["median_us"]), f"{100 * row['spread']:.0f}%"]
    if "gigabytes_per_second" in row:
        return [*figures, f"{row['gigabytes_per_second']:.1f} GB/s", ""]
    if "ratio" not in row:
        return [*figures, "", ""]
    return [*figures, ratio(row["ratio"], row), f"{row['ratio_p25']:.2f} to {row['ratio_p75']:.2f}"]


def _cell(row: Row, column: str) -> Text | str:
    if column == "as apply_if_finite":
        figures = row.get("against", {}).get("apply_if_finite")
        return "" if figures is None else ratio(figures["ratio"], row, "apply_if_finite")
    if column in ("call times as fast", "build times as fast"):
        value = row.get("dispatch_ratio" if column.startswith("call") else "build_ratio")
        return "" if value is None else ratio(value, row)
    if column == "call":
        return duration(row["dispatch_us"]) if "dispatch_us" in row else ""
    if column in ("trace", "lower", "compile"):
        return duration(1e3 * row[f"{column}_ms"]) if f"{column}_ms" in row else ""
    keys = {"% of copy": ("percent_of_copy", 1, 0), "ns/parameter": ("ns_per_parameter", 1, 3)}
    name, unit, digits = keys.get(column, ("temp_bytes", 1e6, 2))
    return f"{row[name] / unit:.{digits}f}" if name in row else ""


def duration(microseconds: float) -> str:
    """With the unit that gives one to three digits before the point."""
    for unit, factor in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= factor:
            return f"{microseconds / factor:.3g} {unit}"
    return f"{microseconds:.3g} µs"


def ratio(value: float, row: Row, baseline: str = "optax") -> Text:
    """Green is faster, red is slower; the baseline itself has no colour."""
    style = "" if row["candidate"] == baseline else "green" if value > 1 else "red"
    return Text(f"{value:.2f}", style=style)
