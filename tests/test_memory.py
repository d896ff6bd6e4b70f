"""Which buffer is whose, and how much there is: donation, aliasing, temporaries, arguments."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusedopt
from tests.helpers import abstract, assert_equal, case, filled, one_of_each

# One optimizer for each path through the code; the others are marked slow.
CORE = ("sgd", "momentum", "adamw", "lars")
EVERY = [pytest.param(n, marks=[] if n in CORE else [pytest.mark.slow]) for n in one_of_each(CORE)]

FROM = fusedopt.Packing(solo_from=16384)
SHAPES = {"a": {"kernel": (64, 128), "bias": (128,)}, "large": (256, 512), "larger": (512, 512), "scalar": ()}


def size_of(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def compiled_step(tx, params, *, donate):
    """A training step's optimizer part, parameters and state in the order in which they come back."""
    state = jax.eval_shape(tx.init, params)

    def step(params, state, grads):
        return tx.apply(grads, state, params)

    jitted = jax.jit(step, donate_argnums=(0, 1) if donate else ())
    return jitted.lower(params, state, params).compile(), state


@pytest.mark.parametrize("flat", [False, True], ids=["tree", "flat"])
@pytest.mark.parametrize("name", EVERY)
def test_r119_all_that_is_donated_is_written_in_place(name, flat):
    """Alias bytes are the donated bytes; temporaries are bounded."""
    tx, params = case(name).make(0.1, packing=FROM), abstract(SHAPES)
    if flat:
        params = jax.eval_shape(lambda p: fusedopt.pack(p, tx), params)
    compiled, state = compiled_step(tx, params, donate=True)
    memory = compiled.memory_analysis()
    reused = size_of(params) + size_of(state)
    # `skipped` is one byte, and the step does not read the old one: an argument that is not used is not kept.
    assert 0 <= reused - memory.alias_size_in_bytes <= 1
    layout = jax.eval_shape(lambda p: fusedopt.pack(p, tx), abstract(SHAPES)).layout
    packed = 4 * sum(b.size for b in layout.buckets if not b.solo)
    # Scalars, the sum of a small bucket, and the norms: 3 times 2 float32 for each row of 128 elements, in parts and then
    # joined.
    small = 8192 + (2 * 6 * 4 * sum(b.size for b in layout.buckets) // 128 if name.startswith(("lars", "lamb")) else 0)
    if name == "lion":
        # Its parameters and its momentum are both made from the old momentum, by two kernels on a CPU whose order XLA
        # does not know when it decides on copies.
        small += size_of(state.mu)
    # Trees need gradients, parameters and new parameters of the packed leaves as buffers besides; large leaves nothing.
    assert memory.temp_size_in_bytes <= small + (0 if flat else 3 * packed)


@pytest.mark.parametrize("options", [{}, {"ema_decay": 0.9, "clip_norm": 1.0}, {"accumulate": 2}], ids=str)
@pytest.mark.parametrize("guard", [False, True], ids=["unguarded", "guarded"])
@pytest.mark.parametrize("name", ["adamw", pytest.param("lamb", marks=pytest.mark.slow)])
def test_no_option_makes_xla_copy_a_buffer(name, guard, options):
    """Two kernels, one that reads what the other overwrites, are where XLA copies it: see `fusedopt.bucket`."""
    tx = case(name).make(0.1, packing=FROM, skip_nonfinite=guard, **options)
    params = jax.eval_shape(lambda p: fusedopt.pack(p, tx), abstract(SHAPES))
    compiled, state = compiled_step(tx, params, donate=True)
    assert compiled.memory_analysis().temp_size_in_bytes < min(4 * x.size for x in params.buckets if x.ndim == 2)
    # A few scalars that are only written are no arguments.
    assert compiled.memory_analysis().alias_size_in_bytes >= size_of(params) + size_of(state) - 64


@pytest.mark.parametrize("flat", [False, True], ids=["tree", "flat"])
def test_without_donation_nothing_is_changed(flat):
    tx = fusedopt.adamw(0.1, packing=FROM)
    params = jax.tree.map(jnp.asarray, filled(SHAPES))
    params = fusedopt.pack(params, tx) if flat else params
    grads, state = jax.tree.map(jnp.ones_like, params), tx.init(params)
    before = jax.tree.map(lambda x: np.array(x, copy=True), (params, grads, state))
    for step in (jax.jit(tx.apply), jax.jit(tx.update)):
        step(grads, state, params)
        assert_equal(jax.tree.map(np.asarray, (params, grads, state)), before)


def pointers(*trees):
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(trees) if x.size]


@pytest.mark.parametrize("name", EVERY)
def test_r120_no_two_buffers_of_a_fresh_state_are_the_same(name):
    tx = case(name).make(0.1, packing=FROM)
    params = jax.tree.map(jnp.asarray, filled({**SHAPES, "fills_its_bucket": {"bias": (1024,)}}))
    flat = fusedopt.pack(params, tx)
    for state in (tx.init(params), jax.jit(tx.init)(params), tx.init(flat)):
        found = pointers(state, params, flat)
        assert len(set(found)) == len(found)


