"""What a device of many holds and says under `zero1`: `python -m benchmarks.aot.zero1`. Needs the `aot` extra, no GPU."""

from __future__ import annotations

import argparse
import pathlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import track
from rich.table import Table

import fusedopt
from benchmarks import models
from benchmarks.aot import compiler
from benchmarks.aot.collectives import collectives

RULES: dict[str, Callable[..., Any]] = {
    "adamw": lambda **k: fusedopt.adamw(1e-3, **k),
    "adamw clip_norm": lambda **k: fusedopt.adamw(1e-3, clip_norm=1.0, **k),
    "lars": lambda **k: fusedopt.lars(0.1, **k),
}
FORMS = ("train_step", "apply")


def squares(params: Any, x: jax.Array) -> jax.Array:
    """A loss that reads every parameter and costs nothing to differentiate: the communication is that of any loss."""
    return jnp.mean(x) * sum(jnp.sum(jnp.square(p.astype(jnp.float32))) for p in jax.tree.leaves(params))


def compiled(
    make: Callable[[], Any], form: str, tree: Any, *, devices: int = 8, loss_fn: Any = squares, batch: Any = None
):
    """A step of abstract FlatParams for some H200s, parameters and state donated; and the FlatParams and the state."""
    tx = fusedopt.zero1(make(), compiler.mesh("h200", devices))
    with jax.sharding.use_abstract_mesh(tx.mesh.abstract_mesh):
        flat = jax.eval_shape(lambda tree: fusedopt.pack(tree, tx), tree)
        state = jax.eval_shape(tx.init, flat)
    if batch is None:
        batch = (jax.ShapeDtypeStruct((devices,), jnp.float32),)
    if form == "train_step":
        run, args, rest = tx.train_step(loss_fn), batch, (P(tx.axis),) * len(batch)
    elif form == "apply":
        run, args, rest = lambda flat, state, grads: tx.apply(grads, state, flat), (flat,), (P(),)
    else:  # the drop-in under a jit that also takes the gradients

        def run(flat, state, *batch):
            return tx.apply(jax.grad(lambda flat: loss_fn(flat.tree, *batch))(flat), state, flat)

        args, rest = batch, (P(tx.axis),) * len(batch)
    specs = (P(), tx.specs(state), *rest)
    c = compiler.compile_for("h200", run, flat, state, *args, donate=(0, 1), devices=devices, specs=specs)
    return c, flat, state


HEAD = (
    "model",
    "parameters",
    "rule",
    "form",
    "state",
    "of optax",
    "of it",
    "reduce-scatter",
    "all-gather",
    "norms",
    "other",
)

ABOUT = """# What a device of eight holds and says under zero1

Compiled ahead of time for 8 H200s with jax {version}; float32, bytes of one device. state: of the optimizer. of optax: the
state of the optax namesake, which every device has whole; of it: our part. reduce-scatter, all-gather: what a step sums
and gathers, as the whole buffers; a device sends and receives 7/8 of either. norms: sums of rows, gathered; other: single
numbers, the loss of a train_step among them. apply is the drop-in, whose gradients XLA has summed before. Made by
`python -m benchmarks.aot.zero1`.

"""


def cells(model: str, rule: str, form: str, devices: int = 8) -> tuple[str, ...]:
    tree = models.shapes(model)
    c, flat, state = compiled(lambda: RULES[rule](), form, tree, devices=devices)
    buffers = {x.size * x.dtype.itemsize for x in flat.buckets}
    said = collectives(c.text)
    scattered = sum(devices * size for op, sizes in said if op == "reduce-scatter" for size in sizes)
    gathered = [size for op, sizes in said if op == "all-gather" for size in sizes]
    whole = sum(size for size in gathered if size in buffers)
    other = sum(size for op, sizes in said if op not in ("reduce-scatter", "all-gather") for size in sizes)
    specs = jax.tree.leaves(fusedopt.zero1(RULES[rule](), compiler.mesh("h200", devices)).specs(state))
    parts = [devices if any(spec) else 1 for spec in specs]
    own = sum(x.size * x.dtype.itemsize // n for x, n in zip(jax.tree.leaves(state), parts, strict=True))
    peer = optax.lars(0.1) if rule == "lars" else optax.adamw(1e-3)
    theirs = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(peer.init, tree)))
    numbers = (own, theirs, f"{own / theirs:.4f}", scattered, whole, sum(gathered) - whole, other)
    return (
        model,
        f"{models.describe(tree)[1]:,}",
        rule,
        form,
        *(f"{x:,}" if isinstance(x, int) else x for x in numbers),
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.aot.zero1", description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, help="default: benchmarks/results/zero1-jax-VERSION.md")
    args = parser.parse_args()
    if lacks := compiler.missing():
        print(f"{lacks} not found: pip install 'fusedopt[aot]'", file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")
    table, lines = Table(*HEAD, title=f"jax {jax.__version__}"), []
    rows = [(model, rule, form) for model in ("resnet50", "gpt2_small") for rule in RULES for form in FORMS]
    for row in track(rows, "compiling", console=Console(stderr=True)):
        lines.append(cells(*row))
        table.add_row(*lines[-1])
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    out = args.out or pathlib.Path(__file__).parents[1] / "results" / f"zero1-jax-{jax.__version__}.md"
    text = "".join(f"| {' | '.join(line)} |\n" for line in [HEAD, ("---",) * len(HEAD), *lines])
    out.write_text(ABOUT.format(version=jax.__version__) + text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
