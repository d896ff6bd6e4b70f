"""What stands around sharded state: shard_maps of the user, placements that are refused, keywords, kernels, wrappers."""

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
from fusedopt import Packing
from pallas_kernels import compat
from tests.helpers import assert_close, assert_equal
from tests.zero1_cases import (
    ADAM,
    BATCH,
    MODES,
    SLOW,
    STEPS,
    batch_on,
    loss_fn,
    mesh_of,
    norms,
    one_device,
    params_of,
    rate,
    replicated,
    run,
    start,
)


def own_step(tx, check_vma, differentiate="params"):
    """A shard_map of the user's around `tx.apply`."""

    def body(flat, state, x, y):
        at = jax.lax.pcast(flat, "data", to="varying") if differentiate == "pcast" else flat
        grads = jax.grad(lambda flat: loss_fn(flat.tree, x, y))(at)
        return tx.apply(grads, state, flat)

    def step(flat, state, x, y):
        specs = tx.specs(state)
        return jax.shard_map(
            body,
            mesh=tx.mesh,
            in_specs=(P(), specs, P("data"), P("data")),
            out_specs=(P(), specs),
            check_vma=check_vma,
        )(flat, state, x, y)

    return jax.jit(step)


@pytest.mark.parametrize(
    ("check_vma", "differentiate", "name"),
    [(True, "pcast", "sgd"), (False, "params", "sgd"), pytest.param(True, "pcast", "lars", marks=SLOW)],
)
def test_in_a_shard_map_of_ones_own(check_vma, differentiate, name):
    tx = fusedopt.zero1(getattr(fusedopt, name)(rate(name)), mesh_of())
    (flat, state), batch, step = start(tx), batch_on(tx), own_step(tx, check_vma, differentiate)
    for _ in range(STEPS):
        flat, state = step(flat, state, *batch)
    assert_close(flat.tree, one_device(name)[0].tree, 2e-6)


def test_gradients_that_shard_map_has_summed_are_refused():
    tx = fusedopt.zero1(fusedopt.adamw(1e-3), mesh_of())
    flat, state = start(tx)
    with pytest.raises(ValueError, match=r"`grads` bucket `bias.float32`.*8 times too large.*pcast"):
        own_step(tx, check_vma=True)(flat, state, *batch_on(tx))


def test_whole_state_and_parts_of_parameters_in_a_shard_map_are_refused():
    tx = fusedopt.zero1(fusedopt.adamw(1e-3), mesh_of())
    flat, state = start(tx)

    def run(in_specs):
        mapped = jax.shard_map(tx.apply, mesh=tx.mesh, in_specs=in_specs, out_specs=P(), check_vma=False)
        jax.eval_shape(mapped, flat, state, flat)

    with pytest.raises(ValueError, match=r"`state.mu`: got whole buffers inside a shard_map.*tx.specs"):
        run(P())
    with pytest.raises(ValueError, match=r"bucket `bias.float32`: got shape \(1024,\), expected \(8192,\)"):
        run((P("data"), tx.specs(state), P("data")))
    with pytest.raises(ValueError, match="`init` inside a shard_map"):
        jax.eval_shape(jax.shard_map(tx.init, mesh=tx.mesh, in_specs=P(), out_specs=P(), check_vma=False), flat)


def test_r125_sharded_parameters_are_refused_and_never_gathered():
    mesh = mesh_of()
    tx = fusedopt.zero1(fusedopt.adamw(1e-3), mesh)
    params = {"w": jax.device_put(jnp.ones((16, 8)), NamedSharding(mesh, P("data"))), "b": jnp.ones(8)}
    message = r"`params` leaf `w`: got an array sharded by .*'data'.*Replicate it.*optax.partition"
    for refused in (tx.init, lambda p: fusedopt.pack(p, tx), lambda p: tx.apply(p, tx.init(jax.device_get(p)), p)):
        with pytest.raises(ValueError, match=message.replace("params", "(params|grads)")):
            refused(params)
    flat, state = start(tx)
    cut = jax.device_put(flat, NamedSharding(mesh, P("data")))
    for args in ((flat, state, cut), (cut, state, flat)):
        with pytest.raises(ValueError, match=r"leaf `bias.float32@\w+`: got an array sharded"):
            tx.apply(*args)
    with pytest.raises(ValueError, match="got an array sharded"):
        tx.train_step(loss_fn)(cut, state, *BATCH)


