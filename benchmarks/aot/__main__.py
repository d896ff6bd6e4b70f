"""Prints and saves what GPUs would run: `python -m benchmarks.aot`. Needs the `aot` extra, no GPU; a few minutes."""

from __future__ import annotations

import argparse
import pathlib
import sys
import warnings

import jax
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import models
from benchmarks.aot import compiler, steps
from benchmarks.aot.steps import DEFAULT, PACKED, Step

RESULTS = pathlib.Path(__file__).parents[1] / "results"

HEAD = ("target", "model", "rule", "mode", "packing", "backend", "has_nan", "launches", "captured", "aliased", "temp", "accesses",
        "registers", "spilled")  # fmt: skip

ABOUT = """# What the GPU would run

Compiled ahead of time with jax {version}, parameters and state donated. launches: kernels and copies of one step, the
handful for scalars included. captured: of these, in a command buffer. aliased: results written in place, of the donated
bytes. temp: temporary memory, of the bytes of the parameters. accesses: numbers read and written by all kernels, for
each parameter. registers, spilled: at most, of the kernels named `fusedopt_*`. Made by `python -m benchmarks.aot`.

"""


def rows(quick: bool) -> list[tuple[str, str, Step]]:
    """(target, model, step) of each line."""
    lines = []
    for rule in ("adamw", "adamw full", "sgd", "momentum", "lion", "lars", "lamb"):
        for mode in steps.MODES:
            for guard in (False, True):
                lines += [("h200", "resnet50", Step(rule, mode, None, packing, guard)) for packing in (PACKED, DEFAULT)]
    lines += [("h200", "resnet50", Step("optax"))]
    if quick:
        return lines[:4]
    for target, backends in (("h200", ("mosaic", "triton", "xla")), ("a100", ("triton", "xla")), ("t4", (None,))):
        for rule in steps.RULES:
            for mode in steps.MODES:
                lines += [(target, "ragged", Step(rule, mode, backend, DEFAULT)) for backend in backends]
    return lines


def cells(target: str, model: str, step: Step) -> tuple[str, ...]:
    tree = steps.ragged() if model == "ragged" else models.shapes(model)
    count = sum(x.size for x in jax.tree.leaves(tree))
    c = steps.compiled(step, target, tree)
    ours = [k for name, kernels in c.kernels.items() if name.startswith("fusedopt_") for k in kernels]
    packing = "" if step.rule == "optax" else "all" if step.packing.solo_from is None else f"< {step.packing.solo_from}"
    return (
        target,
        model,
        step.rule,
        "" if step.rule == "optax" else step.mode,
        packing,
        step.backend or "default",
        "yes" if step.guard else "no",
        str(c.count()),
        str(sum(captured for _, captured in c.launches)),
        f"{c.aliased / c.donated:.3f}",
        f"{c.temporary / (4 * count):.4f}",
        f"{c.accessed / (4 * count):.2f}",
        str(max((k.registers for k in ours), default="")),
        str(sum(k.spilled for k in ours) if ours else ""),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few lines only; nothing is saved")
    parser.add_argument("--out", type=pathlib.Path, help="default: benchmarks/results/aot-jax-VERSION.md")
    args = parser.parse_args()
    if lacks := compiler.missing():
        print(f"{lacks} not found: pip install 'fusedopt[aot]'", file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")
    table = Table(*HEAD, title=f"jax {jax.__version__}")
    lines = []
    for target, model, step in track(rows(args.quick), "compiling", console=Console(stderr=True)):
        lines.append(cells(target, model, step))
        table.add_row(*lines[-1])
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    if not args.quick:
        out = args.out or RESULTS / f"aot-jax-{jax.__version__}.md"
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(ABOUT.format(version=jax.__version__) + markdown(lines))
    return 0


def markdown(lines: list[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in [HEAD, ("---",) * len(HEAD), *lines])


if __name__ == "__main__":
    sys.exit(main())
