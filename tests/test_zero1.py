"""State in shards over a mesh: the numbers of one device, the promised collectives and bytes, and what is refused."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fusedopt
from fusedopt import Packing
from tests.helpers import assert_close, assert_equal, filled, gradients, largest
from tests.zero1_cases import (
    ADAM,
    MODES,
    SLOW,
    STEPS,
    batch_on,
    collectives,
    loss_fn,
    mesh_of,
    norms,
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


NORMED = {"lars": {}, "lamb": {}, "adamw": {"clip_norm": 0.05}, "adam": {}}


@pytest.mark.parametrize("name", ["lars", "adamw", *(pytest.param(name, marks=SLOW) for name in ("lamb", "adam"))])
def test_norms_across_shards_have_the_bits_of_one_device(name):
    """The same gradients to all; LARS, and rules without norms, have the bits of an optimizer that is not sharded, too."""
    make = functools.partial(getattr(fusedopt, name), 0.1, **NORMED[name])
    shapes = {f"{i}": {"kernel": (37 * (i + 1), 61), "bias": (61,)} for i in range(4)}
    params = filled(shapes)
    stacked = gradients(params, STEPS)
    results = {}
    for n in (0, 1, 8):
        tx = fusedopt.zero1(make(), mesh_of(n)) if n else make(packing=Packing(solo_from=None))
        flat, put = fusedopt.pack(params, tx), functools.partial(replicated, tx) if n else lambda x: x
        flat = put(flat)
        state, apply = tx.init(flat), jax.jit(tx.apply)
        for t in range(STEPS):
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
