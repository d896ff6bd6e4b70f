"""State in shards over a mesh: the numbers of one device, the promised collectives and bytes, and what is refused."""

from __future__ import annotations

import functools

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
from tests.helpers import assert_close, assert_equal, filled, gradients, largest
from tests.zero1_cases import (
    ADAM,
    BATCH,
    MODES,
    SLOW,
    STEPS,
    batch_on,
    collectives,
    loss_fn,
    mesh_of,
    one_device,
    params_of,
    rate,
    replicated,
    run,
    start,
    step_of,
)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=SLOW)])
def test_adamw_on_eight_devices_is_that_of_one(kind, mode):
    tx = fusedopt.zero1(fusedopt.adamw(1e-3), mesh_of(8, kind))
    flat, state = run(tx, mode)
    want, _ = one_device("adamw")
    # Of the optimizer nothing differs (see the norms below): the sum over the batch is another one.
    assert_close(flat.tree, want.tree, ADAM)
    assert int(state.count) == STEPS
    assert {x.sharding.spec for x in (*state.mu, *state.nu)} == {P("data")}
    assert all(x.sharding.is_fully_replicated for x in (*flat.buckets, state.count, state.hyperparams))
    assert all(len({np.asarray(s.data).tobytes() for s in x.addressable_shards}) == 1 for x in flat.buckets)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_r125_collectives_under_jit_are_one_all_gather_a_bucket(kind):
    tx = fusedopt.zero1(fusedopt.adamw(1e-3), mesh_of(8, kind))
    flat, state = start(tx)
    grads = jax.tree.map(jnp.ones_like, flat)
    assert len(flat.buckets) == 2
    assert collectives(jax.jit(tx.apply), grads, state, flat) == {"all-gather": 2}


def test_r125_collectives_of_a_train_step_are_a_reduce_scatter_and_an_all_gather_a_bucket():
    tx = fusedopt.zero1(fusedopt.adamw(1e-3), mesh_of())
    flat, state = start(tx)
    train_step = jax.jit(tx.train_step(loss_fn))
    assert collectives(train_step, flat, state, *batch_on(tx)) == {"reduce-scatter": 2, "all-gather": 2}


def test_a_device_holds_an_eighth_of_the_state():
    params = {"kernel": jnp.zeros((2000, 1000)), "bias": jnp.zeros(1000)}
    options = dict(ema_decay=0.9, accumulate=2)
    whole = fusedopt.adamw(1e-3, packing=Packing(solo_from=None), **options)
    tx = fusedopt.zero1(fusedopt.adamw(1e-3, **options), mesh_of())
    _, state = start(tx, params)
    everything = sum(x.nbytes for x in jax.tree.leaves(whole.init(fusedopt.pack(params, whole))))
    for device in jax.devices():
        shards = [s for x in jax.tree.leaves(state) for s in x.addressable_shards if s.device == device]
        assert sum(s.data.nbytes for s in shards) <= 1.01 * everything / 8


def norms(state):
    return [x for x in (state.trust_ratios, state.grad_norm) if not isinstance(x, tuple)]


NORMED = {"lars": {}, "lamb": {}, "adamw": {"clip_norm": 0.05}, "adam": {}}


@pytest.mark.parametrize("name", ["lars", *(pytest.param(name, marks=SLOW) for name in ("lamb", "adamw", "adam"))])
def test_norms_across_shards_have_the_bits_of_one_device(name):
    """The same gradients to all; LARS, and rules without norms, have the bits of an optimizer that is not sharded, too."""
    make = functools.partial(getattr(fusedopt, name), 0.1, **NORMED[name])
    shapes = {f"{i}": {"kernel": (37 * (i + 1), 61), "bias": (61,)} for i in range(4)}
    params = filled(shapes)
    stacked = gradients(params, 2)
    results = {}
    for n in (0, 1, 8):
        tx = fusedopt.zero1(make(), mesh_of(n)) if n else make(packing=Packing(solo_from=None))
        flat, put = fusedopt.pack(params, tx), functools.partial(replicated, tx) if n else lambda x: x
        flat = put(flat)
        state, apply = tx.init(flat), jax.jit(tx.apply)
        for t in range(2):
            grads = fusedopt.pack(jax.tree.map(lambda x, t=t: x[t], stacked), tx)
            flat, state = apply(put(grads), state, flat)
        results[n] = jax.device_get((flat.tree, norms(state)))
    assert_equal(results[8], results[1])
    assert_close(results[8], results[0], 1e-6)
    if name in ("lars", "adam"):
        assert_equal(results[8], results[0])


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["lars", "lamb", "sgd", "lion"])
def test_every_rule_in_both_modes(name, mode):
    flat, state = run(fusedopt.zero1(getattr(fusedopt, name)(rate(name)), mesh_of()), mode)
    want, want_state = one_device(name)
    assert largest(jax.tree.map(lambda a, b: a - b, want.tree, params_of())) > 1e-3
    # Lion takes signs, which roundings of a gradient turn; where they do, a weight differs by a step.
    assert_close(flat.tree, want.tree, 1e-2 if name == "lion" else ADAM if name == "lamb" else 2e-6)
    assert_close(norms(state), norms(want_state), 1e-5)


