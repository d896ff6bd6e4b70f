"""A report's counts for a GPU are those of `python -m benchmarks.aot`: the launches that XLA wrote down, the same bytes."""

import jax
import pytest

import fusedopt
from benchmarks import models
from benchmarks.aot import compiler, steps
from benchmarks.aot.steps import DEFAULT, PACKED, Step
from pallas_kernels import compat

pytestmark = [
    pytest.mark.slow,  # `make test-aot` runs them; tests/aot/conftest.py says when they are not collected
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

TREES = {"ragged": steps.ragged, "stack": lambda: steps.stack(10), "resnet50": lambda: models.shapes("resnet50")}
MODES = {"flat": "flat", "apply": "apply", "update": "optax"}

CASES = [
    ("h200", "resnet50", Step("adamw", "apply", None, PACKED, True)),
    ("h200", "stack", Step("adamw", "flat", None, DEFAULT, True)),
    ("h200", "resnet50", Step("lars", "flat", None, PACKED)),
    ("h200", "stack", Step("sgd", "update", None, DEFAULT)),
    ("h200", "stack", Step("momentum", "flat", "xla", PACKED, True)),
    ("h200", "ragged", Step("adamw full", "apply", None, DEFAULT, True)),
    ("h200", "ragged", Step("lion", "update", "triton", DEFAULT)),
    ("a100", "ragged", Step("lamb", "apply", None, DEFAULT, True)),
    ("a100", "stack", Step("lars", "apply", None, DEFAULT)),
    ("t4", "ragged", Step("adamw", "flat", None, DEFAULT)),
]
if compat.HAS_MOSAIC:
    CASES.append(("h200", "stack", Step("adamw", "flat", "mosaic", PACKED)))


def report_of(step, target, tree):
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)  # it cannot hold programs for devices that are not there
    try:
        with jax.sharding.use_abstract_mesh(compiler.mesh(target).abstract_mesh):
            return fusedopt.report(step.optimizer(), compiler.on(target, tree), mode=MODES[step.mode]).compile()
    finally:
        jax.config.update("jax_enable_compilation_cache", before)


@pytest.mark.parametrize(("target", "name", "step"), CASES)
def test_counts_are_those_of_the_benchmark(target, name, step):
    tree = TREES[name]()
    c, report = steps.compiled(step, target, tree), report_of(step, target, tree)
    p = report.program
    assert p.total == c.count()
    assert p.accessed == c.accessed
    assert (p.temporary, p.aliased, p.donated) == (c.temporary, c.aliased, c.donated)
    assert p.kernels.get("triton", 0) + p.kernels.get("mosaic", 0) == c.count("fusedopt")
    # Who updates packed buckets is there, and nobody who was not named; norms and looks for NaN may be Triton's too.
    said = {choice.backend for choice in report.choices}
    assert said <= {*p.kernels, "xla"}
    assert p.kernels.keys() <= {*said, "xla", "triton"}
    assert report.device == compiler.mesh(target).devices.flat[0].device_kind
    assert report.needed_bytes <= p.accessed


@pytest.mark.parametrize(("rule", "mode"), [("sgd", "flat"), ("adamw", "apply"), ("adamw", "flat"), ("lars", "apply")])
def test_a_gpu_moves_little_more_than_a_step_must(rule, mode):
    """On a tree of some size, kernels move what `needed` says and three percent for scalars, sums and ends of buckets."""
    report = report_of(Step(rule, mode, "triton", PACKED, True), "h200", steps.stack(30, 256))
    assert report.needed_bytes <= report.program.accessed <= 1.03 * report.needed_bytes
