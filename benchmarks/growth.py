"""What the number of arrays costs: dispatch, and how a step, its call and its compilation grow."""

from __future__ import annotations

from benchmarks import cases, peers, timing
from benchmarks.comparison import Comparison, Row, Setup

TREES_UP_TO = 1000
"""Leaves up to which the programs over trees are compiled here: beyond, XLA takes minutes."""

MODES = ("optax", "flat", "apply")


def _comparison(section: str, leaves: int, shape: tuple[int, ...], setup: Setup) -> Comparison:
    tree = cases.Tree(cases.equal_leaves(leaves, *shape))
    labels = {"section": section, "case": f"leaves_{leaves}", "leaves": leaves, "parameters": tree.parameters}
    builds = peers.builders(tree, names=MODES)
    return Comparison(labels, builds, compiles=1 if section == "dispatch" else setup.compiles)


def dispatch(leaves: int, setup: Setup) -> list[Row]:
    """Arrays of 32 elements, so that there is next to nothing to compute."""
    comparison = _comparison("dispatch", leaves, (4, 8), setup)
    comparison.dispatch = True
    comparison.prepare(setup)
    return comparison.measure(setup)


def growth(leaves: int, setup: Setup) -> list[Row]:
    """Steps, calls and stages of arrays of 1,000 elements. Large trees are only traced and lowered, not compiled."""
    comparison = _comparison("growth", leaves, (25, 40), setup)
    lowered_only = []
    if leaves > TREES_UP_TO:
        lowered_only = [_lowered(comparison, mode) for mode in MODES if mode != "flat"]
        comparison.builds = {"flat": comparison.builds["flat"]}
        comparison.rows = {"flat": comparison.rows["flat"]}
    comparison.prepare(setup)
    rows = comparison.measure(setup)
    calls = timing.interleave({n: p.dispatch for n, p in comparison.programs.items()}, setup.seconds / 2, setup.rounds)
    for row in rows:
        if row["candidate"] not in calls:
            continue
        row["ns_per_parameter"] = 1e3 * row["median_us"] / row["parameters"]
        low, middle, high = timing.quartiles(calls[row["candidate"]])
        row |= {"dispatch_us": 1e6 * middle, "dispatch_p25_us": 1e6 * low, "dispatch_p75_us": 1e6 * high}
        if "optax" in calls:
            figures = timing.ratio(calls[row["candidate"]], calls["optax"])
            row |= {f"dispatch_{key}": value for key, value in figures.items()}
    return rows + lowered_only


def _lowered(comparison: Comparison, mode: str) -> Row:
    program = comparison.builds[mode]()
    program.trace()
    stages = program.build(compiles=False)
    return {**comparison.rows[mode], **stages, "skipped": f"compiled up to {TREES_UP_TO} leaves only"}
