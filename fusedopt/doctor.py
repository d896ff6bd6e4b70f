"""What is installed, which backend each device gets and why, and whether the backends compute what they should."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fusedopt
import pallas_kernels
from fusedopt.reports import render
from fusedopt.reports.backends import deprecated
from fusedopt.reports.render import Table
from pallas_kernels import compat, dispatch

PACKAGES = ("jax", "jaxlib", "optax", "flax", "numpy", "rich", "matplotlib")

STEPS = 3

TOLERANCE = 5e-6
"""Of the largest element of each leaf, after three steps of some float32 roundings each. (A correction of Adam's moments
by 1 - b^t is off by 1e-6 itself where b^t is computed in float32, as optax does.)"""

# All that a layout can have: small and large leaves, odd sizes, one number; 1024 is what Mosaic's norms want.
SHAPES = {
    "dense": {"kernel": (65, 33), "bias": (33,)},
    "norm": {"scale": (130,), "bias": (130,)},
    "conv": {"kernel": (3, 3, 4, 8)},
    "large": {"kernel": (129, 128)},
    "temperature": (),
}
PACKING = fusedopt.Packing(align=pallas_kernels.BLOCK)

Make = Callable[..., Any]
RULES: dict[str, tuple[Make, Make]] = {
    "adamw": (
        lambda **options: fusedopt.adamw(1e-2, weight_decay=0.1, **options),
        lambda mask: optax.adamw(1e-2, weight_decay=0.1, mask=mask),
    ),
    "lars": (  # a trust coefficient at which three steps change what they are to change
        lambda **options: fusedopt.lars(1.0, 0.1, trust_coefficient=0.1, trust_ratio="optax", **options),
        lambda mask: optax.lars(1.0, 0.1, mask, trust_coefficient=0.1, trust_ratio_mask=mask),
    ),
}


class Check(NamedTuple):
    """One thing that a backend computed.

    Attributes:
      backend, rule, mode: what was tested: rule "adamw" or "lars", mode "apply" or "flat".
      against: what it was compared with.
      error: largest difference of a leaf, of its largest element; None if there is no result.
      failure: what is wrong; empty if nothing is.
    """

    backend: str
    rule: str
    mode: str
    against: str
    error: float | None
    failure: str


class Doctor:
    """Everything that the command `doctor` says; prints itself as `report` does.

    Attributes:
      devices: those of this machine.
      checks: list of `Check`, of the default device.
      seconds: that the self-test took.
    """

    def __init__(self, interpret: bool = False, devices: Sequence[Any] | None = None):
        """Runs the self-test.

        Args:
          interpret: tests the kernel backends that cannot run here too, interpreted.
          devices: instead of those of this machine, for the table of backends.
        """
        self.devices = list(jax.devices() if devices is None else devices)
        self.interpreted: tuple[str, ...] = ()
        start = time.perf_counter()
        support = pallas_kernels.supported_backends()
        self.tested = tuple(name for name, s in support.items() if s)
        if interpret:
            self.interpreted = tuple(name for name, s in support.items() if not s and _interprets(name))
        truth: dict[tuple[str, str], Any] = {}
        self.checks = [c for name in ("xla", *self.tested[: self.tested.index("xla")]) for c in _checks(name, truth)]
        for name in self.interpreted:
            self.checks += _checks(name, truth, pallas_kernels.interpret)
        self.seconds = time.perf_counter() - start

    @property
    def healthy(self) -> bool:
        """Whether all checks passed."""
        return not any(c.failure for c in self.checks)

    @property
    def heading(self) -> str:
        return f"fusedopt {fusedopt.__version__}"

    def tables(self) -> list[Table]:
        """The findings as tables of text."""
        return [self._versions(), self._backends(), self._self_test()]

    def _versions(self) -> Table:
        rows = [("python", platform.python_version())]
        return Table("Versions", ("", ""), rows + [(name, _version(name)) for name in PACKAGES], left=2)

    def _backends(self) -> Table:
        rows, notes = [], []
        kinds = [d.device_kind for d in self.devices]
        for device in {d.device_kind: d for d in self.devices}.values():
            many = kinds.count(device.device_kind)
            name = f"{many} × {device.device_kind}" if many > 1 else device.device_kind
            support = pallas_kernels.supported_backends(device)
            first = next(b for b, s in support.items() if s)
            for i, (backend, s) in enumerate(support.items()):
                said = "yes, the first choice" if backend == first else "yes" if s else "no"
                rows.append((name if i == 0 else "", backend, said, s.reason))
            if warning := deprecated(device):
                notes.append(f"NOTICE, {device.device_kind}: {warning}")
        return Table("Backends", ("device", "backend", "", "why"), rows, left=4, notes=notes)

    def _self_test(self) -> Table:
        rows = []
        for c in self.checks:
            error = "" if c.error is None else f"{c.error:.1e}"
            how = f"{c.backend}, interpreted" if c.backend in self.interpreted else c.backend
            rows.append((how, f"{c.rule}, {c.mode}", c.against, f"FAILED: {c.failure}" if c.failure else "ok", error))
        untested = [n for n in pallas_kernels.supported_backends() if n not in (*self.tested, *self.interpreted)]
        failed = sum(bool(c.failure) for c in self.checks)
        notes = [
            f"{failed} of {len(self.checks)} checks FAILED" if failed else f"all {len(self.checks)} checks passed",
            f"{STEPS} steps and one that is skipped; a difference is of the leaf's largest element, at most {TOLERANCE:.0e}; "
            f"{self.seconds:.0f} s",
        ]
        if untested:
            notes.append(
                f"not tested, they cannot run here: {', '.join(untested)}; --interpret tests what can be interpreted"
            )
        head = ("backend", "step", "compared with", "", "difference")
        return Table(f"Self-test on {dispatch.target().kind}", head, rows, left=4, notes=notes)

    def __rich__(self) -> Any:
        return render.rich(self.heading, self.tables())

    def __str__(self) -> str:
        return render.text(self.heading, self.tables())


def _interprets(backend: str) -> bool:
    return backend == "triton" or (backend == "mosaic" and compat.HAS_MOSAIC)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _checks(backend: str, truth: dict[tuple[str, str], Any], context: Any = contextlib.nullcontext) -> list[Check]:
    """The checks of one backend. Those of "xla" come first: the others are compared with its results, in `truth`."""
    found = []
    for rule, (make, twin) in RULES.items():
        for mode in ("apply", "flat"):
            against = "optax" if backend == "xla" else "xla"
            error, failure = None, ""
            try:
                with context():
                    result, failure = _run(make(backend=backend, packing=PACKING), mode)
                if backend == "xla":
                    truth[rule, mode] = result
                    wanted = _run_optax(twin)
                else:
                    wanted = truth[rule, mode]
                error = _difference(result, wanted)
                if not error <= TOLERANCE:  # NaN is not within it either
                    failure = failure or "the parameters differ"
            except Exception as problem:  # whatever a backend does, the others are still to be tested
                failure = f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"[:200]
            found.append(Check(backend, rule, mode, against, error, failure))
    return found


def _arrays(seed: int, scale: float) -> Any:
    rng = np.random.default_rng(seed)
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    return jax.tree.map(lambda s: np.float32(scale) * rng.standard_normal(s, np.float32), SHAPES, is_leaf=is_shape)


def _run(tx: Any, mode: str) -> tuple[Any, str]:
    """The parameters after the steps, as a tree, and what was wrong with the step that is to be skipped."""
    params = jax.tree.map(jnp.asarray, _arrays(0, 0.1))
    put = (lambda tree: fusedopt.pack(tree, tx)) if mode == "flat" else (lambda tree: tree)
    params, step = put(params), jax.jit(tx.apply)
    state = tx.init(params)
    for i in range(STEPS):
        params, state = step(put(_arrays(1 + i, 1.0)), state, params)
    bad = _arrays(9, 1.0)
    bad["dense"]["bias"][3] = np.nan
    kept, after = step(put(bad), state, params)
    untouched = all(
        np.array_equal(a, b) for a, b in zip(jax.tree.leaves((params, state.mu)), jax.tree.leaves((kept, after.mu)))
    )
    failure = "" if untouched and bool(after.skipped) else "a step with a NaN was not skipped"
    return jax.tree.map(np.asarray, params.tree if mode == "flat" else params), failure


def _run_optax(twin: Make) -> Any:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        tx, params = twin(fusedopt.weight_mask), jax.tree.map(jnp.asarray, _arrays(0, 0.1))

        @jax.jit
        def step(grads, state, params):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        state = tx.init(params)
        for i in range(STEPS):
            params, state = step(_arrays(1 + i, 1.0), state, params)
    return params


def _difference(a: Any, b: Any) -> float:
    """The largest difference of a leaf, of its largest element."""
    pairs = zip(*(map(np.float64, jax.tree.leaves(tree)) for tree in (a, b)), strict=True)
    return float(max(np.max(np.abs(x - y)) / np.max(np.abs(y)) for x, y in pairs))
