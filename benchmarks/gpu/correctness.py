"""Whether every rule, mode and backend computes on this device what its formula says, in float64 on the host.

The formulas are those of the tests (`tests/helpers.py`). The gradients are new in each run, from the run's seed.
"""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fusedopt
import pallas_kernels
from benchmarks.gpu import timing
from benchmarks.gpu.record import Run

RULES = ("adamw", "lars", "momentum", "sgd", "adam", "nesterov", "lars_optax")
MODES = ("flat", "apply", "update")
LEARNING_RATE = 1e-2

TOLERANCE = 2e-6
"""Of the largest parameter, after 50 steps of a few float32 roundings each."""

SECONDS = 1.0
"""That a row takes, compiling included."""


@functools.cache
def helpers() -> Any:
    """The module `tests/helpers.py`, by its place: another package of the name `tests` may be installed."""
    path = pathlib.Path(__file__).parents[2] / "tests" / "helpers.py"
    if not path.exists():
        raise timing.MissingError(f"needs a checkout: {path} is missing")
    spec = importlib.util.spec_from_file_location("fusedopt_tests_helpers", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module


def backends(run: Run) -> tuple[str, ...]:
    """Those that run here, the preferred one first. A tiny run on a CPU has all that JAX can interpret."""
    support = pallas_kernels.supported_backends()
    if run.tiny and jax.default_backend() == "cpu":
        return tuple(b for b in support if b != "mosaic" or jax.version.__version_info__ >= (0, 11))
    return tuple(b for b, s in support.items() if s)


def packing(rule: str, backend: str | None) -> fusedopt.Packing:
    """Norms by Mosaic kernels need leaves that begin on whole blocks."""
    aligned = backend == "mosaic" and rule.startswith("lars")
    return fusedopt.Packing(align=pallas_kernels.BLOCK if aligned else pallas_kernels.ROW)


class Problem:
    """A ragged tree, gradients for some steps, and what comes out in float64.

    The tree has leaves of no and of one dimension, empty ones, odd sizes, sizes drawn anew in each run, leaves above
    the size of a block and above that from which on a leaf has a buffer of its own.
    """

    def __init__(self, seed: int, steps: int, dtype: Any = None, tiny: bool = False):
        h, rng = helpers(), np.random.default_rng(seed)
        drawn = {f"leaf_{i}": {"kernel": (int(n), 3)} for i, n in enumerate(rng.integers(1, 2000, 3))}
        shapes = {**h.RAGGED, "block": {"kernel": (33, 65), "bias": (1025,)}, "whole": {"kernel": (32, 64)}, **drawn}
        if tiny:
            shapes = {"block": {"kernel": (33, 65), "bias": (129,)}, "empty": {"kernel": (0, 3)}, "temperature": ()}
        self.params = h.filled(shapes, seed=seed % 1000)
        if dtype is not None:  # every other one
            leaves, treedef = jax.tree.flatten(self.params)
            self.params = treedef.unflatten([x.astype(dtype) if i % 2 else x for i, x in enumerate(leaves)])

        def draw(x):
            return (0.5 * rng.standard_normal() + rng.standard_normal(x.shape)).astype(x.dtype)

        # As NumPy has no bfloat16 of its own, the oracle sees what `astype` left of each number.
        self.grads = [jax.tree.map(draw, self.params) for _ in range(steps)]
        self.on_device = [jax.device_put(g) for g in self.grads]
        self._answers: dict[str, Any] = {}

    def answer(self, rule: str) -> Any:
        if rule not in self._answers:
            oracle = helpers().case(rule).oracle(self.params, LEARNING_RATE)
            for g in self.grads:
                oracle.step(g)
            self._answers[rule] = oracle.tree
        return self._answers[rule]


class Program:
    """One rule in one mode by one backend, as a jitted step `(params, state, grads) -> (params, state, updates)`."""

    def __init__(self, problem: Problem, rule: str, mode: str, backend: str | None, donate: bool = True):
        self.mode = mode
        self.tx = helpers().case(rule).make(LEARNING_RATE, backend=backend, packing=packing(rule, backend))
        params = fusedopt.pack(problem.params, self.tx) if mode == "flat" else problem.params
        self.first = jax.tree.map(lambda x: np.array(x), (params, self.tx.init(params)))
        self.lowered = timing.lower(self.step, (*self.start(), problem.on_device[0]), 2 if donate else 0)

    def start(self) -> Any:
        return jax.device_put(self.first, may_alias=False)

    def step(self, params, state, grads):
        if self.mode == "update":
            updates, state = self.tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, updates
        if self.mode == "flat":
            grads = fusedopt.pack(grads, self.tx)
        return (*self.tx.apply(grads, state, params), ())

    def compile(self) -> None:
        self.call = self.lowered.compile()

    def tree(self, params: Any) -> Any:
        return params.tree if self.mode == "flat" else params


def host(tree: Any) -> Any:
    """Copies of the arrays: on a CPU a view would change with a donated buffer."""
    return jax.tree.map(lambda x: np.array(x, copy=True), tree)


def same_bits(a: Any, b: Any) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in pairs)


