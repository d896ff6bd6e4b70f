"""Steps of the optimizers on the trees of known models, beside optax under jit and beside PyTorch.

A step gets its gradients ready made, so it is the optimizer alone. `percent_of_ceiling` counts what a step must move:
each number read once and written once, float32. Models of a few million parameters fit in the caches of a large GPU
between two steps and can pass 100. `host_us` says how long the host needs to hand a step over: where that is as much as the
step, the device waits for the host, and the rows called "loop", many steps in one program, say what it can do.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax import lax

import fusedopt
from benchmarks import models
from benchmarks.gpu import correctness, pytorch
from benchmarks.gpu.record import Run
from benchmarks.gpu.timing import Candidate, JaxSteps, compare

MODELS = ("resnet50", "efficientnet_b0", "lora_7b", "gpt2_small", "many_small")

LR = 1e-3


@dataclasses.dataclass(frozen=True)
class Rule:
    """One optimizer in three libraries.

    Attributes:
        fused: takes the options of fusedopt.
        optax: the same from optax.
        torch: name and arguments of PyTorch's class, None if it has none.
        bytes: that a step must move for each float32 parameter.
    """

    fused: Callable[..., Any]
    optax: Callable[[], Any]
    torch: tuple[str, dict[str, Any]] | None
    bytes: int


mask = fusedopt.weight_mask
RULES = {
    # Reads w, g, m and v, writes w, m and v.
    "adamw": Rule(
        functools.partial(fusedopt.adamw, LR, weight_decay=1e-4),
        lambda: optax.adamw(LR, weight_decay=1e-4, mask=mask),
        ("AdamW", {"lr": LR, "weight_decay": 1e-4}),
        28,
    ),
    "momentum": Rule(
        functools.partial(fusedopt.sgd, LR, momentum=0.9),
        lambda: optax.sgd(LR, momentum=0.9),
        ("SGD", {"lr": LR, "momentum": 0.9}),
        20,
    ),
    # Reads w and g for their norms, then as momentum.
    "lars": Rule(
        functools.partial(fusedopt.lars, LR, weight_decay=1e-4),
        lambda: optax.lars(LR, weight_decay=1e-4, weight_decay_mask=mask, trust_ratio_mask=mask),
        None,
        28,
    ),
    "sgd": Rule(functools.partial(fusedopt.sgd, LR), lambda: optax.sgd(LR), ("SGD", {"lr": LR}), 12),
}


class Model:
    """Arrays of one tree, kept on the host: each candidate has copies of its own on the device."""

    def __init__(self, name: str, tiny: bool, seed: int):
        shapes = models.shapes(name)
        if tiny:
            shapes = dict(list(shapes.items())[:1] + list(shapes.items())[-1:])
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct([min(n, 40) for n in x.shape], x.dtype), shapes)
        rng = np.random.default_rng(seed)
        self.name = name
        self.leaves, self.parameters = models.describe(shapes)
        self.params, self.grads = (
            jax.tree.map(lambda x, s=scale: np.float32(s) * rng.standard_normal(x.shape, np.float32), shapes)
            for scale in (0.02, 1e-3)
        )
        self._packed: dict[Any, Any] = {}

    def packed(self, tx: Any) -> tuple[Any, Any]:
        """FlatParams of the parameters, on the host, and of the gradients, on the device."""
        key = tx.optimizer.packing
        if key not in self._packed:
            params, grads = (fusedopt.pack(x, tx) for x in (self.params, self.grads))
            self._packed[key] = jax.tree.map(np.asarray, params), grads
        return self._packed[key]

    @functools.cached_property
    def grads_on_device(self) -> Any:
        return jax.device_put(self.grads, may_alias=False)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to take a step. `backend` None is the library's own choice; `loop`: steps in one program."""

    mode: str  # "flat", "apply", "optax", "torch fused", "torch foreach"
    backend: str | None = None
    all_packed: bool = False
    skip: bool = False
    loop: int = 1


def variants(names: tuple[str, ...], full: bool) -> Iterator[list[Variant]]:
    """Most important first, in groups to be timed together: a kernel that kills the process takes its group along."""
    first = list(map(Variant, ("optax", "flat", "apply", "torch fused", "torch foreach")))
    if full:
        first += [Variant(mode, skip=True) for mode in ("flat", "apply")]
    yield [*first, Variant("flat", all_packed=True)]
    if names:
        yield [Variant("optax"), *(Variant(mode, b) for b in names for mode in ("flat", "apply"))]
    if full:
        yield [Variant("optax"), *(Variant("flat", b, all_packed=True) for b in names)]


