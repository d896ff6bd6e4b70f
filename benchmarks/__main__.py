"""Measures steps on this machine's CPU beside optax and PyTorch: `python -m benchmarks`.

Prints a table for each section, and saves `cpu-jax-VERSION.json` and two plots. A part that is measured again, with
--only or --model, replaces its rows in the file and leaves the others.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).parents[1]


def parse(argv: Sequence[str] | None = None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    from benchmarks.sections import SECTIONS

    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="a few small cases in under a minute, saved in runs/benchmarks"
    )
    parser.add_argument("--only", action="append", choices=SECTIONS, default=[], help="a section; may be repeated")
    parser.add_argument(
        "--model", action="append", default=[], metavar="NAME", help="a tree or a network; may be repeated"
    )
    parser.add_argument("--out", type=pathlib.Path, help="folder of the results (default: benchmarks/results)")
    parser.add_argument("--seconds", type=float, help="of samples for each case, at least 9 rounds (default: 4)")
    return parser, parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmarks. 1 if a candidate failed or computed something wrong, 2 for wrong arguments."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from benchmarks import plots, report, storage
    from benchmarks.comparison import Setup
    from benchmarks.programs import uncached
    from benchmarks.sections import plan

    parser, args = parse(argv)
    try:
        cases = plan(args.only, args.model, args.quick)
    except ValueError as error:
        parser.error(str(error))
    if not cases:
        parser.error("none of these sections has such a model")
    setup = Setup(seconds=0.5, compiles=1) if args.quick else Setup()
    if args.seconds is not None:
        setup = dataclasses.replace(setup, seconds=args.seconds)
    out = args.out or (ROOT / "runs" / "benchmarks" if args.quick else ROOT / "benchmarks" / "results")

    path = out / storage.name()
    if path.exists() and not storage.load(path):
        print("the results there are of another environment and will be replaced", file=sys.stderr)
    measured, rows, failed = [], [], False
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with uncached(), Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:
            progress.update(task, description=f"{case.section} {case.name}")
            try:
                measured += case.measure(setup)
            except Exception as error:  # out of memory, most likely: the other cases may fit
                progress.console.print(f"{case.section} {case.name}: {error!r:.500}", markup=False)
                failed = True
            rows = storage.save(path, measured)  # after each case: a run that is cut short keeps what it has
            progress.advance(task)
    head = storage.header()
    versions = ", ".join(f"{name} {head[name]}" for name in ("jax", "optax", "flax", "torch") if head[name])
    files = [path, *plots.draw(rows, out, f"{versions}, {head['cpus']} CPUs")]

    console = Console(width=None if sys.stdout.isatty() else 200)
    for table in report.tables(measured):
        console.print(table)
    for line in report.missing(measured):
        console.print(line)
    slower = sum(r["ratio"] < 1 for r in measured if r["candidate"] in ("flat", "apply", "update") and "ratio" in r)
    console.print(
        f"times as fast: above 1 is faster than optax, below 1 slower. Ours were slower in {slower} rows. {versions}"
    )
    for file in files:
        console.print(f"wrote {os.path.relpath(file)}")
    return int(failed or any("error" in row for row in measured))


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.exit(main())
