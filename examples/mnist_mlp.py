"""Train a two-layer perceptron on handwritten digits: the classic first program.

    python -m examples.mnist_mlp
    python -m examples.mnist_mlp --optimizer lars --schedule warmup-cosine --mode flat
    python -m examples.mnist_mlp --data DIR     # a folder with the four files of MNIST
    python -m examples.mnist_mlp --compare      # the same batches with optax, both curves drawn

The three modes are the three ways to hold parameters: `optax` returns updates that `optax.apply_updates` adds, `apply`
writes the parameters in place, and `flat` keeps them in a few long buffers throughout. They compute the same thing; only
`make_step` and one line of `train` differ.
"""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import optax
from flax import linen as nn
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import fusedopt
from examples import idx

CLASSES = 10


class Choice(NamedTuple):
    """An optimizer as the command line offers it."""

    factory: Callable
    twin: Callable  # the same in optax, which has no masks of its own
    learning_rate: float  # the default


MASK, NESTEROV = fusedopt.weight_mask, {"momentum": 0.9, "nesterov": True}
LARS = partial(fusedopt.lars, weight_decay=1e-4)
# Almost the same: its trust ratio has |g + wd*w| where ours has |g| + wd*|w|.
OPTAX_LARS = partial(optax.lars, weight_decay=1e-4, weight_decay_mask=MASK, trust_ratio_mask=MASK)

OPTIMIZERS = {
    "sgd": Choice(fusedopt.sgd, optax.sgd, 0.5),
    "momentum": Choice(partial(fusedopt.sgd, momentum=0.9), partial(optax.sgd, momentum=0.9), 0.2),
    "nesterov": Choice(partial(fusedopt.sgd, **NESTEROV), partial(optax.sgd, **NESTEROV), 0.2),
    "adam": Choice(fusedopt.adam, optax.adam, 3e-3),
    "adamw": Choice(fusedopt.adamw, partial(optax.adamw, mask=MASK), 3e-3),
    "lars": Choice(LARS, OPTAX_LARS, 1.0),
    "lars-nesterov": Choice(partial(LARS, nesterov=True), partial(OPTAX_LARS, nesterov=True), 1.0),
}


class MLP(nn.Module):
    @nn.compact
    def __call__(self, images):
        x = images.reshape(len(images), -1)
        x = nn.relu(nn.Dense(512)(x))
        return nn.Dense(CLASSES)(x)


class Epoch(NamedTuple):
    train_loss: float
    train_accuracy: float
    test_accuracy: float
    losses: tuple[float, ...]  # of the batches


def loss_and_accuracy(params, images, labels):
    tree = params.tree if isinstance(params, fusedopt.FlatParams) else params
    logits = MLP().apply(tree, images)
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), (logits.argmax(-1) == labels).mean()


def make_step(tx, mode: str):
    """One training step: (params, state, images, labels) -> (params, state, loss, accuracy)."""

    def step(params, state, images, labels):
        grad = jax.value_and_grad(loss_and_accuracy, has_aux=True)
        (loss, accuracy), grads = grad(params, images, labels)
        if mode == "optax":
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        else:  # apply and flat: trees or FlatParams, the call is the same
            params, state = tx.apply(grads, state, params)
        return params, state, loss, accuracy

    # Donated arguments may be overwritten: this is what lets `apply` work in place.
    return jax.jit(step, donate_argnums=(0, 1))


