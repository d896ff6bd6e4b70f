"""What a GPU would run, compiled without one: kernels, memory, registers, and who runs where."""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

import fusedopt
import pallas_kernels
from benchmarks import models
from benchmarks.aot import compiler, steps
from benchmarks.aot.steps import DEFAULT, PACKED, Step
from fusedopt.reports import hlo
from pallas_kernels import compat

pytestmark = [
    pytest.mark.slow,  # `make test-aot` runs them; tests/aot/conftest.py says when they are not collected
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

needs_mosaic = pytest.mark.skipif(not compat.HAS_MOSAIC, reason="Mosaic kernels need jax >= 0.11")

# Triton on an H200 compiles every rule in every mode, which is what most of a GPU's users get; the others each rule in
# one mode, in turn, and two rules in all.
MATRIX = [("h200", "triton", rule, mode) for rule in steps.RULES for mode in steps.MODES]
for target, backend in (("h200", "mosaic"), ("h200", "xla"), ("a100", "triton"), ("a100", "xla")):
    MATRIX += [
        pytest.param(target, backend, rule, mode, marks=needs_mosaic if backend == "mosaic" else ())
        for i, rule in enumerate(steps.RULES)
        for j, mode in enumerate(steps.MODES)
        if rule in ("adamw", "lars") or i % 3 == j
    ]

compiled = functools.cache(lambda step, target, layers: steps.compiled(step, target, steps.stack(layers)))
ragged = functools.cache(lambda step, target: steps.compiled(step, target, steps.ragged()))
resnet50 = functools.cache(lambda step: steps.compiled(step, "h200", models.shapes("resnet50")))

SLOTS = {"adamw full": 3, "sgd": 0, "momentum": 1, "nesterov": 1, "lion": 1, "lars": 1, "lars optax": 1}


def unread(step, tree):
    """Bytes of the state that an unguarded step replaces without a look: JAX does not keep them as arguments."""
    state = jax.eval_shape(step.optimizer().init, tree)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((state.skipped, state.trust_ratios, state.grad_norm)))


@pytest.mark.parametrize(("target", "backend", "rule", "mode"), MATRIX)
def test_every_step_is_written_in_place_by_lean_kernels(target, backend, rule, mode):
    step = Step(rule, mode, backend, DEFAULT)
    c = ragged(step, target)
    tree = steps.ragged()
    size = 4 * sum(x.size for x in jax.tree.leaves(tree))
    assert c.donated - c.aliased == unread(step, tree)
    if mode == "flat":
        # Scalars; the sums of LARS: 6 numbers for each row of 128, and its levels of partial sums. XLA may store what
        # it takes the norm of, g + wd*w.
        sums = size // 8 if backend != "xla" else size
        assert c.temporary <= 8192 + (sums if rule.startswith(("lars", "lamb")) or "full" in rule else 0)
    elif backend == "triton" and mode == "apply":
        # LAMB takes norms of packed moments beside the leaves' gradients and parameters, which it joins for that.
        joined = 2 * 4 * sum(x.size + 128 for x in jax.tree.leaves(tree) if x.size < 16384)
        assert c.temporary <= 16384 + (size // 64 if "lars" in rule else joined if rule == "lamb" else 0)
    for name, kernels in c.kernels.items():
        for kernel in kernels:
            assert kernel.spilled == 0, name
            # 64 leave room for 32 of an SM's 64 warps, 72 for 28.
            assert kernel.registers <= (72 if backend == "mosaic" else 64), (name, kernel.registers)
    if backend == "xla":
        assert c.count("fusedopt") == 0
        return
    # Each of our kernels moves its buffers 16 bytes at a time, wherever its pieces are multiples of that.
    for name, kernels in c.kernels.items():
        if re.match("fusedopt_(sgd|adam|lion|lars)_", name):
            slots = SLOTS.get(rule, 2)
            reads = slots + 1 + (mode != "update" or name == "fusedopt_lars_weight")
            loads, stores = max(kernel.vector_accesses() for kernel in kernels)
            assert loads >= reads, (name, loads)
            assert stores >= slots + 1, (name, stores)


LAYERS = [10, 100, 1000]
# One kernel a group (weights, and the rest), and the scalars.
LAUNCHES = {"adamw": 4, "momentum": 4, "sgd": 3, "lars": 8}


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("rule", LAUNCHES)
def test_flat_params_take_as_many_kernels_whatever_the_depth(rule, layers):
    c = compiled(Step(rule), "h200", layers)
    assert c.count() == LAUNCHES[rule] <= 2 + 2 + (6 if rule == "lars" else 0)
    guarded = compiled(Step(rule, guard=True), "h200", layers)
    assert guarded.count() <= 2 + 2 + (6 if rule == "lars" else 0) + 2 * 2
    assert guarded.count("fusedopt_has_nan") == 1


def narrow(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), tree)


