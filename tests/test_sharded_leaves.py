"""Trees whose leaves are sharded over a mesh, without `zero1`: as of one device, and every leaf stays where it is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fusedopt
import pallas_kernels
from tests.helpers import assert_close, standard_promotion

# Two leaves alone, cut along one axis and along two; two in a bucket, a matrix and a kernel cut in its last axes.
SHAPES = {"columns": (192, 128), "both": (128, 160), "matrix": (16, 24), "conv": (3, 1, 8, 16), "bias": (8,)}
SPECS = {"columns": P(None, "model"), "both": P("data", "model"), "matrix": P(None, "model"),
         "conv": P(None, None, "data", "model"), "bias": P()}  # fmt: skip
SOLO = ("both", "columns")
FULL = dict(clip_norm=1.0, ema_decay=0.9, accumulate=2, master_weights=True)

OPTIMIZERS = {
    "adamw": lambda: fusedopt.adamw(0.01),
    "lars": lambda: fusedopt.lars(0.01),
    "lamb": lambda: fusedopt.lamb(0.01),
    "adamw, everything": lambda: fusedopt.adamw(0.01, **FULL),
}


def trees(kind):
    """The same parameters on one device and over a mesh of 4 x 2, and the shardings of the latter."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    rng = np.random.default_rng(0)
    whole = {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in SHAPES.items()}
    shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    return whole, jax.device_put(whole, shardings), shardings


def run(tx, params, steps=3):
    """Steps in one program: the types of parameters and state must not change."""

    def step(carry, _):
        params, state = carry
        return tx.apply(jax.tree.map(jnp.cos, params), state, params), None

    params, state = jax.jit(tx.apply)(jax.tree.map(jnp.cos, params), tx.init(params), params)
    return jax.jit(lambda *carry: jax.lax.scan(step, carry, length=steps - 1)[0])(params, state)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "lars" else pytest.mark.slow) for n in OPTIMIZERS])
def test_over_an_explicit_mesh_steps_are_those_of_one_device(name):
    """The default of `jax.make_mesh`. A leaf's type says how it is sharded, and its update must say the same."""
    tx = OPTIMIZERS[name]()
    whole, sharded, shardings = trees(AxisType.Explicit)
    want, want_state = run(tx, whole)
    got, state = run(tx, sharded)
    assert_close(got, want, 2e-6)  # norms add up in another order
    assert_close(state.mu, want_state.mu, 2e-6)
    for leaf, sharding in shardings.items():
        assert got[leaf].sharding.is_equivalent_to(sharding, got[leaf].ndim), leaf
    if "everything" in name:
        assert_close(tx.ema_params(state, got), tx.ema_params(want_state, want), 2e-6)
        assert jax.tree.map(jax.typeof, tx.ema_params(state, got)) == jax.tree.map(jax.typeof, got)


def test_the_optax_protocol_over_an_explicit_mesh():
    tx = fusedopt.adamw(0.01)
    whole, sharded, _ = trees(AxisType.Explicit)
    want, _ = jax.jit(tx.update)(whole, tx.init(whole), whole)
    got, _ = jax.jit(tx.update)(sharded, tx.init(sharded), sharded)
    assert_close(got, want, 1e-6)
    assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, sharded)
    flat = fusedopt.pack(sharded)
    assert_close(flat.tree, whole, 0)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_slots_of_large_leaves_begin_and_stay_where_their_leaf_is(kind):
    """As optax's do: on one device they might not fit."""
    tx = fusedopt.adamw(0.01)
    _, params, shardings = trees(kind)
    state = tx.init(params)
    step = jax.jit(tx.apply).lower(params, state, params).compile()
    with standard_promotion():
        theirs = optax.adamw(0.01).init(params)[0].mu
    _, new = step(params, state, params)
    for slots in (state.mu, state.nu, new.mu, new.nu):
        for name, slot in zip(SOLO, slots[-2:], strict=True):
            assert slot.shape == SHAPES[name]
            assert slot.sharding.is_equivalent_to(shardings[name], 2), name
            assert slot.addressable_shards[0].data.shape == theirs[name].addressable_shards[0].data.shape
    gathered = [line for line in step.as_text().splitlines() if " all-gather(" in line]
    assert gathered  # the small ones
    assert not any(f"[{SHAPES[name][0]},{SHAPES[name][1]}]" in line for line in gathered for name in SOLO)


def test_kernels_refuse_sharded_arrays_and_say_by_what():
    """They would take a part for the whole. Without a name XLA is chosen."""
    _, params, _ = trees(AxisType.Explicit)
    x = params["columns"]

    def sums(backend):
        return pallas_kernels.segment_sumsq(lambda s, x: (x,), jnp.zeros(1), [x], [x.size], backend=backend)

    with (
        pallas_kernels.interpret(),
        pytest.raises(ValueError, match=r"triton: no, takes whole arrays, got one sharded by P\(None, 'model'\)"),
    ):
        sums("triton")
    np.testing.assert_allclose(pallas_kernels.norm(sums(None)), np.linalg.norm(np.asarray(x, np.float64)), rtol=1e-6)


def test_a_state_may_begin_inside_a_jit():
    """With a mesh in use its slots are sharded like the leaves; without one JAX knows no devices for what nobody reads."""
    tx = fusedopt.adamw(0.01)
    whole, params, shardings = trees(AxisType.Explicit)
    with jax.set_mesh(shardings["both"].mesh):
        state = jax.jit(tx.init)(params)
    for name, slot in zip(SOLO, state.mu[-2:], strict=True):
        assert slot.sharding.is_equivalent_to(shardings[name], 2), name
    want, _ = jax.jit(tx.apply)(whole, tx.init(whole), whole)
    for begun in (state, jax.jit(tx.init)(params)):
        new, _ = jax.jit(tx.apply)(params, begun, params)
        assert_close(new, want, 1e-6)
