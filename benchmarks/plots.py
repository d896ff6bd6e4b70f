"""Two pictures of the rows: ratios of all cases, and how cost grows with the number of arrays."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from benchmarks.comparison import Row

COLOURS = {
    "optax": "#555555",
    "flat": "#0072b2",
    "apply": "#009e73",
    "update": "#e69f00",
    "apply_if_finite": "#56b4e9",
    "optax.flatten": "#cc79a7",
    "torch fused": "#d55e00",
    "torch foreach": "#f0a070",
}
"""Of the candidates, the same in all plots; readable without a sense of red and green (Okabe and Ito)."""

TITLES = {
    "step": "step",
    "guarded": "step, guarded against NaN",
    "parts": "guarded, clipped, averaged",
    "lars": "LARS step",
    "train": "whole train step",
}


def draw(rows: Sequence[Row], folder: pathlib.Path, subtitle: str) -> list[pathlib.Path]:
    """Draws what there are rows for. The files written."""
    figures = {"step-ratios.png": ratios(rows, subtitle), "growth.png": growth(rows, subtitle)}
    written = []
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        if figure is not None:
            # Agg by name: the plots look the same on a machine with a screen and without.
            FigureCanvasAgg(figure).print_figure(folder / name, dpi=130)
            written.append(folder / name)
    return written


def ratios(rows: Sequence[Row], subtitle: str) -> Figure | None:
    """A bar for each candidate but the baseline, with the middle half of the rounds; a line at 1, where optax is.

    Twice as fast and half as fast are equally long bars.
    """
    timed = [r for r in rows if r["section"] in TITLES and "ratio" in r and r["candidate"] != r["baseline"]]
    sections = [s for s in TITLES if any(r["section"] == s for r in timed)]
    if not sections:
        return None
    cases = {s: list(dict.fromkeys(r["case"] for r in timed if r["section"] == s)) for s in sections}
    bars = {s: len({r["candidate"] for r in timed if r["section"] == s}) for s in sections}
    # As thick a bar in every panel.
    heights = [0.6 + len(cases[s]) * (0.15 + 0.09 * bars[s]) for s in sections]
    figure = Figure(figsize=(9, 1 + sum(heights)), layout="constrained")
    axes = figure.subplots(len(sections), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, section in zip(axes, sections, strict=True):
        names = [c for c in COLOURS if any(r["section"] == section and r["candidate"] == c for r in timed)]
        height = 0.8 / len(names)
        for i, name in enumerate(names):
            found = {r["case"]: r for r in timed if r["section"] == section and r["candidate"] == name}
            here = [(j, found[case]) for j, case in enumerate(cases[section]) if case in found]
            values = [r["ratio"] for _, r in here]
            # The median lies between the quartiles but for rounding.
            errors = [
                [max(0.0, r["ratio"] - r["ratio_p25"]) for _, r in here],
                [max(0.0, r["ratio_p75"] - r["ratio"]) for _, r in here],
            ]
            at = [j + (i - (len(names) - 1) / 2) * height for j, _ in here]
            widths = [v - 1 for v in values]  # bars begin at optax
            axis.barh(
                at, widths, height, 1.0, xerr=errors, color=COLOURS[name], label=name, error_kw={"elinewidth": 0.8}
            )
        axis.axvline(1.0, color="black", linewidth=1)
        axis.set_xscale("log")
        low, high = axis.get_xlim()
        axis.set_xlim(min(low, 0.5), max(high, 2.0))
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_yticks(range(len(cases[section])), cases[section], fontsize=8)
        axis.set_ylim(len(cases[section]) - 0.4, -0.6)
        rival = {"lars": "optax.lars", "parts": "the same of optax's parts"}.get(section, "optax.adamw")
        axis.set_title(f"{TITLES[section]}, times as fast as {rival}", fontsize=10)
        axis.grid(axis="x", alpha=0.3)
        axis.set_axisbelow(True)
        axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.suptitle(f"Right of the line: faster than optax under jit, donated. Left: slower.\n{subtitle}", fontsize=9)
    return figure


def growth(rows: Sequence[Row], subtitle: str) -> Figure | None:
    """Step, call and compilation over the number of leaves, both axes logarithmic."""
    grown = [r for r in rows if r["section"] == "growth"]
    if not grown:
        return None
    panels = (
        ("step, ns per parameter", lambda r: r.get("ns_per_parameter")),
        ("until the call returns, µs", lambda r: r.get("dispatch_us")),
        ("lower and compile, s", lambda r: 1e-3 * r["build_ms"] if "build_ms" in r else None),
    )
    figure = Figure(figsize=(12, 4), layout="constrained")
    for axis, (title, value) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for name in ("optax", "flat", "apply"):
            points = sorted((r["leaves"], y) for r in grown if r["candidate"] == name and (y := value(r)) is not None)
            if points:
                axis.plot(*zip(*points), marker="o", color=COLOURS[name], label=name)
        axis.set(xscale="log", yscale="log", xlabel="leaves of 1,000 elements")
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
        for scale in (axis.xaxis, axis.yaxis):
            scale.set_major_locator(LogLocator(subs=(1, 2, 5)))
            scale.set_major_formatter("{x:g}")
            scale.set_minor_formatter(NullFormatter())
        axis.legend(fontsize=8)
    figure.suptitle(subtitle, fontsize=9)
    return figure
