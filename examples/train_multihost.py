"""Train a network on handwritten digits over several processes, each with devices and a part of every batch of its own.

Two processes on one machine, four CPU devices each, in two terminals:

    python -m examples.train_multihost --processes 2 --process 0 --cpu-devices 4 --compare
    python -m examples.train_multihost --processes 2 --process 1 --cpu-devices 4 --compare

On several machines the same with --coordinator HOST:PORT, an address of process 0 that all of them reach, and an --out
that all of them see. `fusedopt.zero1` keeps on each device its part of the optimizer's state. Process 0 shows and draws;
all store the run together, and any number of processes with as many devices in all goes on from there by --resume.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import linen as nn
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import fusedopt
from examples import idx
from examples.mnist_mlp import positive

EVALUATE_EVERY = 20


class MLP(nn.Module):
    @nn.compact
    def __call__(self, images):
        x = images.reshape(len(images), -1)
        for width in (256, 256):
            x = nn.relu(nn.LayerNorm()(nn.Dense(width)(x)))
        return nn.Dense(10)(x)


def loss_fn(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    logits = MLP().apply({"params": params}, images)
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@jax.jit
def accuracy(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    tree = params.tree if isinstance(params, fusedopt.FlatParams) else params
    return jnp.mean(jnp.argmax(MLP().apply({"params": tree}, images), axis=-1) == labels)


def batches(data: idx.Dataset, args: argparse.Namespace, mesh: jax.sharding.Mesh, first: int) -> Iterator[tuple]:
    """Batches for the steps from `first` on, the same for a step in every run; only this process's part is read."""
    by_device = jax.NamedSharding(mesh, jax.P("data"))
    size = args.batch_size // jax.process_count()
    for step in range(first, args.steps):
        order = np.random.default_rng([args.seed, step]).permutation(len(data.train_images))[: args.batch_size]
        own = order[jax.process_index() * size :][:size]
        local = data.train_images[own], data.train_labels[own]
        yield tuple(jax.make_array_from_process_local_data(by_device, x) for x in local)