def make_learning_rate(peak: float, schedule: str, steps: int):
    if schedule == "constant":
        return peak
    return fusedopt.warmup_cosine(peak, steps // 10, steps, peak / 100)


def train(data: idx.Dataset, args: argparse.Namespace, console: Console, library: str = "fusedopt") -> list[Epoch]:
    """Trains with the chosen optimizer of `library`, "fusedopt" or "optax"; both see the same batches."""
    batches = len(data.train_images) // args.batch_size
    choice = OPTIMIZERS[args.optimizer]
    peak = choice.learning_rate if args.learning_rate is None else args.learning_rate
    factory, mode = (choice.factory, args.mode) if library == "fusedopt" else (choice.twin, "optax")
    tx = factory(make_learning_rate(peak, args.schedule, args.epochs * batches))

    params = MLP().init(jax.random.key(args.seed), data.train_images[:1])
    if mode == "flat":
        params = fusedopt.pack(params)
    state = tx.init(params)

    step, evaluate = make_step(tx, mode), jax.jit(loss_and_accuracy)
    shuffle = np.random.default_rng(args.seed)
    history = []
    columns = (TextColumn("{task.description}, epoch {task.fields[epoch]}"), BarColumn(), MofNCompleteColumn(),
               TextColumn("{task.fields[batch]}"), TimeElapsedColumn())  # fmt: skip
    # A file or a pipe gets no bar, only the table at the end.
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(library, total=args.epochs * batches, epoch=1, batch="")
        for epoch in range(1, args.epochs + 1):
            # Whole batches only: a shorter last one would compile the step a second time.
            order = shuffle.permutation(len(data.train_images))[: batches * args.batch_size]
            metrics = []
            for batch in order.reshape(batches, args.batch_size):
                images, labels = data.train_images[batch], data.train_labels[batch]
                params, state, loss, accuracy = step(params, state, images, labels)
                metrics.append((float(loss), float(accuracy)))
                text = "loss {:.4f}  accuracy {:.2%}".format(*metrics[-1])
                progress.update(bar, advance=1, epoch=epoch, batch=text)
            _, test_accuracy = evaluate(params, data.test_images, data.test_labels)
            history.append(Epoch(*np.mean(metrics, axis=0), float(test_accuracy), tuple(loss for loss, _ in metrics)))
    return history


def show(history: Sequence[Epoch], console: Console) -> None:
    table = Table()
    for title in ("epoch", "train loss", "train acc", "test acc"):
        table.add_column(title, justify="right")
    for i, epoch in enumerate(history, 1):
        table.add_row(str(i), f"{epoch.train_loss:.4f}", f"{epoch.train_accuracy:.2%}", f"{epoch.test_accuracy:.2%}")
    console.print(table)


def compare(ours: Sequence[Epoch], theirs: Sequence[Epoch], path: Path, console: Console) -> None:
    """Prints how far two trainings are apart, and draws the losses of both."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    mine, optaxs = (np.concatenate([epoch.losses for epoch in history]) for history in (ours, theirs))
    axes.plot(optaxs, label="optax", color="0.7", linewidth=3)
    axes.plot(mine, label="fusedopt", color="C3", linewidth=1)
    axes.set(xlabel="step", ylabel="training loss of the batch", yscale="log")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    apart = np.abs(mine - optaxs)
    console.print(
        f"losses apart: {apart[:10].max():.1e} at most in the first ten steps, {apart.max():.1e} in all {len(apart)}"
    )
    console.print(f"test accuracy: {100 * theirs[-1].test_accuracy:.2f} % with optax; both curves in {path}")


def positive(kind: type) -> Callable:
    def parse(text: str):
        value = kind(text)
        if not 0 < value < math.inf:
            raise ValueError
        return value

    parse.__name__ = f"positive {kind.__name__}"  # argparse: invalid positive int value: '0'
    return parse


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.mnist_mlp", description=__doc__.partition("\n")[0])
    rates = ", ".join(f"{name} {choice.learning_rate:g}" for name, choice in OPTIMIZERS.items())
    add = parser.add_argument
    add("--data", type=Path, help="folder with the four MNIST files; default: real digits, 8 x 8")
    add("--cache", type=Path, help="folder for the digits; default: the user's cache folder")
    add("--optimizer", choices=OPTIMIZERS, default="adamw")
    add("--learning-rate", type=positive(float), help=f"default: {rates}")
    add("--schedule", choices=("constant", "warmup-cosine"), default="constant")
    add("--batch-size", type=positive(int), default=64)
    add("--epochs", type=positive(int), default=20)
    add("--seed", type=int, default=0)
    add("--device", choices=("cpu", "gpu"), help="default: JAX's own choice")
    add("--mode", choices=("optax", "apply", "flat"), default="flat")
    add("--compare", action="store_true", help="train with optax as well, on the same batches")
    add("--plot", type=Path, default=Path("runs/mnist_mlp.png"), help="what --compare draws (default: %(default)s)")
    return parser.parse_args(argv)


def pick_device(platform: str | None) -> jax.Device:
    if platform is None:
        return jax.devices()[0]
    try:
        return jax.devices(platform)[0]
    except RuntimeError as error:
        raise SystemExit(
            f"--device {platform}: got only {jax.default_backend()} devices here, expected a "
            f"{platform}; leave --device out, or install a JAX for it ({error})"
        ) from error


def load(args: argparse.Namespace) -> idx.Dataset:
    """The data set, or an exit that says what is wrong with the files."""
    try:
        data = idx.read_mnist(args.data or idx.cached_digits(args.cache))
    except (idx.IdxError, OSError) as error:
        raise SystemExit(str(error)) from error
    largest = max(data.train_labels.max(), data.test_labels.max())
    if largest >= CLASSES:
        raise SystemExit(f"labels: got {largest}, expected 0 to {CLASSES - 1}")
    if args.batch_size > len(data.train_images):
        raise SystemExit(
            f"--batch-size: got {args.batch_size}, expected at most {len(data.train_images)}, the "
            "number of training images"
        )
    return data


def main(argv: Sequence[str] | None = None) -> float:
    args = parse_args(argv)
    console = Console()
    data = load(args)
    device = pick_device(args.device)
    console.print(
        f"{len(data.train_images)} training and {len(data.test_images)} test images, "
        f"{args.optimizer}, mode {args.mode}, {device.device_kind}"
    )
    started = time.perf_counter()
    with jax.default_device(device):
        history = train(data, args, console)
    show(history, console)
    console.print(f"{time.perf_counter() - started:.1f} s")
    if args.compare:
        with jax.default_device(device):
            compare(history, train(data, args, console, "optax"), args.plot, console)
    console.print(f"test accuracy: {100 * history[-1].test_accuracy:.2f} %")
    return history[-1].test_accuracy


if __name__ == "__main__":
    main()