def loops(names: tuple[str, ...]) -> Iterator[list[Variant]]:
    """What the device does without the host's calls."""
    yield [
        Variant("optax", loop=20),
        *(Variant(mode, skip=s, loop=20) for s in (False, True) for mode in ("flat", "apply")),
    ]
    yield [Variant("optax", loop=20), *(Variant(mode, b, loop=20) for b in names for mode in ("flat", "apply"))]


def rounds(run: Run) -> Iterator[tuple[tuple[str, ...], Sequence[str]]]:
    """Rules and the models they are timed on, most important first. A tiny run shows that the program works."""
    yield ("adamw",), run.models or MODELS[: 1 if run.tiny else None]
    yield ("lars",) if run.tiny else ("momentum", "lars", "sgd"), run.models or MODELS[-1 if run.tiny else None :]


def part(run: Run) -> None:
    names = correctness.backends(run)
    for rules, trees in rounds(run):
        for name in trees:
            model = Model(name, run.tiny, run.seed)
            for rule in rules:
                # Thousands of arrays take minutes to compile, and interpreted kernels seconds: there only the library's
                # own choice.
                some = () if name == "many_small" or rule == "sgd" or (run.tiny and rule != "adamw") else names
                time_all(run, model, rule, variants(some, full=(name, rule) == ("resnet50", "adamw")))
                if (name, rule) == ("resnet50", "adamw"):
                    time_all(run, model, rule, loops(names[-1:] if run.tiny else names))
            del model
            gc.collect()


def time_all(run: Run, model: Model, rule: str, groups: Iterable[Iterable[Variant]]) -> None:
    """Times the variants of one rule on one model, those of a group against each other."""
    for group in groups:
        compare(run, [candidate(model, rule, v, run.tiny) for v in group])
        gc.collect()
        pytorch.release()


def candidate(model: Model, rule: str, v: Variant, tiny: bool) -> Candidate:
    packing = correctness.packing(rule, v.backend)
    if v.all_packed:
        packing = dataclasses.replace(packing, solo_from=None)
    what = "loop" if v.loop > 1 else "step"
    if v.all_packed:
        what += ", all packed"
    if v.skip:
        what += ", skip_nonfinite"
    labels = {"part": "optimizers", "what": what, "model": model.name, "rule": rule, "mode": v.mode}
    if v.mode in ("flat", "apply"):
        labels |= {"backend": v.backend or "best", "packing": f"solo_from={packing.solo_from}, align={packing.align}"}
    if v.mode.startswith("torch"):
        build = functools.partial(torch_steps, model, rule, v.mode.split()[1], tiny)
    else:
        build = functools.partial(jax_steps, model, rule, v, packing)
    n = model.leaves
    # Compiled ahead of time, 3000 arrays took minutes and 161 some seconds: more than in proportion.
    seconds = 1.0 + {"optax": 0.01 * n + 1.3e-5 * n**2, "apply": 0.01 * n + 1.3e-5 * n**2, "flat": 0.003 * n}.get(
        v.mode, 0.0
    )
    return Candidate(labels, build, RULES[rule].bytes * model.parameters, seconds, baseline=v.mode == "optax")


def jax_steps(model: Model, rule: str, v: Variant, packing: fusedopt.Packing) -> JaxSteps:
    if v.mode == "optax":
        tx = RULES[rule].optax()

        def step(params, state, grads):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state
    else:
        tx = RULES[rule].fused(backend=v.backend, packing=packing, skip_nonfinite=v.skip)

        def step(params, state, grads):
            return tx.apply(grads, state, params)

    params, grads = model.packed(tx) if v.mode == "flat" else (model.params, model.grads_on_device)
    params = jax.device_put(params, may_alias=False)
    return JaxSteps(repeated(step, v.loop), [params, tx.init(params)], (grads,), inner=v.loop)


def repeated(step: Callable[..., Any], times: int) -> Callable[..., Any]:
    """That many steps in one program."""
    if times == 1:
        return step

    def many(params, state, grads):
        def body(_, carry):
            # Without the barrier XLA would look at the gradients, which stay the same, only once.
            carry, g = lax.optimization_barrier((carry, grads))
            return step(*carry, g)

        return lax.fori_loop(0, times, body, (params, state))

    return many


def torch_steps(model: Model, rule: str, how: str, tiny: bool) -> pytorch.TorchSteps:
    params, grads, weights = map(jax.tree.leaves, (model.params, model.grads, mask(model.params)))
    return pytorch.TorchSteps(RULES[rule].torch, how, params, grads, weights, tiny)