@pytest.mark.parametrize("mode", ["flat", "apply"])
def test_clipping_averages_and_masters_add_one_kernel_and_their_own_bytes(mode):
    """bfloat16 parameters and gradients: 2 bytes for the norm; then 2 and four float32 buffers read, and written."""
    step = Step("adamw full", mode, "triton", guard=True)
    tree = narrow(steps.stack(100, 256))
    parameters = models.describe(tree)[1]
    c = steps.compiled(step, "h200", tree)
    if mode == "flat":
        assert (c.count("fusedopt_grad_norm"), c.count("fusedopt_adam")) == (1, 2)
    # As XLA counts, the parameters are read too: they are operands, to be written in place. The kernels do not load them.
    assert 38 + 2 <= c.accessed / parameters <= 38 + 2.1
    assert c.temporary <= 0.02 * parameters
    assert c.donated == c.aliased + 1  # the old `skipped`
    for name, kernels in c.kernels.items():
        if name.startswith("fusedopt_adam"):
            for kernel in kernels:
                assert kernel.vector_accesses() == (4, 4)  # mu, nu, ema, master
                assert len(re.findall(r"ld\.global\.v2", kernel.ptx)) == 1  # the gradients
                assert kernel.spilled == 0


def test_a_sum_of_gradients_takes_one_more_pass_and_no_more_memory():
    tree = steps.stack(100, 256)
    parameters = models.describe(tree)[1]
    tx = fusedopt.adamw(1e-3, accumulate=4, packing=PACKED, skip_nonfinite=False)
    params = jax.eval_shape(lambda tree: fusedopt.pack(tree, tx), tree)
    state = jax.eval_shape(tx.init, params)
    run = lambda params, state, grads: tx.apply(grads, state, params)  # noqa: E731
    c = compiler.compile_for("h200", run, params, state, params, donate=(0, 1))
    assert (c.count("fusedopt_accumulate"), c.count("fusedopt_adam")) == (2, 2)
    assert 40 <= c.accessed / parameters <= 40.1  # 12 for the sum, 28 for the step
    assert c.temporary <= 0.001 * parameters


@pytest.mark.parametrize("layers", [10, 100])
def test_optax_takes_one_kernel_a_leaf_and_two(layers):
    assert compiled(Step("optax"), "h200", layers).count() == 3 * layers + 2


def test_the_readme_says_what_the_compiler_does():
    readme = (pathlib.Path(__file__).parents[2] / "README.md").read_text()
    table = {m[1]: [int(n) for n in m[2].split("|")] for m in re.finditer(r"^\| `(\w+)` +\|([\d |]+)\|$", readme, re.M)}
    assert table.keys() == {"adamw", "momentum", "sgd", "lars", "optax"}
    for rule, counts in table.items():
        assert compiled(Step(rule), "h200", 10).count() == counts[0]
        assert counts == ([32, 302, 3002] if rule == "optax" else [counts[0]] * 3)


@pytest.mark.parametrize("rule", ["sgd", "momentum", "adamw", "lars"])
def test_apply_on_resnet50_reads_the_leaves_where_they_are(rule):
    """161 leaves, all packed: at most four kernels of ours for the update, no copy of a leaf, next to no memory."""
    step = Step(rule, "apply", None, PACKED)
    c = resnet50(step)
    leaves, size = models.describe(models.shapes("resnet50"))
    updates = c.count("fusedopt") - c.count("fusedopt_norms")
    assert updates == 3
    assert leaves == 161
    accesses = {"sgd": 3, "momentum": 5, "adamw": 7, "lars": 7}[rule]
    assert c.accessed <= (accesses + 0.05) * 4 * size
    assert c.temporary <= 0.01 * 4 * size
    assert c.donated - c.aliased == unread(step, models.shapes("resnet50"))
    assert not any(x.op == "copy" and max(x.sizes) > 4 for x in hlo.entry(c.text))
    if rule == "lars":
        assert c.count("fusedopt_norms") == 1
        assert c.count() <= updates + 1 + 8


