"""Train a small GPT on characters: the reference of the Python language, which ships with Python.

    python -m examples.train_gpt
    python -m examples.train_gpt --steps 200 --compare        # the same run with optax's AdamW beside it
    python -m examples.train_gpt --steps 600 --resume         # go on where the last run was stored

AdamW over flat buffers with a warm-up and a cosine, clipped and averaged, the embeddings at half the learning rate. The
run is stored at its end, its curves are drawn, and the averaged parameters write a few lines.
"""

import argparse
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from pydoc_data import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import serialization
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import fusedopt
from examples.mnist_mlp import positive

CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 64, 96, 4, 3, 24


class Gpt(nn.Module):
    """Pre-norm decoder over characters; `tokens` (batch, time) to logits (batch, time, vocabulary)."""

    vocabulary: int

    @nn.compact
    def __call__(self, tokens):
        position = self.param("position", nn.initializers.normal(0.02), (CONTEXT, WIDTH))
        embed = nn.Embed(self.vocabulary, WIDTH, embedding_init=nn.initializers.normal(0.02), name="embed")
        x = embed(tokens) + position[: tokens.shape[1]]
        mask = nn.make_causal_mask(tokens)
        for i in range(LAYERS):
            h = nn.LayerNorm(name=f"norm_{i}")(x)
            x = x + nn.MultiHeadDotProductAttention(HEADS, name=f"attention_{i}")(h, h, mask=mask)
            h = nn.Dense(4 * WIDTH, name=f"up_{i}")(nn.LayerNorm(name=f"norm_mlp_{i}")(x))
            x = x + nn.Dense(WIDTH, name=f"down_{i}")(nn.gelu(h))
        return embed.attend(nn.LayerNorm(name="norm")(x))


def text() -> tuple[np.ndarray, list[str]]:
    """The text as numbers, and the character of each number."""
    corpus = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    characters = sorted(set(corpus))
    number = {c: i for i, c in enumerate(characters)}
    return np.array([number[c] for c in corpus], np.int32), characters


def batches(data: np.ndarray, first: int, last: int, seed: int):
    """(BATCH, CONTEXT + 1) windows for the steps from `first` on: the same for a step in every run."""
    for step in range(first, last):
        starts = np.random.default_rng([seed, step]).integers(0, len(data) - CONTEXT - 1, BATCH)
        yield np.stack([data[s : s + CONTEXT + 1] for s in starts])


def schedule(args: argparse.Namespace):
    return fusedopt.warmup_cosine(args.learning_rate, args.total // 20, args.total, args.learning_rate / 10)


def optimizer(args: argparse.Namespace) -> fusedopt.FusedTransformation:
    embeddings = fusedopt.Group("embeddings", lambda path, leaf: path[-1] in ("embedding", "position"),
                                learning_rate_scale=0.5, weight_decay=0)  # fmt: skip
    return fusedopt.adamw(schedule(args), b2=0.99, weight_decay=0.1, groups=[embeddings], clip_norm=1.0, ema_decay=0.98)


def loss_fn(apply_fn: Any, params: Any, window: jax.Array) -> jax.Array:
    logits = apply_fn({"params": params}, window[:, :-1])
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, window[:, 1:]).mean()


@partial(jax.jit, donate_argnums=0)
def train_step(state: fusedopt.TrainState, window: jax.Array):
    loss, grads = jax.value_and_grad(lambda p: loss_fn(state.apply_fn, p, window))(state.params)
    return state.apply_gradients(grads=grads), loss


def twin(args: argparse.Namespace) -> optax.GradientTransformation:
    """The same optimizer of optax's parts, but for the average."""

    def label(params):
        kind = lambda path, leaf: "embeddings" if path[-1].key in ("embedding", "position") else "others"  # noqa: E731
        return jax.tree_util.tree_map_with_path(kind, params)

    rate = schedule(args)
    parts = {
        "embeddings": optax.adamw(lambda t: 0.5 * rate(t), b2=0.99, weight_decay=0.0),
        "others": optax.adamw(rate, b2=0.99, weight_decay=0.1, mask=fusedopt.weight_mask),
    }
    return optax.chain(optax.clip_by_global_norm(1.0), optax.partition(parts, label))


