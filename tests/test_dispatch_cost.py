"""What a call costs before it computes: how much is passed, compared and traced. Structure only; times are benchmarks."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusedopt
from fusedopt import layout, paths
from pallas_kernels import compat
from tests.helpers import abstract, counted

MANY = {str(i): {"kernel": (3, 4), "bias": (4,)} for i in range(200)}


def test_equal_flat_params_are_compared_by_identity():
    """jit compares the layouts of its arguments at every call: two packs of equal trees share one layout object."""
    flats = [jax.eval_shape(fusedopt.pack, abstract(MANY)) for _ in range(2)]
    assert flats[0].layout is flats[1].layout
    leaves, treedef = jax.tree.flatten(flats[0])
    assert len(leaves) == 2
    assert treedef == jax.tree.structure(flats[1])


def test_a_layout_that_is_equal_and_not_identical_is_compared_by_its_digest(monkeypatch):
    a = jax.eval_shape(fusedopt.pack, abstract(MANY)).layout
    b = layout.FlatLayout(a.treedef, a.segments, a.buckets, a.others, a.absent, a.align)
    assert b is not a
    assert hash(a) == hash(b)  # both digests are cached from here on
    monkeypatch.setattr(layout.Segment, "__eq__", lambda *_: pytest.fail("compared segment by segment"))
    assert a == b


@pytest.mark.parametrize("flat", [False, True], ids=["tree", "flat"])
def test_a_step_is_traced_once(flat):
    """Across values, states and hyperparameters."""
    tx = fusedopt.adamw(1e-3)
    params = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
    params = fusedopt.pack(params) if flat else params
    step, traces = counted(lambda g, s, p, lr: tx.apply(g, s, p, learning_rate=lr))
    step, state = jax.jit(step), tx.init(params)
    for t in range(4):
        params, state = step(params, state, params, jnp.float32(0.1 * t))
        if t == 1:
            state = tx.set_hyperparams(state, weight_decay=0.5, b1=jnp.float32(0.8))
    assert len(traces) == 1


def test_paths_are_computed_once_for_a_tree(monkeypatch):
    """Naming 400 leaves is slow: a second trace, an eager step and init find the layout by shapes."""
    calls, original = [], paths.Flattened.paths
    monkeypatch.setattr(paths.Flattened, "paths", lambda self: calls.append(1) or original(self))
    tx, params = fusedopt.adamw(1e-3), abstract(MANY)
    state = jax.eval_shape(tx.init, params)
    assert len(calls) == 1
    jax.eval_shape(tx.update, params, state, params)
    jax.eval_shape(tx.apply, params, state, params)
    jax.eval_shape(tx.init, params)
    assert len(calls) == 1


def equations(jaxpr):
    """All equations of a jaxpr, those of its inner ones counted as well."""
    total = 0
    for e in jaxpr.eqns:
        inner = [v for v in e.params.values() if hasattr(v, "eqns") or hasattr(v, "jaxpr")]
        total += sum(equations(getattr(v, "jaxpr", v)) for v in inner) if inner else 1
    return total


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_the_traced_program_of_flat_params_does_not_grow_with_the_leaves(name):
    def count(leaves):
        shapes = {str(i): {"kernel": (3, 4), "bias": (4,)} for i in range(leaves)}
        flat = jax.eval_shape(fusedopt.pack, abstract(shapes))
        tx = getattr(fusedopt, name)(1e-3)
        return equations(jax.make_jaxpr(tx.apply)(flat, jax.eval_shape(tx.init, flat), flat).jaxpr)

    assert count(200) == count(2)


def test_the_trust_ratios_of_lars_grow_by_tables_not_by_equations():
    def count(leaves):
        flat = jax.eval_shape(fusedopt.pack, abstract({str(i): (3, 4) for i in range(leaves)}))
        tx = fusedopt.lars(1e-3)
        return equations(jax.make_jaxpr(tx.apply)(flat, jax.eval_shape(tx.init, flat), flat).jaxpr)

    assert count(200) <= count(2) + 10  # padding, or a level of the table that adds the rows of a leaf


def test_reading_flat_params_is_one_split_a_bucket():
    flat = jax.eval_shape(fusedopt.pack, abstract(MANY))
    forward = str(jax.make_jaxpr(lambda f: f.tree)(flat))
    # One for each of the two buckets, also where CPUs have slices of their own beside it.
    assert len(re.findall(r" = split\[", forward)) == 2
    assert (forward.count(" = dynamic_slice[") > 0) == compat.BARRIERS_REACH_KERNELS
    assert " gather[" not in forward
    # And its transpose one concatenation, not a padded sum of 400 pieces.
    backward = jax.make_jaxpr(lambda f, t: jax.vjp(lambda f: f.tree, f)[1](t))(flat, abstract(MANY))
    names = [e.primitive.name for e in backward.jaxpr.eqns]
    assert names.count("concatenate") == 2
    assert "add_any" not in names
    assert "pad" not in names


def test_python_numbers_are_no_constants_of_the_program():
    """Two learning rates lower to the same text, so that a compilation cache finds one for the other."""

    def text(lr):
        tx, params = fusedopt.adamw(lr, weight_decay=10 * lr), {"w": jax.ShapeDtypeStruct((2, 3), np.float32)}
        return jax.jit(tx.apply).lower(params, jax.eval_shape(tx.init, params), params).as_text()

    assert text(0.1) == text(0.2)