@pytest.mark.parametrize("flat", [False, True], ids=["tree", "flat"])
def test_r120_a_fresh_state_can_be_donated_at_once(flat):
    tx = fusedopt.adamw(0.1, packing=FROM)
    mine = jax.tree.map(jnp.asarray, filled(SHAPES))
    params = fusedopt.pack(mine, tx) if flat else jax.tree.map(lambda x: x.copy(), mine)
    grads = jax.tree.map(jnp.ones_like, params)
    state = tx.init(params)
    step = jax.jit(lambda p, s, g: tx.apply(g, s, p), donate_argnums=(0, 1))
    want, _ = tx.apply(grads, state, params)
    want = jax.tree.map(np.asarray, want)
    new, new_state = step(params, state, grads)
    for got, expected in zip(jax.tree.leaves(new), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7)  # jitted or not: contractions differ
    assert all(x.is_deleted() for x in jax.tree.leaves(params))
    assert not any(x.is_deleted() for x in jax.tree.leaves(mine))  # pack has copied
    step(new, new_state, grads)


SLOTS = {"sgd": 0, "momentum": 1, "nesterov": 1, "adam": 2, "adamw": 2, "lars": 1, "lars_optax": 1}


@pytest.mark.parametrize("name", SLOTS)
def test_only_the_slots_that_are_needed_exist(name):
    """SGD holds no buffer, momentum and LARS one a bucket, Adam two; the rest of a state is a few scalars."""
    tx = case(name).make(0.1, packing=FROM)
    params = abstract(SHAPES)
    layout = jax.eval_shape(lambda p: fusedopt.pack(p, tx), params).layout
    state = jax.eval_shape(tx.init, params)
    assert [len(s) for s in (state.mu, state.nu) if len(s)] == [len(layout.buckets)] * SLOTS[name]
    buffers = size_of((state.mu, state.nu))
    assert buffers == SLOTS[name] * 4 * sum(b.size for b in layout.buckets)
    assert size_of(state) - buffers < 100


def test_a_frozen_group_has_no_slots():
    frozen = fusedopt.Group("still", lambda path, leaf: path[0] == "large", frozen=True)
    state = jax.eval_shape(fusedopt.adamw(0.1, groups=[frozen], packing=FROM).init, abstract(SHAPES))
    assert [x.shape for x in state.mu] == [(1024,), (8192,), (512, 512)]


@pytest.mark.parametrize(("name", "arguments"), [("sgd", 2), ("momentum", 4), ("adamw", 6)])
def test_two_thousand_leaves_are_two_buffers(name, arguments):
    """Weights and biases; with the moments of each, a jitted call passes as many buffers as this says, and the state's
    four small arrays. (optax: 2,000 to 6,000.)"""
    shapes = {str(i): {"kernel": (4, 8), "bias": (8,)} for i in range(1000)}
    tx = case(name).make(0.1)
    flat = jax.eval_shape(lambda p: fusedopt.pack(p, tx), abstract(shapes))
    state = jax.eval_shape(tx.init, flat)
    assert len(jax.tree.leaves(flat)) == 2
    assert len(jax.tree.leaves((flat, state))) == arguments + 4
    assert {x.shape for x in jax.tree.leaves(flat)} == {(128_000,)}


def instructions(leaves, name):
    """Instructions of the optimized program that steps FlatParams of `leaves` small kernels and as many biases."""
    shapes = {str(i): {"kernel": (1, 7), "bias": (7,)} for i in range(leaves)}
    tx = case(name).make(0.1)
    flat = jax.eval_shape(lambda p: fusedopt.pack(p, tx), abstract(shapes))
    compiled, _ = compiled_step(tx, flat, donate=True)
    return len(re.findall(r"^\s+(?:ROOT )?%?[\w.-]+ = ", compiled.as_text(), re.M))


def test_r122_the_program_of_a_flat_step_does_not_grow_with_the_leaves():
    # A few more or less: XLA fuses differently by size.
    few, many = instructions(10, "adamw"), instructions(100, "adamw")
    assert many <= 1.1 * few


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "lars"])
def test_r122_nor_with_a_thousand_of_them(name):
    few, many = instructions(100, name), instructions(1000, name)
    # LARS adds the rows of each leaf in a static tree whose depth may grow by a level, never with the leaves.
    assert many <= few * (1.1 if name == "adamw" else 1.3)


@pytest.mark.slow
def test_r122_a_thousand_leaves_trace_and_compile():
    shapes = {str(i): (7, 1) for i in range(1000)}
    tx, params = fusedopt.lars(0.1), {k: jnp.ones(s) for k, s in shapes.items()}
    state = tx.init(params)
    updates, _ = jax.jit(tx.update)(params, state, params)
    assert len(updates) == 1000
    for u in updates.values():  # |w| = |g|, so eta is the trust coefficient
        np.testing.assert_allclose(u, -0.1 * 0.001, rtol=1e-6)
