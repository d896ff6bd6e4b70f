"""How each candidate takes a step of a tree: ours, optax's and PyTorch's, and a copy, which no step can beat.

The gradients are ready made, so a step is the optimizer alone. All take `(params, state)` and return them in this
order, donated: what optax would cost without donation is not of interest.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fusedopt
from benchmarks.cases import Tree
from benchmarks.programs import MissingError, Program, relaxed
from fusedopt.reports import bandwidth

LR, DECAY = 1e-3, 1e-4
MASK = fusedopt.weight_mask
ADAMW_BYTES = 28
"""That a step of AdamW must move for a float32 parameter: reads w, g, m and v, writes w, m and v."""

FLATTEN_UP_TO = 1000
"""Leaves that `optax.flatten` is given: it joins and splits all of them in one program, which XLA compiles slowly."""

Build = Callable[[], Any]


CLIP_NORM, EMA_DECAY = 1.0, 0.999


def ours(
    rule: str, guard: bool, packing: fusedopt.Packing | None = None, parts: bool = False
) -> fusedopt.FusedTransformation:
    """`parts`: with clipping and an average of the parameters."""
    if parts:
        options = {"clip_norm": CLIP_NORM, "ema_decay": EMA_DECAY}
        return fusedopt.adamw(LR, weight_decay=DECAY, skip_nonfinite=guard, packing=packing, **options)
    if rule == "lars":  # in optax's form, so that both compute the same
        return fusedopt.lars(LR, DECAY, trust_ratio="optax", skip_nonfinite=guard, packing=packing)
    return fusedopt.adamw(LR, weight_decay=DECAY, skip_nonfinite=guard, packing=packing)


def theirs(rule: str) -> optax.GradientTransformation:
    if rule == "lars":
        return optax.lars(LR, DECAY, weight_decay_mask=MASK, trust_ratio_mask=MASK)
    return optax.adamw(LR, weight_decay=DECAY, mask=MASK)


def flattened() -> optax.GradientTransformation:
    """AdamW with its moments in one vector. The decay stays outside: a mask of leaves has no meaning inside."""
    return optax.chain(
        optax.flatten(optax.scale_by_adam()), optax.add_decayed_weights(DECAY, MASK), optax.scale_by_learning_rate(LR)
    )


def tree_program(tree: Tree, tx: optax.GradientTransformation) -> Program:
    """The step of optax's protocol: updates, then `optax.apply_updates`."""

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = tree.device_params()
    with relaxed():
        state = jax.tree.map(jnp.copy, tx.init(params))  # optax may hand out one array of zeros twice
    return Program(step, (params, state), (tree.device_grads,))


def apply_program(tree: Tree, tx: fusedopt.FusedTransformation) -> Program:
    def step(params, state, grads):
        return tx.apply(grads, state, params)

    params = tree.device_params()
    return Program(step, (params, tx.init(params)), (tree.device_grads,))


def flat_program(tree: Tree, tx: fusedopt.FusedTransformation) -> Program:
    def step(params, state, grads):
        return tx.apply(grads, state, params)

    params = tree.packed_params(tx)
    return Program(step, (params, tx.init(params)), (tree.packed_grads(tx),), lambda held: held[0].tree)


def parts_program(tree: Tree) -> Program:
    """Of what optax has for it: clipping, AdamW, skipped steps, and an average behind them."""
    clipped = optax.chain(optax.clip_by_global_norm(CLIP_NORM), theirs("adamw"))
    tx = optax.apply_if_finite(clipped, 5)

    def step(params, state, average, grads):
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return params, state, optax.incremental_update(params, average, 1 - EMA_DECAY)

    params = tree.device_params()
    with relaxed():
        state = jax.tree.map(jnp.copy, tx.init(params))
    return Program(step, (params, state, tree.device_params()), (tree.device_grads,))


def parts_builders(tree: Tree) -> dict[str, Build]:
    """A step that is clipped, guarded and averaged: optax's parts, then ours."""
    tx = ours("adamw", guard=True, parts=True)
    return {
        "optax": lambda: parts_program(tree),
        "flat": lambda: flat_program(tree, tx),
        "apply": lambda: apply_program(tree, tx),
    }


SOLO_FROM = (1, 4096, 16384, 65536, 262144, None)


def packing_builders(tree: Tree) -> dict[str, Build]:
    """AdamW with other limits between packed leaves and those that stay alone; the baseline is optax."""
    builds: dict[str, Build] = {"optax": lambda: tree_program(tree, theirs("adamw"))}
    for solo_from in SOLO_FROM:
        tx = ours("adamw", False, fusedopt.Packing(solo_from=solo_from))
        builds[f"flat {solo_from}"] = functools.partial(flat_program, tree, tx)
        builds[f"apply {solo_from}"] = functools.partial(apply_program, tree, tx)
    return builds


def builders(
    tree: Tree, rule: str = "adamw", guard: bool = False, names: Sequence[str] | None = None
) -> dict[str, Build]:
    """The candidates for a tree, the baseline first.

    Args:
        rule: "adamw" or "lars".
        guard: whether ours skip steps that are not finite; optax's rival is then `apply_if_finite`.
        names: a choice of them.
    """
    tx = ours(rule, guard)
    builds: dict[str, Build] = {"optax": lambda: tree_program(tree, theirs(rule))}
    if guard:
        builds["apply_if_finite"] = lambda: tree_program(tree, optax.apply_if_finite(theirs(rule), 5))
    builds |= {
        "flat": lambda: flat_program(tree, tx),
        "apply": lambda: apply_program(tree, tx),
        "update": lambda: tree_program(tree, tx),
    }
    if rule == "adamw" and not guard:
        builds["optax.flatten"] = functools.partial(_flatten_program, tree)
        for how in ("fused", "foreach"):
            builds[f"torch {how}"] = functools.partial(TorchSteps, how, tree)
    return {name: build for name, build in builds.items() if names is None or name in names}


def _flatten_program(tree: Tree) -> Program:
    if tree.leaves > FLATTEN_UP_TO:
        raise MissingError(f"compiles too slowly beyond {FLATTEN_UP_TO} leaves")
    return tree_program(tree, flattened())


class TorchSteps:
    """`torch.optim.AdamW` on the CPU, its own implementations over many tensors: "fused" or "foreach"."""

    def __init__(self, how: str, tree: Tree):
        # Its threads would otherwise spin between parallel regions, and take the cores from whoever's turn is next. On a
        # machine with other work they even wait for each other: 24 ms for a step that takes 0.5.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        try:
            import torch
        except ImportError:
            raise MissingError("torch is not installed") from None
        params, grads, weights = map(jax.tree.leaves, (tree.params, tree.grads, MASK(tree.params)))
        self.tensors = [torch.tensor(x, requires_grad=True) for x in params]
        for tensor, grad in zip(self.tensors, grads, strict=True):
            tensor.grad = torch.tensor(grad)
        groups = [
            {"params": [t for t, w in zip(self.tensors, weights, strict=True) if w is wanted], "weight_decay": decay}
            for wanted, decay in ((True, DECAY), (False, 0.0))
        ]
        self.optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=LR, **{how: True})

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.step()

    def parameters(self) -> list[np.ndarray]:
        return [t.detach().numpy() for t in self.tensors]


COPIES = bandwidth.ON_HOST
"""Ways to move memory, which no step can beat."""


def fits(tree: Tree, candidates: int) -> bool:
    """Whether that many candidates have room in memory at once, with the gradients and temporary trees."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 4 * tree.parameters * (6 + 3 * candidates) + 4 * bandwidth.HOST_SIZE * 4 < 0.7 * physical
