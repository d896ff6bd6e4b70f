"""Two pictures of a report: where every leaf lies, and how much memory the optimizer holds beside optax."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Patch

from fusedopt.grouping import REGIONS
from fusedopt.layout import Bucket, FlatLayout
from fusedopt.paths import show
from fusedopt.reports.contents import FRONT
from fusedopt.reports.render import count, size

if TYPE_CHECKING:
    from fusedopt.reports.report import Report

# Okabe and Ito: told apart without a sense of red and green.
REGION_COLOURS: dict[str, str] = dict(
    zip(REGIONS, ("#e69f00", "#f0e442", "#d55e00", "#0072b2", "#cc79a7", "#56b4e9"), strict=True)
)
PADDING = "#c8c8c8"
# None of the colours above: the two pictures share nothing but grey.
MEMORY_COLOURS = {
    "mu": "#3b4a6b",
    "nu": "#8c9bbd",
    "ema": "#4f8a6d",
    "master": "#b08b57",
    "accumulated": "#8d6a94",
    FRONT: "#6b6b6b",
    "scalars": "#1a1a1a",
}
UNITS = ("B", "kB", "MB", "GB", "TB")

CELLS_A_LINE = 120
"""Leaves that a line of the map has room for."""

MOST_LINES, MOST_STRIPS = 12, 24
"""Of a strip; of the map. What is beyond is named, not drawn."""

LEGEND = {"fontsize": 8, "frameon": False, "borderaxespad": 0.2, "borderpad": 0.2, "handlelength": 1.4}


class Strip(NamedTuple):
    """Buckets in a row: a packed one, or all large leaves of a group and dtype, each a bucket of its own.

    Attributes:
      label: what stands beside it.
      cells: (elements, region, or None for padding) in memory order.
      lines: over which it is wrapped.
    """

    label: str
    cells: list[tuple[int, str | None]]
    lines: int


class Shown(Figure):
    """A Figure that a notebook shows without the help of pyplot."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


def draw(report: Report, figure: Figure | SubFigure | None = None) -> Any:
    """The map of the layout above, the memory of the state below.

    The map has a strip for each packed bucket, and one for the large leaves of a group. A cell is a leaf, as wide as it
    has elements; its colour is its region. Strips have scales of their own: beside each stands how long it is.

    Args:
      figure: to draw into; None makes one.

    Raises:
      TypeError: `figure` is neither a Figure nor a SubFigure.
    """
    if figure is not None and not isinstance(figure, (Figure, SubFigure)):
        raise TypeError(f"`figure`: expected a matplotlib Figure or SubFigure, got {type(figure).__name__}")
    strips = _strips(report.layout)
    hidden, strips = strips[MOST_STRIPS:], strips[:MOST_STRIPS]
    bars = [("fusedopt", report.state_memory), (report.optax_name, report.optax_memory)]
    heights = [0.75 + sum(0.22 + 0.2 * s.lines for s in strips), 0.95 + 0.3 * len(bars)]
    if figure is None:
        figure = Shown(figsize=(10, sum(heights) + 0.3), dpi=110, layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=heights)
    _map(upper, strips, report)
    if hidden:
        leaves = sum(region is not None for s in hidden for _, region in s.cells)
        upper.set_xlabel(f"and {len(hidden)} more strips with {count(leaves)} leaves", fontsize=8)
    _memory(lower, bars)
    return figure


def _strips(layout: FlatLayout) -> list[Strip]:
    found: dict[tuple, list[Bucket]] = {}
    for i, b in enumerate(layout.buckets):
        key = (b.group, b.dtype, b.decays, b.trust, b.frozen, "solo") if b.solo else (i,)
        found.setdefault(key, []).append(b)
    return [_strip(layout, buckets) for buckets in found.values()]


def _strip(layout: FlatLayout, buckets: Sequence[Bucket]) -> Strip:
    first, cells = buckets[0], []
    for b in buckets:
        end = 0
        for s in layout.segments_of(b):
            cells += [(s.offset - end if not b.solo else 0, None), (s.size, s.region)]
            end = s.offset + s.size
        cells.append((b.size - end if not b.solo else 0, None))
    cells = [(n, region) for n, region in cells if n]
    leaves = sum(b.last - b.first for b in buckets)
    total = sum(b.size for b in buckets) * first.dtype.itemsize
    kind = "1 leaf" if leaves == 1 else f"{count(leaves)} leaves"
    name = first.name
    if first.solo:
        name, kind = f"{first.group}.{first.dtype}", f"{count(leaves)} solo"
        if leaves == 1:
            name, kind = _shortened(show(layout.segments_of(first)[0].path)), "solo"
    notes = [kind, size(total)] + (["frozen"] if first.frozen else [])
    return Strip(
        f"{_shortened(name)}\n{', '.join(notes)}",
        cells,
        min(MOST_LINES, math.ceil(len(cells) / CELLS_A_LINE)),
    )