def test_r125_sharded_parameters_are_refused_in_a_jit_over_an_explicit_mesh():
    mesh = mesh_of(8, AxisType.Explicit)
    tx = fusedopt.zero1(fusedopt.adamw(1e-3), mesh)
    w = jax.device_put(jnp.ones((16, 8)), NamedSharding(mesh, P(None, "data")))
    with pytest.raises(ValueError, match="`params` leaf `w`: got an array sharded"):
        jax.jit(tx.init)({"w": w})


def test_a_nan_on_one_device_skips_the_step_on_all():
    tx = fusedopt.zero1(fusedopt.adamw(1e-3), mesh_of())
    flat, state = start(tx)
    step = tx.train_step(loss_fn, donate=False)
    x, y = batch_on(tx)
    after, new, loss = step(flat, state, x.at[9, 3].set(jnp.nan), y)
    assert np.isnan(loss)
    assert bool(new.skipped)
    assert_equal(after, flat)
    assert_equal((new.mu, new.nu, new.count), (state.mu, state.nu, state.count))
    after, new, _ = step(flat, state, x, y, has_nan=True, learning_rate=0.5)
    assert_equal(after, flat)
    after, new, loss = step(flat, state, x, y, learning_rate=0.0)
    assert not bool(new.skipped)
    assert_equal(after.tree, flat.tree)
    np.testing.assert_allclose(loss, loss_fn(params_of(), *BATCH), rtol=1e-6)


def test_keywords_of_a_step_under_jit_and_without():
    tx, plain = fusedopt.zero1(fusedopt.adamw(1e-3), mesh_of()), fusedopt.adamw(1e-3)
    flat, state = start(tx)
    grads = jax.tree.map(lambda x: 0.5 * x, flat)
    own = fusedopt.pack(params_of(), packing=Packing(solo_from=None))
    extra = dict(loss_scale=4.0, learning_rate=jnp.float32(0.1))
    want, _ = jax.jit(plain.apply)(jax.tree.map(lambda x: 0.5 * x, own), plain.init(own), own, **extra)
    got, _ = tx.apply(grads, state, flat, value="ignored", **extra)
    assert_close(got.tree, want.tree, 1e-6)
    updates, new = tx.update(grads, state, flat, **extra)
    assert_close(optax.apply_updates(flat, updates).tree, want.tree, 1e-6)
    still, skipped = tx.apply(grads, state, flat, has_nan=True)
    assert bool(skipped.skipped)
    assert_equal(still, flat)
    for refused in (tx.apply, tx.train_step(loss_fn)):
        with pytest.raises(ValueError, match="learning_rate"):
            refused(flat, state, flat, learning_rate=-1.0)
    assert float(tx.hyperparams(tx.set_hyperparams(new, learning_rate=0.5))["learning_rate"]) == 0.5


