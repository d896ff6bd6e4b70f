"""Balance poles by PPO with deep, narrow networks: sixty small arrays, where the optimizer is a large part of a step.

    python -m examples.rl_many_small
    python -m examples.rl_many_small --compare     # optax on the same seeds, and how long the steps take

The environment is written in JAX, so an iteration is one call: episodes and all gradient steps. Where it is not, each
gradient step is a call from Python that passes every array, and there `FlatParams` pay. Within one call they save kernels
only: on a CPU about nothing for sixty arrays, more for deeper networks (`--blocks 8`). `--compare` measures both.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

import fusedopt
from benchmarks import timing
from examples import cart_pole, ppo
from examples.mnist_mlp import positive

WIDTH, NORM, EPS, SECONDS = 32, 0.5, 1e-5, 20.0  # `SECONDS` to time for


class ActorCritic(nn.Module):
    """States (batch, 4) to logits (batch, 2) and values (batch,): two residual networks that share nothing."""

    blocks: int

    @nn.compact
    def __call__(self, x):
        outs = []
        for name, outputs in (("actor", 2), ("critic", 1)):
            y = nn.Dense(WIDTH, name=f"{name}_in")(x)
            for i in range(self.blocks):
                z = nn.LayerNorm(name=f"{name}_norm_{i}")(y)
                z = nn.relu(nn.Dense(WIDTH, name=f"{name}_up_{i}")(z))
                y = y + nn.Dense(WIDTH, name=f"{name}_down_{i}")(z)
            y = nn.LayerNorm(name=f"{name}_norm")(y)
            outs.append(nn.Dense(outputs, kernel_init=nn.initializers.normal(0.01), name=f"{name}_out")(y))
        return outs[0], outs[1][:, 0]


def tree_of(params: Any) -> Any:
    return params.tree if isinstance(params, fusedopt.FlatParams) else params


class Programs:
    """The jitted functions of one optimizer in one mode. Parameters and state come first and are donated."""

    def __init__(self, net: ActorCritic, tx: Any, mode: str):
        self.net, self.tx, self.mode = net, tx, mode
        jit = partial(jax.jit, donate_argnums=(0, 1))
        self.step, self.steps, self.iteration = jit(self._step), jit(self._steps), jit(self._iteration)

    def init(self, key: jax.Array) -> list[Any]:
        params = jax.jit(self.net.init)(key, jnp.zeros((1, 4)))
        params = fusedopt.pack(params, self.tx) if self.mode == "flat" else params
        return [params, self.tx.init(params)]

    def _step(self, params, state, data, i):
        batch = jax.tree.map(lambda x: x[i], data)
        loss, grads = jax.value_and_grad(lambda p: ppo.loss(self.net.apply, tree_of(p), batch))(params)
        if self.mode != "optax":
            return *self.tx.apply(grads, state, params), loss
        updates, state = self.tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    def _steps(self, params, state, data):
        def body(held, i):
            *held, loss = self._step(*held, data, i)
            return tuple(held), loss

        held, losses = jax.lax.scan(body, (params, state), jnp.arange(ppo.UPDATES))
        return *held, losses

    def _iteration(self, params, state, carts, key):
        carts, data = ppo.rollout(self.net.apply, tree_of(params), carts, key)
        return *self._steps(params, state, data), carts


class Run(NamedTuple):
    returns: np.ndarray  # (seeds, iterations): steps of each cart's latest episode, their mean
    losses: np.ndarray  # (seeds, iterations, ppo.UPDATES)


def train(name: str, programs: Programs, args: argparse.Namespace, console: Console) -> Run:
    returns, losses = [], []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}")
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        for seed in args.seeds:
            bar, key = progress.add_task(f"{name}, seed {seed}", total=args.iterations, note=""), jax.random.key(seed)
            held, carts = programs.init(key), cart_pole.reset(key, ppo.CARTS)
            for i in range(args.iterations):
                *held, loss, carts = programs.iteration(*held, carts, jax.random.fold_in(key, i))
                losses.append(np.asarray(loss))
                returns.append(float(np.mean(carts.returns)))
                progress.update(bar, advance=1, note=f"return {returns[-1]:.0f}")
    return Run(np.reshape(returns, (len(args.seeds), -1)), np.reshape(losses, (len(args.seeds), args.iterations, -1)))


def speed(all_programs: dict[str, Programs], seconds: float) -> dict[str, dict[str, list[float]]]:
    """Seconds of an iteration's gradient steps, by way to call them and optimizer; the optimizers take turns."""
    some, key, carts = all_programs["optax"], jax.random.key(0), cart_pole.reset(jax.random.key(0), ppo.CARTS)
    _, data = jax.jit(partial(ppo.rollout, some.net.apply))(some.init(key)[0], carts, key)

    def each_a_call(programs, *held):
        for i in range(ppo.UPDATES):
            *held, _ = programs.step(*held, data, i)
        return held

    calls = {
        "each a call": each_a_call,
        "one call": lambda programs, *held: programs.steps(*held, data)[:2],
        "one call, with episodes": lambda programs, *held: programs.iteration(*held, carts, key)[:2],
    }

    def sampler(programs: Programs, call: Callable) -> timing.Sampler:
        held = programs.init(key)

        def sample() -> float:
            begin = time.perf_counter()
            held[:] = jax.block_until_ready(call(programs, *held))
            return time.perf_counter() - begin

        sample()  # compiles
        return sample

    samplers = {way: {name: sampler(p, call) for name, p in all_programs.items()} for way, call in calls.items()}
    return {way: timing.interleave(each, seconds / len(calls)) for way, each in samplers.items()}