def follow(program: Program, problem: Problem, rule: str) -> dict[str, Any]:
    """All steps against float64; then one with a NaN and one with an inf, which must leave every bit as it was."""
    params, state = program.start()
    for g in problem.on_device:
        params, state, _ = program.call(params, state, g)
    want = problem.answer(rule)
    off = jax.tree.map(lambda a, b: np.asarray(a, np.float64) - b, host(program.tree(params)), want)
    kept = True
    for bad, place in ((np.nan, 0), (np.inf, -1)):
        before = host((params, state))
        grads = host(problem.grads[0])
        sizable = [x for x in jax.tree.leaves(grads) if x.size]
        sizable[place].reshape(-1)[place] = bad
        params, state, updates = program.call(params, state, jax.device_put(grads))
        after = host((params, state._replace(skipped=before[1].skipped, total_skipped=before[1].total_skipped)))
        still = not any(np.any(np.asarray(u)) for u in jax.tree.leaves(updates))
        kept &= same_bits(before, after) and still and bool(state.skipped)
    measured = helpers().largest(off) / helpers().largest(want)
    ok = measured <= TOLERANCE and kept and int(state.count) == len(problem.grads) and int(state.total_skipped) == 2
    return {"ok": ok, "measured": measured, "tolerance": TOLERANCE, "bad_steps_change_nothing": kept}


def undonated(program: Program, problem: Problem, rule: str) -> dict[str, Any]:
    """What is not donated keeps its bits, and the same step from it gives the same bits twice, norms included."""
    start = program.start()
    outs = [host(program.call(*start, problem.on_device[0])) for _ in range(2)]
    kept, same = same_bits(host(start), program.first), same_bits(*outs)
    return {"ok": kept and same, "arguments_kept": kept, "same_twice": same}


def half_precision(program: Program, problem: Problem, rule: str) -> dict[str, Any]:
    """Each step of a tree with bfloat16 leaves, from where the device is: it may round once, to the nearest.

    `measured` is the error in units of what rounding may do, so at most 1; a 20th more for float32 on the way.
    """
    oracle = helpers().case(rule).oracle(problem.params, LEARNING_RATE)
    params, state = program.start()
    worst = 0.0
    for g, on_device in zip(problem.grads, problem.on_device, strict=True):
        want = jax.tree.leaves(oracle.step(g))
        params, state, _ = program.call(params, state, on_device)
        got = jax.tree.leaves(host(program.tree(params)))
        for a, b in zip(got, want, strict=True):
            rounding = (2.0**-8 if a.dtype == jnp.bfloat16 else 0.0) * np.abs(b) + TOLERANCE * helpers().largest(want)
            worst = max(worst, float(np.max(np.abs(a.astype(np.float64) - b) / rounding, initial=0.0)))
        oracle.leaves = [x.astype(np.float64) for x in got]
    return {"ok": worst <= 1.05, "measured": worst, "tolerance": 1.05}


def finds_nan(run: Run, problem: Problem) -> dict[str, Any]:
    """`fusedopt.has_nan` on the whole tree: not there, then in each leaf in turn, at a place drawn anew."""
    has_nan, rng = jax.jit(fusedopt.has_nan), np.random.default_rng(run.seed)
    right = not has_nan(problem.on_device[0])
    count = len(jax.tree.leaves(problem.grads[0]))
    for i in range(count):
        grads = host(problem.grads[0])
        leaf = jax.tree.leaves(grads)[i].reshape(-1)
        if leaf.size:
            leaf[rng.integers(leaf.size)] = np.nan
            right &= bool(has_nan(grads))
    return {"ok": bool(right)}


def part(run: Run) -> None:
    """One row for each check. The programs of a rule are compiled together."""
    names = backends(run)
    problem = Problem(run.seed, 3 if run.tiny else 50, tiny=run.tiny)
    for rule in RULES[:2] if run.tiny else RULES:
        also = (None,) if rule in ("adamw", "lars") else ()
        _check(run, problem, rule, [("50 steps", follow, mode, b, True) for b in (*also, *names) for mode in MODES])
    run.attempt({"part": "correctness", "what": "has_nan"}, lambda: finds_nan(run, problem))
    mixed = Problem(run.seed, 3 if run.tiny else 10, jnp.bfloat16, run.tiny)
    for rule in RULES[:1] if run.tiny else RULES[:2]:
        _check(run, problem, rule, [("not donated", undonated, m, b, False) for b in names for m in MODES[:2]])
        _check(run, mixed, rule, [("bfloat16", half_precision, m, b, True) for b in names for m in MODES[:2]])


def _check(run: Run, problem: Problem, rule: str, rows: list[tuple]) -> None:
    programs, labels, compiler = {}, {}, timing.Compiler()
    for key in rows:
        what, _, mode, backend, donate = key
        labels[key] = {"part": "correctness", "what": what, "rule": rule, "mode": mode, "backend": backend or "best"}
        build = functools.partial(Program, problem, rule, mode, backend, donate)
        program = run.attempt(labels[key], build, SECONDS)
        if program is not None:
            programs[key] = program
            compiler.start(key, program)
    for key, error in compiler.errors().items():
        run.fail(labels[key], error)
        del programs[key]
    for key, program in programs.items():
        run.attempt(labels[key], functools.partial(key[1], program, problem, rule), 0.2)