def _shortened(name: str, most: int = 26) -> str:
    return name if len(name) <= most else f"…{name[1 - most :]}"


def _map(axis: Any, strips: Sequence[Strip], report: Report) -> None:
    top, ticks, labels = 0.0, [], []
    shapes: dict[str | None, list] = {}
    for strip in strips:
        height = float(strip.lines)
        total = sum(n for n, _ in strip.cells)
        line = total / strip.lines
        at = 0.0
        for n, region in strip.cells:
            start, end = at, at + n
            while start < end - 1e-9 * total:  # a cell may go on in the next line
                row = min(int(start / line + 1e-9), strip.lines - 1)
                stop = min(end, (row + 1) * line)
                left, right, y = (start - row * line) / line, (stop - row * line) / line, top + row
                shapes.setdefault(region, []).append([(left, y), (right, y), (right, y + 0.92), (left, y + 0.92)])
                start = stop
            at = end
        ticks.append(top + (height - 0.08) / 2)
        labels.append(strip.label)
        top += height + 1.1
    for region, corners in shapes.items():
        colour = PADDING if region is None else REGION_COLOURS[region]
        # An edge takes a quarter of a narrow cell, or edges would be all one sees.
        edges = [min(0.7, 150 * (c[1][0] - c[0][0])) for c in corners]
        axis.add_collection(
            PolyCollection(corners, facecolors=colour, edgecolors="white", linewidths=edges, snap=False)
        )
    axis.set_xlim(0, 1)
    axis.set_ylim(top - 1.0, -0.15)
    axis.set_yticks(ticks, labels, fontsize=8)
    axis.tick_params(axis="y", length=0)
    axis.set_xticks([])
    for side in axis.spines.values():
        side.set_visible(False)
    used = [region for region in REGIONS if region in shapes]
    handles = [Patch(facecolor=REGION_COLOURS[region], label=region) for region in used]
    if None in shapes:
        handles.append(Patch(facecolor=PADDING, label="padding"))
    axis.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(handles), **LEGEND)
    axis.set_title(
        f"{report.heading}; buckets: {count(len(report.layout.buckets))}, each strip on its own scale",
        fontsize=10,
        pad=22,
        loc="left",
    )


def _memory(axis: Any, bars: Sequence[tuple[str, Any]]) -> None:
    totals = [sum(m.bytes for m in memory.values()) for _, memory in bars]
    largest = max(*totals, 1)
    power = min(len(UNITS) - 1, int(math.log10(largest)) // 3)
    scale = 1000**power
    drawn: dict[str, Any] = {}
    amounts: dict[str, list[int]] = {}
    for y, (_, memory) in enumerate(bars):
        left = 0.0
        for name, m in memory.items():
            for part, amount in ((name, m.bytes - m.padding), ("padding", m.padding)):
                if amount:
                    colour = PADDING if part == "padding" else MEMORY_COLOURS[part]
                    bar = axis.barh(
                        y, amount / scale, 0.62, left / scale, color=colour, edgecolor="white", linewidth=0.5
                    )
                    drawn.setdefault(part, bar)
                    amounts.setdefault(part, []).append(amount)
                    left += amount
        axis.annotate(size(totals[y]), (left / scale, y), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axis.set_yticks(range(len(bars)), [name for name, _ in bars], fontsize=8)
    axis.set_ylim(len(bars) - 0.5, -0.5)
    axis.set_xlim(0, 1.12 * largest / scale)
    axis.tick_params(axis="x", labelsize=8)
    axis.set_xlabel(f"optimizer state, {UNITS[power]}", fontsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    # Padding of 8 kB beside 200 MB is not to be seen, and needs no name.
    wide = {name: bar for name, bar in drawn.items() if max(amounts[name]) >= largest / 500}
    if "padding" in wide:
        wide["padding"] = wide.pop("padding")  # last
    if wide:
        axis.legend(wide.values(), wide.keys(), loc="lower left", bbox_to_anchor=(0, 1), ncols=len(wide), **LEGEND)