@pytest.mark.parametrize("rule", ["adamw", "lars"])
def test_apply_on_resnet50_with_the_default_packing(rule):
    c = resnet50(Step(rule, "apply", None, DEFAULT))
    assert c.count("fusedopt") - c.count("fusedopt_norms") == 3  # all the small leaves; XLA takes the large ones
    assert c.count() <= 3 + 52 + 10
    assert c.accessed <= 7.05 * 4 * models.describe(models.shapes("resnet50"))[1]
    assert c.donated - c.aliased == unread(Step(rule, "apply", None, DEFAULT), models.shapes("resnet50"))


def test_gradients_may_be_bf16_at_no_cost():
    """They are widened where they are read: as many launches, and two bytes a parameter less."""
    step, tree = Step("adamw", "apply"), steps.stack(10)
    narrow, wide = (steps.compiled(step, "h200", tree, dtype) for dtype in (jnp.bfloat16, None))
    assert narrow.count() == wide.count()
    assert wide.accessed - narrow.accessed == 2 * models.describe(tree)[1]


@pytest.mark.parametrize("target", ["h200", "a100"])
@pytest.mark.parametrize("rule", ["adamw", "lars"])
@pytest.mark.parametrize("mode", steps.MODES)
def test_the_default_runs_inside_a_command_buffer(mode, rule, target):
    c = ragged(Step(rule, mode, None, DEFAULT, guard=True), target)
    assert c.count() >= 5
    assert all(captured for _, captured in c.launches)
    assert c.count("fusedopt") >= 2


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("mode", ["flat", "apply"])
def test_x64_mode_has_the_same_kernels(mode, dtype):
    step = Step("adamw full", mode, "triton", DEFAULT, guard=True)
    want = ragged(step, "h200").kernels
    with jax.enable_x64(True):
        got = steps.compiled(step, "h200", steps.ragged(dtype)).kernels
    assert {name: len(kernels) for name, kernels in got.items()} == {
        name: len(kernels) for name, kernels in want.items()
    }


def test_a_t4_and_an_unknown_gpu_get_plain_xla_and_a_reason():
    for target in ("t4", "unknown"):
        c = ragged(Step("adamw", "apply", None, DEFAULT), target)
        assert c.count("fusedopt") == 0
        kind = compiler.mesh(target).devices.flat[0].device_kind
        support = pallas_kernels.supported_backends(kind)
        assert support["xla"]
        assert not support["triton"]
        assert not support["mosaic"]
    assert "7.5" in pallas_kernels.supported_backends("Tesla T4")["triton"].reason


def test_mosaic_is_refused_below_capability_9():
    """It would abort the process."""
    for target in ("a100", "t4"):
        with pytest.raises(ValueError, match="`backend`='mosaic' cannot run here"):
            ragged(Step("adamw", "flat", "mosaic"), target)


def test_norms_use_no_atomics():
    """Float atomics would make two runs differ."""
    for backend in ("triton", "xla"):
        for mode in ("flat", "apply"):
            c = ragged(Step("lars", mode, backend, DEFAULT), "h200")
            for kernels in c.kernels.values():
                assert not any(re.search(r"\b(red|atom)\.", kernel.ptx) for kernel in kernels)


def test_a_skipped_step_leaves_before_it_loads():
    """Behind the flag's load the next thing is a branch: no vector is loaded on the way out."""
    for mode in ("flat", "apply"):
        c = ragged(Step("adamw", mode, "triton", DEFAULT, guard=True), "h200")
        for kernels in (k for name, k in c.kernels.items() if name.startswith("fusedopt_adam")):
            for kernel in kernels:
                body = kernel.ptx[kernel.ptx.index(".entry") :]
                branch = re.search(r"@%p\d+\s+bra", body)
                assert branch
                assert not re.search(r"ld\.global\S*v4", body[: branch.start()])


def test_the_state_of_an_abstract_model_matches_its_arrays():
    """What is compiled here from shapes is what runs: the same avals."""
    tx = fusedopt.adamw(1e-3)
    tree = steps.stack(2, 8)
    real = tx.init(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree))
    abstract = jax.eval_shape(tx.init, tree)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), real) == jax.tree.map(lambda x: (x.shape, x.dtype), abstract)