def linear_loss(params, x, y):
    """Whose gradients are exact in bfloat16, although they differ between devices."""
    parts = [jnp.sum(p.astype(jnp.float32) * (i + 1.0)) for i, p in enumerate(jax.tree.leaves(params))]
    return jnp.mean(x) * sum(parts)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_masters_averages_accumulation_clipping_and_a_frozen_group(mode):
    frozen = fusedopt.Group("frozen", lambda path, leaf: path[0] == "a", frozen=True)
    options = dict(master_weights=True, ema_decay=0.9, clip_norm=0.5, accumulate=2, groups=[frozen])
    params, batch = params_of(jnp.bfloat16), (jnp.repeat(jnp.asarray([0.0, 2.0] * 4), 8), jnp.zeros(64))
    tx = fusedopt.zero1(fusedopt.adamw(1e-3, **options), mesh_of())
    flat, state = run(tx, mode, 6, params, linear_loss, batch)
    plain = fusedopt.adamw(1e-3, **options)
    want, want_state = run(plain, "jit", 6, params, linear_loss, batch)
    assert int(state.count) == 3
    assert_equal(flat.tree["a"], params["a"])
    assert_close(state.grad_norm, want_state.grad_norm, 1e-6)
    assert_close([m[: n.size] for m, n in zip(state.master, want_state.master)], list(want_state.master), 1e-6)
    assert_close(tx.ema_params(state, flat).tree, plain.ema_params(want_state, want).tree, 4e-3)


@pytest.mark.parametrize(
    ("name", "numbers"),
    [("lion", (1,)), pytest.param("lamb", (4, 1), marks=SLOW), pytest.param("adamw", (4, 1), marks=SLOW)],
)
def test_r127_eight_to_four_to_one_device_through_a_checkpoint_by_path(name, numbers):
    make = functools.partial(getattr(fusedopt, name), 1e-3, ema_decay=0.9)
    eight = fusedopt.zero1(make(), mesh_of(8))
    flat, state = run(eight, "jit", 2)
    for devices in numbers:
        stored = jax.device_get((flat.tree, fusedopt.to_optax_state(eight, state, flat)))
        tx = fusedopt.zero1(make(), mesh_of(devices))
        params, (optax_state, extras) = stored
        flat = replicated(tx, fusedopt.pack(params, tx))
        state = tx.place(fusedopt.from_optax_state(tx, optax_state, flat, extras))
        assert {x.sharding.num_devices for x in state.mu} == {devices}
        step, batch = step_of(tx, "jit"), batch_on(tx)
        for _ in range(2):
            flat, state = step(flat, state, *batch)
        eight = tx
    steps = 2 + 2 * len(numbers)
    want, want_state = run(make(), "jit", steps)
    assert_close(flat.tree, want.tree, 1e-2 if name == "lion" else ADAM)  # signs of a gradient's roundings
    assert int(state.count) == int(want_state.count) == steps


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_r127_raw_buffers_move_by_repack(kind):
    eight, four = (fusedopt.zero1(fusedopt.adamw(1e-3), mesh_of(n, kind)) for n in (8, 4))
    flat, state = run(eight, "jit", 2)
    host = jax.device_get((flat, state))
    own = replicated(four, fusedopt.pack(params_of(), four))
    with pytest.raises(ValueError, match=r"`state.mu` is of another layout.*got shape \(8192,\), expected \(4096,\)"):
        four.apply(own, host[1], own)
    moved, state = fusedopt.repack(*host, eight, four)
    moved, state = replicated(four, moved), four.place(state)
    step, batch = step_of(four, "jit"), batch_on(four)
    for _ in range(8):
        moved, state = step(moved, state, *batch)
    assert_close(moved.tree, one_device("adamw")[0].tree, ADAM)


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
    with pytest.raises(ValueError, match=r"`grads`: None in bucket `bias.float32`"):
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
