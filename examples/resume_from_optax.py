"""Take a training run over from optax, and give it back.

    python -m examples.resume_from_optax
    python -m examples.resume_from_optax --optimizer lion --plot curves.png

A run of optax is stored after a third of its steps, as any run is. One copy goes on in optax. The other is restored
into fusedopt, goes on in flat buffers, and returns to optax for the last third. Both see the same batches, so their
losses are the same but for rounding; a picture shows both curves.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from flax import serialization
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import fusedopt
from examples import idx
from examples.mnist_mlp import positive

# name -> (optax's, ours); without a mask optax decays biases too, which ours does not by default.
OPTIMIZERS: dict[str, tuple[Callable, Callable]] = {
    "adamw": (lambda lr: optax.adamw(lr, mask=fusedopt.weight_mask), fusedopt.adamw),
    "lamb": (lambda lr: optax.lamb(lr, mask=fusedopt.weight_mask), fusedopt.lamb),
    "lion": (lambda lr: optax.lion(lr / 10, mask=fusedopt.weight_mask), lambda lr: fusedopt.lion(lr / 10)),
    "momentum": (lambda lr: optax.sgd(10 * lr, momentum=0.9), lambda lr: fusedopt.sgd(10 * lr, momentum=0.9)),
}


class MLP(nn.Module):
    @nn.compact
    def __call__(self, images):
        x = images.reshape(len(images), -1)
        x = nn.relu(nn.Dense(128)(x))
        return nn.Dense(10)(x)


def loss_fn(params: Any, images: Any, labels: Any) -> jax.Array:
    tree = params.tree if isinstance(params, fusedopt.FlatParams) else params
    logits = MLP().apply(tree, images)
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def make_step(tx: Any) -> Callable:
    """(params, state, images, labels) -> (params, state, loss)."""

    def step(params, state, images, labels):
        loss, grads = jax.value_and_grad(loss_fn)(params, images, labels)
        if hasattr(tx, "apply"):
            return *tx.apply(grads, state, params), loss
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return jax.jit(step)


def run(tx: Any, params: Any, state: Any, batches: Sequence[tuple], losses: list[float], tick: Callable) -> tuple:
    """The parameters and the state after these batches; each loss is added to `losses`."""
    step = make_step(tx)
    for images, labels in batches:
        params, state, loss = step(params, state, images, labels)
        losses.append(float(loss))
        tick(losses)
    return params, state


def stored(folder: Path, params: Any, state: Any, tx: Any) -> tuple[Any, Any]:
    """Parameters and optax state, written to a file and read from it."""
    file = folder / "checkpoint.msgpack"
    file.write_bytes(serialization.to_bytes({"params": params, "state": state}))
    like = {"params": params, "state": tx.init(params)}
    restored = jax.tree.map(jax.numpy.asarray, serialization.from_bytes(like, file.read_bytes()))
    return restored["params"], restored["state"]


def both_runs(args: argparse.Namespace, data: idx.Dataset, folder: Path, tick: Callable) -> tuple[list, list]:
    """The losses of the run that stays in optax and of the one that visits fusedopt."""
    theirs, ours = (make(args.learning_rate) for make in OPTIMIZERS[args.optimizer])
    order = np.random.default_rng(args.seed).integers(len(data.train_images), size=(3, args.steps, args.batch_size))
    first, second, third = ([(data.train_images[i], data.train_labels[i]) for i in part] for part in order)

    params = MLP().init(jax.random.key(args.seed), data.train_images[:1])
    stay: list[float] = []
    params, state = run(theirs, params, theirs.init(params), first, stay, tick)
    visit = list(stay)
    restored_params, restored_state = stored(folder, params, state, theirs)
    run(theirs, params, state, second + third, stay, tick)

    # Into fusedopt: the parameters to buffers, the state by path.
    flat = fusedopt.pack(restored_params, ours)
    fused_state = fusedopt.from_optax_state(ours, restored_state, flat)
    flat, fused_state = run(ours, flat, fused_state, second, visit, tick)

    # And back. `extras` is what optax has no place for; keep it to come here once more.
    state, _extras = fusedopt.to_optax_state(ours, fused_state, flat, like=theirs)
    restored_params, restored_state = stored(folder, flat.tree, state, theirs)
    run(theirs, restored_params, restored_state, third, visit, tick)
    return stay, visit


def plot(path: Path, stay: Sequence[float], visit: Sequence[float], args: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(stay, label=f"{args.optimizer}, optax throughout", linewidth=3, color="0.7")
    axes.plot(visit, label=f"{args.optimizer}, fusedopt in the middle", linewidth=1, color="C3")
    axes.axvspan(args.steps, 2 * args.steps, color="C3", alpha=0.1, linewidth=0, label="steps that fusedopt takes")
    axes.set(xlabel="step", ylabel="training loss", yscale="log")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.resume_from_optax", description=__doc__.partition("\n")[0]
    )
    add = parser.add_argument
    add("--data", type=Path, help="folder with the four MNIST files; default: real digits, 8 x 8")
    add("--cache", type=Path, help="folder for the digits; default: the user's cache folder")
    add("--optimizer", choices=OPTIMIZERS, default="adamw")
    add(
        "--learning-rate",
        type=positive(float),
        default=3e-3,
        help="of AdamW; others take it scaled (default: %(default)s)",
    )
    add("--batch-size", type=positive(int), default=64)
    add("--steps", type=positive(int), default=150, help="steps of each third of the run (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--plot", type=Path, default=Path("runs/resume_from_optax.png"), help="the picture (default: %(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> float:
    args = parse_args(argv)
    console = Console()
    try:
        data = idx.read_mnist(args.data or idx.cached_digits(args.cache))
    except (idx.IdxError, OSError) as error:
        raise SystemExit(str(error)) from error
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory() as folder,
        # A file or a pipe gets no bar, only the result at the end.
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
    ):
        bar = progress.add_task("", total=5 * args.steps, loss="")

        def tick(losses: list[float]) -> None:
            progress.update(bar, advance=1, loss=f"loss {losses[-1]:.4f}")

        stay, visit = both_runs(args, data, Path(folder), tick)
    plot(args.plot, stay, visit, args)
    difference = float(np.max(np.abs(np.subtract(stay, visit))))
    console.print(f"loss of the last step: {stay[-1]:.6f} in optax, {visit[-1]:.6f} with fusedopt in the middle")
    console.print(f"largest difference of {len(stay)} losses: {difference:.1e}; both curves in {args.plot}")
    return difference


if __name__ == "__main__":
    main()
