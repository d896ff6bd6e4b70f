"""Tables as text, for rich and as HTML: one description, three looks. Rich is optional."""

from __future__ import annotations

import dataclasses
import html
import io
import shutil
from collections.abc import Sequence
from typing import Any

MIN_WIDTH = 100
"""Columns of text where no terminal says how many it has."""


@dataclasses.dataclass(frozen=True)
class Table:
    """A title, rows of text under a head, and remarks.

    Attributes:
      left: of the columns, those that hold words; the others hold numbers.
      total: whether the last row sums the others up.
      notes: a line each, below.
    """

    title: str
    head: tuple[str, ...] = ()
    rows: Sequence[tuple[str, ...]] = ()
    left: int = 1
    total: bool = False
    notes: Sequence[str] = ()


def text(heading: str, tables: Sequence[Table]) -> str:
    """Through rich if it is installed, otherwise plain; without colours."""
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        return plain(heading, tables)
    width = max(shutil.get_terminal_size((MIN_WIDTH, 24)).columns, MIN_WIDTH)
    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(rich(heading, tables))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def plain(heading: str, tables: Sequence[Table]) -> str:
    """Aligned columns of text."""
    lines = [heading]
    for table in tables:
        lines += ["", table.title]
        rows = [*([table.head] if any(table.head) else []), *table.rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = [c.ljust(w) if i < table.left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))]
            lines.append("  " + "  ".join(cells).rstrip())
        lines += [f"  {note}" for note in table.notes]
    return "\n".join(lines)


def rich(heading: str, tables: Sequence[Table]) -> Any:
    """A renderable for a `rich.console.Console`."""
    from rich import box
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table as RichTable
    from rich.text import Text

    parts: list[Any] = [Text(heading, style="bold")]
    for table in tables:
        parts += [Text(""), Text(table.title, style="bold cyan")]
        if table.rows:
            drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_header=any(table.head))
            for i, name in enumerate(table.head):
                drawn.add_column(Text(name), justify="left" if i < table.left else "right", overflow="fold")
            for i, row in enumerate(table.rows):
                last = table.total and i == len(table.rows) - 1
                if last:
                    drawn.add_section()
                drawn.add_row(*map(Text, row), style="bold" if last else "")
            parts.append(drawn)
        parts += [Padding(Text(note, style="dim"), (0, 0, 0, 2)) for note in table.notes]
    return Group(*parts)


def as_html(heading: str, tables: Sequence[Table]) -> str:
    """A fragment for notebooks; it needs no style sheet."""
    parts = [f"<p><b>{html.escape(heading)}</b></p>"]
    for table in tables:
        if table.rows:
            parts.append(f"<table><caption style='text-align:left'><b>{html.escape(table.title)}</b></caption>")
            head = _html_row("th", table.head, table.left) if any(table.head) else ""
            parts.append(f"<thead>{head}</thead><tbody>")
            parts += [
                _html_row("th" if table.total and row is table.rows[-1] else "td", row, table.left)
                for row in table.rows
            ]
            parts.append("</tbody></table>")
        else:
            parts.append(f"<p><b>{html.escape(table.title)}</b></p>")
        parts += [f"<p>{html.escape(note)}</p>" for note in table.notes]
    return f"<div>{''.join(parts)}</div>"


def _html_row(tag: str, cells: Sequence[str], left: int) -> str:
    drawn = (
        f"<{tag} style='text-align:{'left' if i < left else 'right'}'>{html.escape(c)}</{tag}>"
        for i, c in enumerate(cells)
    )
    return f"<tr>{''.join(drawn)}</tr>"


def count(n: int) -> str:
    return f"{n:,}"


def size(n: float) -> str:
    """Bytes with three digits, in powers of 1000: 999 B, 1.02 kB, 204 MB."""
    return _scaled(n, ("B", "kB", "MB", "GB", "TB"))


def seconds(x: float) -> str:
    """A time with three digits: 3.25 µs, 41.0 ms."""
    return _scaled(1e9 * x, ("ns", "µs", "ms", "s"))


def _scaled(x: float, units: Sequence[str]) -> str:
    unit = 0
    while unit < len(units) - 1 and float(f"{x:.3g}") >= 1000:
        x, unit = x / 1000, unit + 1
    if unit == 0 and float(x).is_integer():
        return f"{x:.0f} {units[0]}"
    digits = max(0, 2 - len(str(int(float(f"{x:.3g}")))) + 1)
    return f"{x:.{digits}f} {units[unit]}"
