"""Train a small residual network with large batches: LARS, a learning rate for each layer, beside SGD and optax's LARS.

    python -m examples.train_resnet_lars
    python -m examples.train_resnet_lars --batch-size 1024 --epochs 40 --compare

Batch normalisation keeps its statistics in a subclass of the train state. The picture shows losses and accuracies, and
the trust ratio of every layer: by how much LARS scales the learning rate there.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import fusedopt
from examples import idx
from examples.mnist_mlp import positive

STYLES = {
    "optax.lars": {"color": "0.7", "linewidth": 3},
    "lars": {"color": "C3", "linewidth": 1},
    "sgd": {"color": "C0", "linewidth": 1},
}


class Block(nn.Module):
    features: int
    stride: int = 1

    @nn.compact
    def __call__(self, x, train: bool):
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        conv = partial(nn.Conv, use_bias=False)
        y = nn.relu(norm()(conv(self.features, (3, 3), self.stride)(x)))
        y = norm(scale_init=nn.initializers.zeros)(conv(self.features, (3, 3))(y))
        if x.shape != y.shape:
            x = norm()(conv(self.features, (1, 1), self.stride)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Images (batch, rows, columns) in [0, 1] to logits (batch, 10)."""

    @nn.compact
    def __call__(self, images, train: bool):
        x = nn.Conv(16, (3, 3), use_bias=False)(images[..., None])
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        for features, stride in ((16, 1), (32, 2), (32, 1), (64, 2)):
            x = Block(features, stride)(x, train)
        return nn.Dense(10)(x.mean(axis=(1, 2)))


class TrainState(fusedopt.TrainState):
    batch_stats: Any


def make_state(tx: Any, images: np.ndarray, seed: int) -> TrainState:
    model = ResNet()
    variables = model.init(jax.random.key(seed), images[:1], train=False)
    fused = hasattr(tx, "apply")  # optax's optimizers take trees
    return TrainState.create(
        apply_fn=model.apply, params=variables["params"], batch_stats=variables["batch_stats"], tx=tx, flat=fused
    )


@partial(jax.jit, donate_argnums=0)
def train_step(state: TrainState, images: jax.Array, labels: jax.Array):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new = state.apply_fn(variables, images, train=True, mutable=["batch_stats"])
        return optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), new

    (loss, new), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=new["batch_stats"]), loss


@jax.jit
def correct(state: TrainState, images: jax.Array, labels: jax.Array) -> jax.Array:
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    return jnp.mean(jnp.argmax(state.apply_fn(variables, images, train=False), axis=1) == labels)