@pytest.mark.parametrize(
    ("name", "backend", "mode"),
    [
        ("sgd", "triton", "train_step"),
        pytest.param("lars", "triton", "train_step", marks=SLOW),
        pytest.param("lars", "triton", "jit", marks=SLOW),
        *([pytest.param("lars", "mosaic", "jit", marks=SLOW)] if compat.HAS_MOSAIC else []),
    ],
)
def test_pallas_kernels_inside_the_shard_map(name, backend, mode):
    packing = Packing(align=1024)
    with pallas_kernels.interpret():
        tx = fusedopt.zero1(getattr(fusedopt, name)(rate(name), backend=backend, packing=packing), mesh_of())
        flat, state = run(tx, mode, 2)
    want, want_state = run(fusedopt.zero1(getattr(fusedopt, name)(rate(name), packing=packing), mesh_of()), mode, 2)
    assert_close(flat.tree, want.tree, 1e-6)
    assert_close(norms(state), norms(want_state), 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_over_one_axis_of_two(kind, mode):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    flat, state = run(fusedopt.zero1(fusedopt.lars(1e-2), mesh), mode)
    assert_close(flat.tree, one_device("lars")[0].tree, 1e-6)
    assert {s.data.size * 4 for x in state.mu for s in x.addressable_shards} == {x.size for x in state.mu}


@pytest.mark.slow
def test_in_a_train_state_of_flax():
    tx = fusedopt.zero1(fusedopt.adamw(1e-3), mesh_of())
    state = fusedopt.TrainState.create(apply_fn=lambda p, x: x, params=params_of(), tx=tx, flat=True)

    @jax.jit
    def step(state, x, y):
        return state.apply_gradients(grads=jax.grad(lambda p: loss_fn(p.tree, x, y))(state.params))

    for _ in range(STEPS):
        state = step(state, *batch_on(tx))
    assert_close(state.params_tree, one_device("adamw")[0].tree, ADAM)
    assert {x.sharding.spec for x in state.opt_state.mu} == {P("data")}


@pytest.mark.slow
def test_trees_and_chains_around_it():
    plain = fusedopt.chain(optax.clip_by_global_norm(0.1), fusedopt.adamw(1e-3))
    tx = fusedopt.zero1(fusedopt.adamw(1e-3), mesh_of())
    chained = fusedopt.chain(optax.clip_by_global_norm(0.1), tx)
    params = {**params_of(), "steps": jnp.arange(3)}

    def two(tx, params):
        state = tx.init(params)
        params, state = jax.jit(lambda s, p: tx.apply(grads, s, p))(state, params)
        updates, _ = jax.jit(lambda s, p: tx.update(grads, s, p))(state, params)
        return params, updates

    grads = {**params_of(), "steps": jnp.zeros(3)}
    assert_close(two(chained, replicated(tx, params)), two(plain, params), 1e-6)
    with pytest.raises(ValueError, match="`grads` leaf `w/bias`: expected an array, got None"):
        tx.apply({"w": {"bias": None}}, tx.init({"w": {"bias": jnp.ones(3)}}), {"w": {"bias": jnp.ones(3)}})


def test_a_train_step_takes_the_memory_and_averages_what_else_the_loss_returns():
    tx = fusedopt.zero1(fusedopt.adamw(1e-3), mesh_of())
    flat, state = start(tx)
    step = tx.train_step(lambda p, x: (jnp.mean(p["a"]["bias"]) * jnp.mean(x), {"mean": jnp.mean(x)}), has_aux=True)
    new, new_state, _, aux = step(flat, state, jnp.arange(16.0))
    np.testing.assert_allclose(aux["mean"], 7.5)
    assert all(x.is_deleted() for x in (*flat.buckets, *state.mu))
    new, new_state, _, _ = step(new, new_state, jnp.arange(16.0))
    assert int(new_state.count) == 2


def test_what_zero1_does_not_take():
    tx, mesh = fusedopt.adamw(1e-3), mesh_of()
    for wrong in (optax.adam(1e-2), fusedopt.chain(tx), fusedopt.zero1(tx, mesh)):
        with pytest.raises(TypeError, match="`tx`: expected an optimizer"):
            fusedopt.zero1(wrong, mesh)
    with pytest.raises(TypeError, match=r"`mesh`: expected a jax.sharding.Mesh, got list"):
        fusedopt.zero1(tx, jax.devices())
    with pytest.raises(ValueError, match=r"`axis`: expected one of the axes of the mesh, \('data',\), got 'model'"):
        fusedopt.zero1(tx, mesh, "model")
    with pytest.raises(
        ValueError, match=r"bucket `bias.float32` with leaf `a.bias`: got shape \(1024,\).*multiple of 8 devices"
    ):
        fusedopt.zero1(tx, mesh).init(fusedopt.pack(params_of(), packing=Packing(solo_from=None)))
    with pytest.raises(ValueError, match="`shards`: expected a positive int, got 0"):
        Packing(shards=0)
    layout = fusedopt.pack(params_of(), packing=Packing(solo_from=None, shards=3)).layout
    assert all(b.size % (3 * 1024) == 0 for b in layout.buckets)
    sharded = fusedopt.zero1(fusedopt.lars(0.1), mesh)
    with pytest.raises(ValueError, match="`params` are needed"):
        sharded.update(fusedopt.pack(params_of(), sharded), sharded.init(params_of()))
