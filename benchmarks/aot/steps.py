"""The steps that are compiled: every rule, mode and backend, on trees of abstract arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import fusedopt
from benchmarks.aot import compiler

RULES: dict[str, Callable[..., Any]] = {
    "sgd": lambda **k: fusedopt.sgd(0.1, **k),
    "momentum": lambda **k: fusedopt.sgd(0.1, momentum=0.9, **k),
    "nesterov": lambda **k: fusedopt.sgd(0.1, momentum=0.9, nesterov=True, **k),
    "adam": lambda **k: fusedopt.adam(1e-3, **k),
    "adamw": lambda **k: fusedopt.adamw(1e-3, **k),
    "adamw full": lambda **k: fusedopt.adamw(1e-3, master_weights=True, ema_decay=0.999, clip_norm=1.0, **k),
    "adamw eps_inside": lambda **k: fusedopt.adamw(1e-3, eps_inside=True, **k),
    "nadamw": lambda **k: fusedopt.adamw(1e-3, nesterov=True, **k),
    "lion": lambda **k: fusedopt.lion(1e-4, **k),
    "lamb": lambda **k: fusedopt.lamb(1e-3, **k),
    "lars": lambda **k: fusedopt.lars(0.1, **k),
    "lars optax": lambda **k: fusedopt.lars(0.1, trust_ratio="optax", **k),
}

MODES = ("flat", "apply", "update")

PACKED, DEFAULT = fusedopt.Packing(solo_from=None), fusedopt.Packing()


@dataclasses.dataclass(frozen=True)
class Step:
    """What is compiled: `rule` of RULES or "optax", in a mode, with or without a look for NaN."""

    rule: str
    mode: str = "flat"
    backend: str | None = None
    packing: fusedopt.Packing = PACKED
    guard: bool = False

    def optimizer(self) -> Any:
        if self.rule == "optax":
            return optax.adamw(1e-3, weight_decay=1e-4, mask=fusedopt.weight_mask)
        packing = self.packing
        if self.backend == "mosaic" and self.rule.startswith(("lars", "lamb")):
            packing = dataclasses.replace(packing, align=1024)  # its norms are those of whole blocks
        return RULES[self.rule](backend=self.backend, packing=packing, skip_nonfinite=self.guard)


def stack(layers: int, width: int = 64) -> dict:
    """Parameters of `layers` equal layers: a kernel, a bias and a scale each."""
    square, vector = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((width, width), (width,)))
    return {f"layer_{i}": {"kernel": square, "bias": vector, "scale": vector} for i in range(layers)}


def ragged(dtype: Any = jnp.float32) -> dict:
    """Few leaves and all kinds of them: odd sizes, 0-d, empty, below and above a block, one that stays alone."""
    shapes = {"a": {"kernel": (3, 5), "bias": (5,)}, "b": {"kernel": (64, 33), "scale": (128,)}, "scalar": ()}
    shapes |= {"block": (32, 32), "empty": (0, 3), "conv": (3, 3, 16, 16), "large": {"kernel": (256, 128)}}
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    return jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, dtype), shapes, is_leaf=is_shape)


def compiled(step: Step, target: str, tree: Any, gradient_dtype: Any = None) -> compiler.Compiled:
    """A whole step, parameters and state donated and returned in one order, for a target."""
    tx = step.optimizer()
    params = tree
    if step.mode == "flat" and step.rule != "optax":
        params = jax.eval_shape(lambda tree: fusedopt.pack(tree, tx), tree)
    state = jax.eval_shape(tx.init, params)
    grads = params
    if gradient_dtype is not None:
        grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, gradient_dtype), params)

    def run(params, state, grads):
        if step.mode != "update" and step.rule != "optax":
            return tx.apply(grads, state, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    with jax.numpy_dtype_promotion("standard"):  # optax divides by its count
        return compiler.compile_for(target, run, params, state, grads, donate=(0, 1))