def run(state: Any, args: argparse.Namespace, data: np.ndarray, name: str, console: Console) -> tuple[Any, list, float]:
    """The last state, the losses and the seconds of a step, that of the first, which compiles, left out."""
    losses, start, first = [], 0.0, int(state.step)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(name, total=args.steps, completed=first, loss="")
        for window in batches(data, first, args.steps, args.seed):
            state, loss = train_step(state, window)
            losses.append(float(loss))
            start = start or time.perf_counter()
            progress.update(bar, advance=1, loss=f"loss {losses[-1]:.3f}")
    return state, losses, (time.perf_counter() - start) / max(len(losses) - 1, 1)


def write(state: fusedopt.TrainState, characters: list[str], length: int, seed: int) -> str:
    """What the averaged parameters make of an empty line."""
    model, params = jax.jit(state.apply_fn), state.ema_params
    tokens, key = [characters.index("\n")], jax.random.key(seed)
    for i in range(length):
        window = np.zeros((1, CONTEXT), np.int32)
        recent = tokens[-CONTEXT:]
        window[0, : len(recent)] = recent
        logits = model({"params": params}, window)[0, len(recent) - 1]
        tokens.append(int(jax.random.categorical(jax.random.fold_in(key, i), 1.5 * logits)))
    return "".join(characters[t] for t in tokens).strip()


def plot(path: Path, curves: dict[str, tuple[int, Sequence[float]]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    styles = {"optax": {"color": "0.7", "linewidth": 3}, "fusedopt": {"color": "C3", "linewidth": 1}}
    for name, (first, losses) in curves.items():
        axes.plot(range(first, first + len(losses)), losses, label=name, **styles[name])
    axes.set(xlabel="step", ylabel="training loss, nats a character")
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.train_gpt", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--steps", type=positive(int), default=400, help="the run ends at this step (default: %(default)s)")
    add("--total", type=positive(int), default=800, help="steps of the schedule (default: %(default)s)")
    add("--learning-rate", type=positive(float), default=3e-3, help="at its peak (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("runs/train_gpt"), help="folder for run and curves (default: %(default)s)")
    add("--resume", action="store_true", help="go on from the run stored there")
    add("--compare", action="store_true", help="train with optax as well, on the same batches")
    add("--sample", type=int, default=300, help="characters to write in the end (default: %(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> dict[str, list[float]]:
    args, console = parse_args(argv), Console()
    data, characters = text()
    model = Gpt(len(characters))
    params = model.init(jax.random.key(args.seed), jnp.zeros((1, CONTEXT), jnp.int32))["params"]
    state = fusedopt.TrainState.create(apply_fn=model.apply, params=params, tx=optimizer(args), flat=True)
    stored = args.out / "run.msgpack"
    if args.resume:
        if not stored.exists():
            raise SystemExit(f"--resume: there is no {stored}; run without it first")
        state = serialization.from_bytes(state, stored.read_bytes())
    first = int(state.step)
    curves = {}
    if args.compare:
        rival = fusedopt.TrainState.create(apply_fn=model.apply, params=params, tx=twin(args))
        _, theirs, _ = run(rival, args, data, "optax", console)
        curves["optax"] = (0, theirs)
    state, losses, seconds = run(state, args, data, "fusedopt", console)
    curves["fusedopt"] = (first, losses)
    args.out.mkdir(parents=True, exist_ok=True)
    stored.write_bytes(serialization.to_bytes(state))
    plot(args.out / "loss.png", curves)
    recent = np.mean(losses[-20:]) if losses else float("nan")
    if args.compare:
        apart = np.abs(np.subtract(losses, theirs[first:]))
        console.print(f"optax: loss {np.mean(theirs[-20:]):.3f}; losses at most {apart.max(initial=0):.1e} apart")
    console.print(
        f"fusedopt: {1e3 * seconds:.0f} ms a step, loss {recent:.3f} (mean of the last 20 of {int(state.step)} steps)"
    )
    console.print(f"stored in {stored}, curves in {args.out / 'loss.png'}")
    if args.sample > 0:
        console.print(write(state, characters, args.sample, args.seed), markup=False, highlight=False)
    return {name: losses for name, (_, losses) in curves.items()}


if __name__ == "__main__":
    main()
