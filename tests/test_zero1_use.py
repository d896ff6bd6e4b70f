"""What a user of `zero1` meets: mistakes and what is said to them, and the rest of the library over both kinds of mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fusedopt
from tests.helpers import assert_close, assert_equal
from tests.zero1_cases import BATCH, batch_on, collectives, loss_fn, mesh_of, params_of, replicated, start

KINDS = [AxisType.Auto, AxisType.Explicit]
X, Y = BATCH
DATA = P("data")

# Argument of train_step, the batch, and what is said to it.
BATCHES = {
    "not divisible": (
        None,
        (X[:63], Y[:63]),
        r"`batch` leaf `0`: got shape \(63, 50\), expected dimension 0.*multiple of 8",
    ),
    "second not divisible": (
        None,
        (X, {"y": Y[:4]}),
        r"`batch` leaf `1/y`: got shape \(4, 10\).*leave the last examples",
    ),
    "other dimension": (P(None, "data"), (X[:, :48], Y), r"leaf `1`: got shape \(64, 10\), expected dimension 1.*of 8"),
    "a number": (
        None,
        (X, Y, jnp.float32(1)),
        r"leaf `2`: got shape \(\), which jax.P\('data'\) cannot cut.*jax.P\(\)",
    ),
    "a key": (None, (X, Y, jax.random.key(0)), r"leaf `2`: got shape \(\), which jax.P\('data'\) cannot cut"),
    "other axis": (P("model"), BATCH, r"`batch_spec`: expected axes of the mesh, \('data',\), got 'model'"),
    "too few": ((DATA,), BATCH, r"`batch_spec`: expected .* each of the 2 arguments behind the state, got \(P"),
    "a list": ([DATA, DATA], BATCH, "`batch_spec`: expected a PartitionSpec, or a tuple"),
    "a name": ("data", BATCH, "`batch_spec` of `batch` leaf `0`: expected a PartitionSpec, got str"),
    "elsewhere": (
        None,
        jax.device_put(BATCH, jax.devices()[1]),
        r"leaf `0`: got an array on 1 device .*jax.P\('data'\)",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_batches_that_cannot_be_cut(kind):
    tx = fusedopt.zero1(fusedopt.sgd(1e-3), mesh_of(8, kind))
    flat, state = start(tx)
    for spec, batch, message in BATCHES.values():
        with pytest.raises((TypeError, ValueError), match=message):
            tx.train_step(loss_fn, batch_spec=spec)(flat, state, *batch)


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_that_all_devices_have(kind):
    tx = fusedopt.zero1(fusedopt.sgd(1e-3), mesh_of(8, kind))
    flat, state = start(tx)
    scaled = lambda params, batch, s: s * loss_fn(params, *batch)  # noqa: E731
    _, _, loss = tx.train_step(scaled, batch_spec=(DATA, P()), donate=False)(flat, state, BATCH, jnp.float32(3))
    np.testing.assert_allclose(loss, 3 * loss_fn(params_of(), *BATCH), rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_and_states_of_other_devices(kind):
    tx, four = (fusedopt.zero1(fusedopt.adamw(1e-3), mesh_of(n, kind)) for n in (8, 4))
    (flat, state), batch = start(tx), batch_on(tx)
    alone = jax.device_put(fusedopt.pack(params_of(), tx), jax.devices()[0])
    message = r"`params` leaf `bias.float32@\w+`: got an array on 1 device .*on the 8 of the mesh: jax.device_put"
    for refused in (lambda: tx.init(alone), lambda: tx.train_step(loss_fn)(alone, state, *batch)):
        with pytest.raises(ValueError, match=message):
            refused()
    with pytest.raises(ValueError, match=message.replace("params", "grads")):
        tx.apply(alone, state, flat)
    others = {
        r"got shape \(4096,\), expected \(8192,\). tx.init\(params\) makes.*repack.*tx.place": four.init(params_of()),
        r"got 3 buffers, expected 2 .*. tx.init\(params\) makes": fusedopt.adamw(1e-3).init(params_of()),
        "`state`: expected the FusedState of this optimizer's init, got tuple": optax.adamw(1e-3).init(params_of()),
    }
    for message, wrong in others.items():
        for refused in (lambda s: tx.train_step(loss_fn)(flat, s, *batch), lambda s: jax.jit(tx.apply)(flat, s, flat)):
            with pytest.raises(ValueError, match=message):
                refused(jax.device_get(wrong))
    with pytest.raises(ValueError, match="`state`: expected the FusedState"):
        tx.specs(optax.adamw(1e-3).init(params_of()))


def test_a_shard_map_over_another_axis_only():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    tx = fusedopt.zero1(fusedopt.sgd(1e-3), mesh)
    flat, state = start(tx)
    with pytest.raises(ValueError, match=r"`axis`: got a shard_map over \('model',\), expected one over 'data' too"):
        jax.eval_shape(
            jax.shard_map(tx.apply, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"model"}, check_vma=False),
            flat,
            state,
            flat,
        )


@pytest.mark.parametrize("mean", [jax.lax.pmean, jax.lax.psum])
def test_gradients_that_were_reduced_before_are_refused_where_types_tell(mean):
    tx = fusedopt.zero1(fusedopt.sgd(1e-3), mesh_of())
    flat, state = start(tx)

    def step(flat, state, x, y):
        at = jax.lax.pcast(flat, "data", to="varying")
        grads = jax.grad(lambda flat: loss_fn(flat.tree, x, y))(at)
        return tx.apply(jax.tree.map(lambda g: mean(g, "data"), grads), state, flat)

    specs = tx.specs(state)
    mapped = jax.shard_map(step, mesh=tx.mesh, in_specs=(P(), specs, DATA, DATA), out_specs=(P(), specs))
    with pytest.raises(ValueError, match=r"of which zero1 takes the mean.*leave any psum or pmean of your own out"):
        jax.eval_shape(mapped, flat, state, *batch_on(tx))


@pytest.mark.parametrize("kind", KINDS)
def test_averages_hyperparameters_and_forms_by_path(kind):
    """An Explicit mesh, which is what jax.make_mesh makes, refuses to cut sharded buffers: they are gathered first."""
    make = lambda: fusedopt.adamw(1e-3, ema_decay=0.5)  # noqa: E731
    tx, four, plain = fusedopt.zero1(make(), mesh_of(8, kind)), fusedopt.zero1(make(), mesh_of(4, kind)), make()
    grads = jax.tree.map(jnp.cos, params_of())
    flat, state = start(tx)
    flat, state = jax.jit(tx.apply)(replicated(tx, fusedopt.pack(grads, tx)), state, flat)
    own = fusedopt.pack(params_of(), plain)
    own, own_state = jax.jit(plain.apply)(fusedopt.pack(grads, plain), plain.init(own), own)

    want = plain.ema_params(own_state, own).tree
    chained = fusedopt.chain(optax.clip(1.0), tx)
    for average in (
        tx.ema_params(state, flat).tree,
        tx.ema_params(state, flat.tree),
        jax.jit(lambda state, flat: tx.ema_params(state, flat).tree)(state, flat),
        chained.ema_params((optax.EmptyState(), state), flat).tree,
    ):
        assert_close(average, want, 1e-6)
    assert all(x.sharding.is_fully_replicated for x in tx.ema_params(state, flat).buckets)

    optax_state, extras = fusedopt.to_optax_state(tx, state, flat)
    assert_close(optax_state, fusedopt.to_optax_state(plain, own_state, own)[0], 1e-6)
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves((optax_state, extras)))
    back = tx.place(fusedopt.from_optax_state(tx, optax_state, flat, extras))
    assert_equal(back, state)
    assert {x.sharding.spec for x in back.mu} == {DATA}
    moved, moved_state = jax.device_get(fusedopt.repack(flat, state, tx, four))
    assert_equal(fusedopt.to_optax_state(four, four.place(moved_state), replicated(four, moved))[0], optax_state)

    changed = tx.set_hyperparams(state, learning_rate=0.0, b1=jnp.float32(0.5))
    assert {name: float(x) for name, x in tx.hyperparams(changed).items()}["b1"] == 0.5
    again, after, _ = tx.train_step(loss_fn, donate=False)(flat, changed, *batch_on(tx))
    assert_equal(again.tree, flat.tree)
    assert float(tx.hyperparams(after)["learning_rate"]) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_r125_without_zero1_large_sharded_leaves_stay_and_small_ones_are_gathered(kind):
    """README, "Many devices". Collectives of 512 numbers and more; the search for NaN adds one of one number."""
    mesh, tx = mesh_of(4, kind), fusedopt.adamw(1e-3)

    def compiled(shape):
        weights = {name: jax.device_put(jnp.ones(shape), NamedSharding(mesh, DATA)) for name in ("v", "w")}
        params = {**weights, "b": jax.device_put(jnp.ones(8), NamedSharding(mesh, P()))}
        step = jax.jit(lambda grads, state, params: tx.apply(grads, state, params))
        state = jax.jit(tx.init)(params)
        assert collectives(jax.jit(tx.init), params) == {}
        new, _ = step(params, state, params)
        assert_close(new["w"], jnp.full(shape, 1 - 1e-3 * (1 + 1e-4)), 1e-6)
        return collectives(step, params, state, params), new["w"].sharding.is_fully_replicated

    assert compiled((512, 64)) == ({}, False)
    found, _ = compiled((40, 30))
    assert "all-gather" in found
