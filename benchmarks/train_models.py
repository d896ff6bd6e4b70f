"""Small networks in Flax, for whole train steps: forward, backward and update in one jitted function.

Batches are small, as they are where the optimizer's share of a step can be felt. The data are random: nothing is
trained, only timed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import fusedopt
from benchmarks import models, peers
from benchmarks.programs import Program, relaxed


class ActorCritic(nn.Module):
    """Two tanh networks that share nothing, as in PPO (Schulman et al. 2017), for 6 discrete actions."""

    actions: int = 6

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        outs = []
        for name, outputs in (("actor", self.actions), ("critic", 1)):
            y = x
            for i in range(2):
                y = nn.tanh(nn.Dense(64, name=f"{name}_{i}")(y))
            outs.append(nn.Dense(outputs, name=f"{name}_out")(y))
        return outs[0], outs[1][:, 0]


class Deep(nn.Module):
    """Many narrow layers with norms, each added to what it gets so that gradients reach the first."""

    layers: int
    width: int = 48
    classes: int = 10

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(self.layers):
            y = nn.Dense(self.width, name=f"dense_{i:03}")(x)
            x = x + nn.relu(nn.LayerNorm(name=f"norm_{i:03}")(y))
        return nn.Dense(self.classes, name="head")(x)


class Cnn(nn.Module):
    """Twelve convolutions with group norms; the fifth and the ninth halve the image and double the channels."""

    layers: int = 12
    classes: int = 10

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(self.layers):
            stride = 2 if i in (4, 8) else 1
            y = nn.Conv(16 * 2 ** (i // 4), (3, 3), (stride, stride), use_bias=False, name=f"conv_{i:02}")(x)
            x = nn.relu(nn.GroupNorm(num_groups=8, name=f"norm_{i:02}")(y))
        return nn.Dense(self.classes, name="head")(x.mean((1, 2)))


class Mlp(nn.Module):
    """Wide dense layers: few and large arrays."""

    widths: Sequence[int] = (1024, 1024, 1024)
    classes: int = 10

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i, width in enumerate(self.widths):
            x = nn.relu(nn.Dense(width, name=f"dense_{i}")(x))
        return nn.Dense(self.classes, name="head")(x)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A network, its inputs and its loss.

    Attributes:
        inputs: shape of one example.
        loss: of the network's output and the batch's integer labels and targets.
    """

    module: nn.Module
    inputs: tuple[int, ...]
    batch: int = 32
    classes: int = 10
    loss: Callable[[Any, jax.Array, jax.Array], jax.Array] = lambda logits, labels, _: (
        optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    )


def policy_loss(outputs: tuple[jax.Array, jax.Array], actions: jax.Array, returns: jax.Array) -> jax.Array:
    """Advantage actor-critic (Mnih et al. 2016): the policy's gradient weighted by the advantage, the value's error."""
    logits, values = outputs
    advantage = jax.lax.stop_gradient(returns - values)
    surprise = optax.softmax_cross_entropy_with_integer_labels(logits, actions)
    return (advantage * surprise).mean() + optax.l2_loss(values, returns).mean()


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "actor_critic": lambda: Problem(ActorCritic(), (17,), batch=64, classes=6, loss=policy_loss),
    "deep_48": lambda: Problem(Deep(60), (48,)),
    "cnn_12": lambda: Problem(Cnn(), (16, 16, 3), batch=16),
    "mlp_3x1024": lambda: Problem(Mlp(), (784,)),
    "deep_200": lambda: Problem(Deep(200), (48,)),
}

MODES = ("optax", "flat", "apply")


class Train:
    """A problem with the numbers that all candidates start from."""

    def __init__(self, problem: Problem, seed: int = 0):
        self.problem = problem
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((problem.batch, *problem.inputs), np.float32)
        labels = rng.integers(0, problem.classes, problem.batch, np.int32)
        targets = rng.standard_normal(problem.batch, np.float32)
        self.batch = tuple(map(jnp.asarray, (x, labels, targets)))
        with relaxed():
            shapes = jax.eval_shape(problem.module.init, jax.random.key(0), self.batch[0])["params"]
        self.leaves, self.parameters = models.describe(shapes)
        self.params = jax.tree.map_with_path(lambda path, shape: _initial(rng, path[-1].key, shape.shape), shapes)

    def loss(self, params: Any, x: jax.Array, labels: jax.Array, targets: jax.Array) -> jax.Array:
        return self.problem.loss(self.problem.module.apply({"params": params}, x), labels, targets)

    def program(self, mode: str) -> Program:
        """AdamW in one of `MODES`; the loss is a third result. Ours look for no NaN: optax does not either."""
        if mode == "optax":
            tx = peers.theirs("adamw")

            def step(params, state, *batch):
                loss, grads = jax.value_and_grad(self.loss)(params, *batch)
                updates, state = tx.update(grads, state, params)
                return optax.apply_updates(params, updates), state, loss
        else:
            tx = peers.ours("adamw", guard=False)

            def step(params, state, *batch):
                def loss_fn(params):
                    return self.loss(params.tree if mode == "flat" else params, *batch)

                loss, grads = jax.value_and_grad(loss_fn)(params)
                return *tx.apply(grads, state, params), loss

        params = jax.device_put(self.params, may_alias=False)
        if mode == "flat":
            params = fusedopt.pack(params, tx)
        with relaxed():
            state = jax.tree.map(jnp.copy, tx.init(params))
        return Program(step, (params, state), self.batch, lambda held: held[0].tree if mode == "flat" else held[0])


def _initial(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Weights that keep the variance of what passes through them, norms that begin as they are.

    Drawn here since Flax's own `init` of 200 layers takes longer to compile than all that is measured.
    """
    if name != "kernel":
        return np.full(shape, float(name == "scale"), np.float32)
    inputs = np.prod(shape[:-1])
    return rng.standard_normal(shape, np.float32) * np.float32(1 / np.sqrt(inputs))
