"""What eight H200s say to each other under `zero1`, compiled without one: nothing but what is promised."""

from __future__ import annotations

import collections
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

import fusedopt
from benchmarks import models
from benchmarks.aot import zero1
from benchmarks.aot.collectives import collectives

pytestmark = [
    pytest.mark.slow,  # `make test-aot` runs them; tests/aot/conftest.py says when they are not collected
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

DEVICES = 8
SHAPES = {
    "a": {"kernel": (50, 64), "bias": (64,)},
    "b": {"kernel": (64, 300), "bias": (300,)},
    "c": {"kernel": (300, 10), "bias": (10,)},
}
# Elements of a bucket, a multiple of 8 * 1024. The weights are 25,400, each leaf rounded up to rows of 128.
WEIGHTS, BIASES = 32768, 8192
BATCH = jax.ShapeDtypeStruct((64, 50), jnp.float32), jax.ShapeDtypeStruct((64, 10), jnp.float32)


def abstract(kernel=jnp.float32):
    def leaf(path, shape):
        return jax.ShapeDtypeStruct(shape, kernel if path[-1].key == "kernel" else jnp.float32)

    return jax.tree_util.tree_map_with_path(leaf, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def loss_fn(params, x, y):
    for layer in params.values():
        x = jnp.tanh(
            x.astype(layer["kernel"].dtype) @ layer["kernel"] + layer["bias"].astype(layer["kernel"].dtype)[None]
        )
    return jnp.mean(jnp.square(x.astype(y.dtype) - y))


def said(c):
    """Bytes of each result by kind. XLA may put the collectives of several buckets into one."""
    found = collections.defaultdict(list)
    for op, sizes in collectives(c.text):
        found[op] += sizes
    return {op: sorted(sizes) for op, sizes in found.items()}


@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.parametrize("kernel", [jnp.float32, jnp.bfloat16])
def test_a_train_step_reduce_scatters_and_all_gathers_each_bucket_once(kernel, guard):
    """Gradients are summed in float32, parameters gathered in their own dtype."""
    make = lambda: fusedopt.adamw(1e-3, skip_nonfinite=guard)  # noqa: E731
    c, flat, _ = zero1.compiled(make, "train_step", abstract(kernel), loss_fn=loss_fn, batch=BATCH)
    assert len(flat.buckets) == 2
    width = jnp.dtype(kernel).itemsize
    assert said(c) == {
        "reduce-scatter": [4 * BIASES // DEVICES, 4 * WEIGHTS // DEVICES],
        "all-gather": sorted([4 * BIASES, width * WEIGHTS]),
        "all-reduce": [8] if guard else [4],  # the loss, and the search for NaN
    }
    assert len([x for x in collectives(c.text) if x.op != "all-reduce"]) <= 4
    assert c.donated == c.aliased + 1  # the old `skipped`


@pytest.mark.parametrize("guard", [True, False])
def test_the_drop_in_all_gathers_each_bucket_once(guard):
    c, _, _ = zero1.compiled(lambda: fusedopt.adamw(1e-3, skip_nonfinite=guard), "apply", abstract())
    assert said(c) == {"all-gather": [4 * BIASES, 4 * WEIGHTS], **({"all-reduce": [4]} if guard else {})}
    assert c.count("fusedopt_adam") == 2


def test_the_drop_in_in_a_whole_step_leaves_the_sum_of_the_gradients_to_xla():
    """Which sums the leaves, 25,774 numbers, where a train_step scatters: half as much again is sent."""
    c, _, _ = zero1.compiled(lambda: fusedopt.adamw(1e-3), "jit", abstract(), loss_fn=loss_fn, batch=BATCH)
    found = said(c)
    summed = sum(x.size for x in jax.tree.leaves(abstract()))
    assert sum(found.pop("all-reduce")) == 4 * summed + 4
    assert found == {"all-gather": [4 * BIASES, 4 * WEIGHTS]}


NORMS = {
    # Six numbers for each row of 128 weights: the squares of w and of g, summed at three scales. Biases have no ratio.
    "lars": (lambda: fusedopt.lars(0.1), [24 * WEIGHTS // 128], 4),
    # Of every bucket three for each block of 1024: g at three scales. The norm is also the search for NaN.
    "clip": (lambda: fusedopt.adamw(1e-3, clip_norm=1.0), [12 * BIASES // 1024, 12 * WEIGHTS // 1024], 0),
}


@pytest.mark.parametrize("form", zero1.FORMS)
@pytest.mark.parametrize("name", NORMS)
def test_norms_add_their_sums_of_rows_and_no_more(name, form):
    make, rows, scalars = NORMS[name]
    c, _, _ = zero1.compiled(make, form, abstract())
    found = said(c)
    assert found.pop("all-gather") == sorted([4 * BIASES, 4 * WEIGHTS, *rows])
    scalars += 4 * (form == "train_step")  # its loss
    assert sum(found.pop("all-reduce", [])) == scalars
    scattered = [4 * BIASES // DEVICES, 4 * WEIGHTS // DEVICES] if form == "train_step" else []
    assert found.pop("reduce-scatter", []) == scattered
    assert not found


def test_a_device_holds_an_eighth_of_the_state_of_resnet50():
    tree = models.shapes("resnet50")
    c, flat, _ = zero1.compiled(lambda: fusedopt.adamw(1e-3), "apply", tree)
    parameters = sum(4 * x.size for x in flat.buckets)
    replicated = 2 * 4 * models.describe(tree)[1]
    # What the compiler counts: parameters, gradients and the state.
    assert c.arguments - 2 * parameters <= 1.01 * replicated / DEVICES
    # Beside the shards of parameters and gradients nothing large is made.
    assert c.temporary <= 2.05 * parameters / DEVICES


def test_the_readme_says_what_the_compiler_does():
    readme = (pathlib.Path(__file__).parents[2] / "README.md").read_text()
    adamw, lars = (dict(zip(zero1.HEAD, zero1.cells("resnet50", rule, "apply"))) for rule in ("adamw", "lars"))
    assert re.search(r"state for a ResNet-50 each keeps ([\d.]+) of", readme)[1] == adamw["of it"]
    norms, whole = (int(lars[name].replace(",", "")) for name in ("norms", "all-gather"))
    assert re.search(r"LARS gathers ([\d.]+) % more", readme)[1] == f"{100 * norms / whole:.1f}"