def shifted(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Each image moved by up to one pixel, so that 1,400 of them are not learnt by heart."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)))
    rows, columns = images.shape[1:]
    moves = rng.integers(0, 3, (len(images), 2))
    return np.stack([x[i : i + rows, j : j + columns] for x, (i, j) in zip(padded, moves, strict=True)])


def run(name: str, tx: Any, data: idx.Dataset, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Losses of the steps, test accuracies of the epochs, and trust ratios of the epochs by layer."""
    state = make_state(tx, data.train_images, args.seed)
    rng, size = np.random.default_rng(args.seed), min(args.batch_size, len(data.train_images))
    losses, accuracies, ratios = [], [], {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(name, total=args.epochs, note="")
        for _ in range(args.epochs):
            order = rng.permutation(len(data.train_images))
            for start in range(0, len(order) - size + 1, size):
                chosen = order[start : start + size]
                images = shifted(data.train_images[chosen], rng)
                state, loss = train_step(state, images, data.train_labels[chosen])
                losses.append(float(loss))
            accuracies.append(100 * float(correct(state, data.test_images, data.test_labels)))
            if name == "lars":
                for path, ratio in tx.trust_ratios(state.opt_state, state.params).items():
                    ratios.setdefault("/".join(path), []).append(float(ratio))
            progress.update(bar, advance=1, note=f"loss {losses[-1]:.3f}, {accuracies[-1]:.1f} %")
    return {"losses": losses, "accuracies": accuracies, "ratios": ratios}


def optimizers(args: argparse.Namespace, steps: int) -> dict[str, Any]:
    def rate(peak):
        return fusedopt.warmup_cosine(peak, max(1, steps // 10), steps)

    lars = fusedopt.lars(
        rate(args.learning_rate), weight_decay=1e-4, trust_coefficient=0.01, trust_ratio=args.trust_ratio
    )
    if not args.compare:
        return {"lars": lars}
    sgd = fusedopt.sgd(rate(args.sgd_learning_rate), momentum=0.9, weight_decay=1e-4)
    # The same as --trust-ratio optax. The paper's ratio has |g| + wd*|w| where this has |g + wd*w|, and with it the
    # learning rate of biases is outside their momentum.
    mask = fusedopt.weight_mask
    theirs = optax.lars(rate(args.learning_rate), 1e-4, mask, trust_coefficient=0.01, trust_ratio_mask=mask)
    return {"optax.lars": theirs, "lars": lars, "sgd": sgd}


def plot(path: Path, results: dict[str, dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(14, 4), layout="constrained")
    for name, result in results.items():
        style = {"label": name, **STYLES[name]}
        left.plot(result["losses"], **style)
        middle.plot(range(1, len(result["accuracies"]) + 1), result["accuracies"], **style)
    left.set(xlabel="step", ylabel="training loss", yscale="log")
    middle.set(xlabel="epoch", ylabel="test accuracy, %")
    for axes in (left, middle):
        axes.legend()
    ratios = results["lars"]["ratios"]
    # From the images to the logits.
    layers = sorted(ratios, key=lambda name: (not name.startswith("Conv"), name.startswith("Dense"), name))
    for i, name in enumerate(layers):
        color = pyplot.get_cmap("viridis")(i / max(1, len(layers) - 1))
        right.plot(range(1, len(ratios[name]) + 1), ratios[name], label=name.removesuffix("/kernel"), color=color)
    right.set(xlabel="epoch", ylabel="trust ratio of lars", yscale="log")
    figure.legend(*right.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.train_resnet_lars", description=__doc__.partition("\n")[0]
    )
    add = parser.add_argument
    add("--data", type=Path, help="folder with the four MNIST files; default: real digits, 8 x 8")
    add("--cache", type=Path, help="folder for the digits; default: the user's cache folder")
    add("--batch-size", type=positive(int), default=512, help="(default: %(default)s)")
    add("--epochs", type=positive(int), default=40, help="(default: %(default)s)")
    add("--learning-rate", type=positive(float), default=1.0, help="of LARS, at its peak (default: %(default)s)")
    add("--sgd-learning-rate", type=positive(float), default=0.4, help="of SGD, at its peak (default: %(default)s)")
    add("--trust-ratio", choices=("paper", "optax"), default="paper", help="form of LARS (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--compare", action="store_true", help="train with optax's LARS and with SGD and momentum as well")
    add("--plot", type=Path, default=Path("runs/train_resnet_lars.png"), help="the picture (default: %(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    args, console = parse_args(argv), Console()
    try:
        data = idx.read_mnist(args.data or idx.cached_digits(args.cache))
    except (idx.IdxError, OSError) as error:
        raise SystemExit(str(error)) from error
    steps = args.epochs * max(1, len(data.train_images) // args.batch_size)
    results = {name: run(name, tx, data, args, console) for name, tx in optimizers(args, steps).items()}
    plot(args.plot, results)
    table = Table("optimizer", "last loss", "test accuracy", title=f"{steps} steps of {args.batch_size} images")
    for name, result in results.items():
        table.add_row(name, f"{result['losses'][-1]:.4f}", f"{result['accuracies'][-1]:.2f} %")
    console.print(table)
    if args.compare:
        apart = np.abs(np.subtract(results["lars"]["losses"], results["optax.lars"]["losses"]))
        console.print(
            f"losses of lars and optax.lars: {apart[:10].max():.1e} apart in the first ten steps, {apart.max():.1e} in all"
        )
    console.print(f"curves in {args.plot}")
    return results


if __name__ == "__main__":
    main()