def plot(path: Path, runs: dict[str, Run]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for (name, run), color in zip(runs.items(), ("C3", "0.5")):
        steps = ppo.CARTS * ppo.STEPS * np.arange(1, run.returns.shape[1] + 1)
        axes.plot(steps, run.returns.T, color=color, linewidth=0.5)
        axes.plot(steps, run.returns.mean(0), color=color, label=f"{name}, mean of {len(run.returns)} seeds")
    axes.set(xlabel="steps of the environment", ylabel="steps until a pole falls, at most 500")
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.rl_many_small", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--mode", choices=("optax", "apply", "flat"), default="flat", help="of fusedopt (default: %(default)s)")
    add("--blocks", type=positive(int), default=4, help="of each network, 6 arrays each (default: %(default)s)")
    add("--iterations", type=positive(int), default=150, help="of 512 steps of a cart (default: %(default)s)")
    add("--learning-rate", type=positive(float), default=1e-3, help="falls to 0 (default: %(default)s)")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="a run for each (default: 0 1 2)")
    add("--compare", action="store_true", help="train with optax on the same seeds, and time the steps")
    add("--plot", type=Path, default=Path("runs/rl_many_small.png"), help="the picture (default: %(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> dict[str, Run]:
    args, console = parse_args(argv), Console()
    net = ActorCritic(args.blocks)
    rate = optax.linear_schedule(args.learning_rate, 0, args.iterations * ppo.UPDATES)
    programs = {"fusedopt": Programs(net, fusedopt.adam(rate, eps=EPS, clip_norm=NORM), args.mode)}
    if args.compare:
        theirs = optax.chain(optax.clip_by_global_norm(NORM), optax.adam(rate, eps=EPS))
        programs["optax"] = Programs(net, theirs, "optax")
    runs = {name: train(name, p, args, console) for name, p in programs.items()}
    plot(args.plot, runs)
    for name, run in runs.items():
        last = run.returns[:, -10:].mean(1).round().astype(int)
        console.print(f"{name}: return by seed, mean of the last 10 iterations: {last} of {cart_pole.LIMIT}")
    if args.compare:
        ours, theirs = (runs[name].losses[:, 0] for name in ("fusedopt", "optax"))
        apart = np.max(np.abs(ours - theirs) / np.abs(theirs))
        console.print(f"first iteration: losses equal but for {apart:.1e}; later, other rounding is other actions")
        programs["bare"] = Programs(net, optax.sgd(1e-6), "optax")  # next to no optimizer
        table = Table("gradient steps", "optax / fusedopt", "optimizer's part in optax", title="Ratios of times")
        for name, times in speed(programs, SECONDS).items():
            ratio, bare = (timing.ratio(times[n], times["optax"])["ratio"] for n in ("fusedopt", "bare"))
            table.add_row(name, f"{ratio:.2f}", f"{1 - 1 / bare:.0%}")
        console.print(table)
    console.print(f"curves in {args.plot}")
    return runs


if __name__ == "__main__":
    main()
