"""What is measured: the sections, and the cases of each."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Sequence

from benchmarks import cases, growth, peers, train_models
from benchmarks.comparison import Comparison, Row, Setup
from benchmarks.programs import OUTLIERS

ABOUT = {
    "step": "one AdamW step, the gradients given, without a look for NaN",
    "guarded": "one AdamW step that is skipped if a gradient is not finite, beside optax with and without such a guard",
    "parts": "one AdamW step that is clipped, skipped if not finite, and averaged, beside the same of optax's parts",
    "lars": "one LARS step in optax's form, without a look for NaN",
    "train": "forward, backward and AdamW in one jitted function, and how long that takes to build",
    "dispatch": "until the call of an AdamW step returns, while the device is busy",
    "growth": "an AdamW step of leaves of 1,000 elements",
    "packing": "one AdamW step with other `Packing(solo_from=...)` than the default 16384",
}
SECTIONS = tuple(ABOUT)

FULL = {
    "step": cases.STEP,
    "guarded": cases.STEP,
    "parts": ("tiny_300", "convs_120", "mixed", "large_10"),
    "lars": cases.LARS,
    "train": tuple(train_models.PROBLEMS),
    "dispatch": (2000,),
    "growth": (10, 30, 100, 300, 1000, 3000, 5000),
    "packing": ("mixed", "lora_7b", "resnet50", "efficientnet_b0", "large_10"),
}
QUICK = {
    "step": ("rl_mlp", "mlp_mnist"),
    "guarded": ("rl_mlp",),
    "parts": ("rl_mlp",),
    "lars": ("rl_mlp",),
    "train": ("actor_critic",),
    "dispatch": (20,),
    "growth": (10, 30),
    "packing": ("rl_mlp",),
}
QUICK_SECTIONS = ("step", "guarded", "train", "dispatch")
"""What each section measures of its own accord: trees, networks, or numbers of leaves."""

ESSENTIAL = ("optax", "apply_if_finite", "flat", "apply")
"""Where not all candidates have room in memory."""


@dataclasses.dataclass(frozen=True)
class Case:
    section: str
    name: str
    measure: Callable[[Setup], list[Row]]


def known() -> list[str]:
    """Names that `plan` takes: trees and networks."""
    return [*cases.TREES, *train_models.PROBLEMS]


def plan(sections: Sequence[str] = (), names: Sequence[str] = (), quick: bool = False) -> list[Case]:
    """The cases to measure.

    Args:
        sections: all if none is given, of which those that have models if there are `names`.
        names: trees and networks: each section takes those it can; all of its own if none is given.

    Raises:
        ValueError: an unknown name.
    """
    if unknown := [name for name in names if name not in known()]:
        raise ValueError(f"no model {unknown[0]!r}: the known ones are {', '.join(known())}")
    if names and not sections:
        sections = tuple(MEASURES)
    chosen = []
    for section in sections or (QUICK_SECTIONS if quick else SECTIONS):
        if section in ("dispatch", "growth"):
            measure = getattr(growth, section)
            chosen += [Case(section, f"leaves_{n}", _bind(measure, n)) for n in (QUICK if quick else FULL)[section]]
            continue
        here = train_models.PROBLEMS if section == "train" else cases.TREES
        picked = [name for name in names if name in here] if names else (QUICK if quick else FULL)[section]
        chosen += [Case(section, name, _bind(MEASURES[section], name)) for name in picked]
    return chosen


def _bind(measure: Callable[..., list[Row]], argument) -> Callable[[Setup], list[Row]]:
    def bound(setup: Setup) -> list[Row]:
        try:
            return measure(argument, setup)
        finally:
            gc.collect()  # gigabytes, of large trees

    return bound


def _tree(section: str, name: str, setup: Setup, rule: str = "adamw", names: Sequence[str] | None = None) -> list[Row]:
    tree = cases.Tree(cases.shapes(name))
    labels = {"section": section, "case": name, "leaves": tree.leaves, "parameters": tree.parameters}
    guard = section == "guarded"
    builds = peers.builders(tree, rule, guard, names)
    if not peers.fits(tree, len(builds)):
        builds = {name: build for name, build in builds.items() if name in ESSENTIAL}
    baselines = ("optax", "apply_if_finite") if guard else ("optax",)
    comparison = Comparison(labels, builds, baselines)
    comparison.prepare(setup)
    large = rule == "adamw" and tree.parameters >= cases.LARGE
    copies = {name: make() for name, make in peers.COPIES.items()} if large else None
    return comparison.measure(setup, copies, peers.ADAMW_BYTES * tree.parameters)


def step(name: str, setup: Setup) -> list[Row]:
    return _tree("step", name, setup)


def guarded(name: str, setup: Setup) -> list[Row]:
    return _tree("guarded", name, setup)


def lars(name: str, setup: Setup) -> list[Row]:
    return _tree("lars", name, setup, "lars", ("optax", "flat", "apply"))


def _own_builders(section: str, build: Callable[[cases.Tree], dict], name: str, setup: Setup) -> list[Row]:
    tree = cases.Tree(cases.shapes(name))
    labels = {"section": section, "case": name, "leaves": tree.leaves, "parameters": tree.parameters}
    comparison = Comparison(labels, build(tree))
    comparison.prepare(setup)
    return comparison.measure(setup)


def parts(name: str, setup: Setup) -> list[Row]:
    return _own_builders("parts", peers.parts_builders, name, setup)


def packing(name: str, setup: Setup) -> list[Row]:
    return _own_builders("packing", peers.packing_builders, name, setup)


def train(name: str, setup: Setup) -> list[Row]:
    job = train_models.Train(train_models.PROBLEMS[name]())
    labels = {"section": "train", "case": name, "leaves": job.leaves, "parameters": job.parameters}
    builds = {mode: _program(job, mode) for mode in train_models.MODES}
    comparison = Comparison(labels, builds, compiles=setup.compiles, outliers=OUTLIERS)
    comparison.prepare(setup)
    return comparison.measure(setup)


def _program(job: train_models.Train, mode: str):
    return lambda: job.program(mode)


MEASURES = {"step": step, "guarded": guarded, "parts": parts, "lars": lars, "packing": packing, "train": train}