def optax_step(tx: optax.GradientTransformation) -> Callable:
    """The same form as a `train_step` of zero1. Of a batch in parts XLA sums the gradients, for a state that is whole."""

    def step(params, state, images, labels):
        loss, grads = jax.value_and_grad(loss_fn)(params, images, labels)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def run(name: str, step: Callable, params: Any, state: Any, data: idx.Dataset, args: argparse.Namespace,
        mesh: jax.sharding.Mesh, first: int, console: Console) -> dict[str, Any]:  # fmt: skip
    """Trains; parameters, state, and losses and accuracies by step."""
    test = jax.device_put((data.test_images, data.test_labels), jax.NamedSharding(mesh, jax.P()))
    losses, accuracies = {}, {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(name, total=args.steps, completed=first, note="")
        for i, batch in enumerate(batches(data, args, mesh, first), first + 1):
            params, state, loss = step(params, state, *batch)
            losses[i] = float(loss)
            if i % EVALUATE_EVERY == 0 or i == args.steps:
                accuracies[i] = 100 * float(accuracy(params, *test))
                progress.update(bar, completed=i, note=f"loss {losses[i]:.3f}, {accuracies[i]:.1f} %")
    held = sum(s.data.nbytes for x in jax.tree.leaves(state) for s in x.addressable_shards[:1])
    result = f"loss {losses[args.steps]:.4f}, test accuracy {accuracies[args.steps]:.2f} %"
    console.print(f"{name}: {result}, {held:,} bytes of state on a device", soft_wrap=True)
    return {"params": params, "state": state, "losses": losses, "accuracies": accuracies}


def store(path: Path, run: dict[str, Any]) -> None:
    """Each process writes the parts of its own devices, and waits for the others."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, run, force=True)


def restored(path: Path, run: dict[str, Any]) -> dict[str, Any]:
    """What was stored, placed as the arrays of `run` are."""
    here = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), run)
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, here)


def plot(path: Path, results: dict[str, dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for i, (name, result) in enumerate(results.items()):
        style = {"label": name, "linewidth": 1 + 2 * i, "color": ("C3", "0.7")[i % 2], "zorder": 2 - i}
        left.plot(*zip(*result["losses"].items(), strict=True), **style)
        right.plot(*zip(*result["accuracies"].items(), strict=True), **style)
    left.set(xlabel="step", ylabel="training loss", yscale="log")
    right.set(xlabel="step", ylabel="test accuracy, %")
    left.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.train_multihost", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--coordinator", default="127.0.0.1:12355", help="HOST:PORT of process 0 (default: %(default)s)")
    add("--processes", type=positive(int), default=1, help="how many there are (default: %(default)s)")
    add("--process", type=int, default=0, help="which one this is, from 0 (default: %(default)s)")
    add("--cpu-devices", type=positive(int), help="make so many devices of this process's CPU; default: what JAX finds")
    add("--steps", type=positive(int), default=200, help="the run ends at this step (default: %(default)s)")
    add("--batch-size", type=positive(int), default=256, help="of all processes together (default: %(default)s)")
    add("--learning-rate", type=positive(float), default=3e-3, help="after 20 steps (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--cache", type=Path, help="folder for the digits; default: the user's cache folder")
    add("--out", type=Path, default=Path("runs/train_multihost"), help="for run and curves (default: %(default)s)")
    add("--resume", action="store_true", help="go on from the run stored there")
    add("--compare", action="store_true", help="train with optax as well, on the same batches")
    args = parser.parse_args(argv)
    if not 0 <= args.process < args.processes:
        parser.error(f"--process: got {args.process}, expected one of 0 to {args.processes - 1}, less than --processes")
    return args


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    args = parse_args(argv)
    if args.cpu_devices:  # before anything asks JAX for devices
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.cpu_devices)
    if args.processes > 1:
        jax.distributed.initialize(args.coordinator, num_processes=args.processes, process_id=args.process)
    console = Console(quiet=args.process > 0)
    data = idx.read_mnist(idx.cached_digits(args.cache))
    if args.batch_size % jax.device_count() or args.batch_size > len(data.train_images):
        expected = f"a multiple of {jax.device_count()}, all devices, and at most {len(data.train_images)}"
        raise SystemExit(f"--batch-size: got {args.batch_size}, expected {expected}")
    console.print(f"{jax.process_count()} processes, {jax.device_count()} devices, {args.batch_size} images a step")

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere = jax.NamedSharding(mesh, jax.P())
    rate = optax.linear_schedule(0.0, args.learning_rate, 20)
    tx = fusedopt.zero1(fusedopt.adamw(rate, weight_decay=0.1, clip_norm=1.0), mesh)
    params = MLP().init(jax.random.key(args.seed), data.train_images[:1])["params"]  # the same in every process
    flat = jax.device_put(fusedopt.pack(params, tx), everywhere)
    now, stored, first = {"params": flat, "state": tx.init(flat)}, args.out.absolute() / "run", 0
    if args.resume:
        if not stored.exists():
            raise SystemExit(f"--resume: there is no {stored}; run without it first")
        now = restored(stored, now)
        first = int(now["state"].count)  # a step that was skipped is taken again
        if first >= args.steps:
            raise SystemExit(f"--steps: got {args.steps}, expected more than the {first} of the run in {stored}")
    results = {"fusedopt": run("fusedopt", tx.train_step(loss_fn), *now.values(), data, args, mesh, first, console)}
    store(stored, {name: results["fusedopt"][name] for name in ("params", "state")})
    if args.compare:
        rival = optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.1, mask=fusedopt.weight_mask)
        )
        params = jax.device_put(params, everywhere)
        state = jax.jit(rival.init, out_shardings=everywhere)(params)
        results["optax"] = run("optax", optax_step(rival), params, state, data, args, mesh, 0, console)
    if jax.process_index() == 0:
        plot(args.out / "curves.png", results)
    console.print(f"stored in {stored}, curves in {args.out / 'curves.png'}", soft_wrap=True)
    if args.processes > 1:
        jax.distributed.shutdown()  # waits for the others
    return results


if __name__ == "__main__":
    main()
