"""`zero1`: what its train_step cannot cut or finds elsewhere, states of other devices, a shard_map over another axis."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fusedopt
from tests.errors.devices import params, start, tx
from tests.errors.table import Row


def step(*batch, spec=None, state=None, flat=None):
    """A mistake in one argument of a train_step."""

    def call():
        own_flat, own_state = start()
        train_step = tx().train_step(lambda tree, *batch: jnp.mean(tree["a"]["kernel"]), batch_spec=spec, donate=False)
        return train_step(own_flat if flat is None else flat(), own_state if state is None else state(), *batch)

    return call


def elsewhere(x):
    return jax.device_put(x, jax.devices()[1])


def of_four_devices():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    return jax.device_get(fusedopt.zero1(fusedopt.adamw(1e-3), mesh).init(params()))


def over_another_axis():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    tx = fusedopt.zero1(fusedopt.adamw(1e-3), mesh)
    flat = jax.device_put(fusedopt.pack(params(), tx), NamedSharding(mesh, P()))
    over_model = jax.shard_map(tx.apply, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"model"}, check_vma=False)
    jax.eval_shape(over_model, flat, tx.init(flat), flat)


ROWS = [
    # Batches.
    Row(
        "zero1-batch-remainder",
        step(jnp.ones((63, 5))),
        ValueError,
        "`batch` leaf `0`: got shape (63, 5), expected dimension 0 to be a multiple of 8, the devices that share it: "
        "leave the last examples out, or pad them and weigh them with 0 in the loss",
    ),
    Row(
        "zero1-batch-dimension",
        step(jnp.ones(8), {"y": jnp.ones((8, 12))}, spec=(P(), P(None, "data"))),
        ValueError,
        "`batch` leaf `1/y`: got shape (8, 12), expected dimension 1 to be a multiple of 8, the devices that share it: "
        "leave the last examples out, or pad them and weigh them with 0 in the loss",
    ),
    Row(
        "zero1-batch-number",
        step(jnp.ones(8), jnp.ones(())),
        ValueError,
        "`batch` leaf `1`: got shape (), which jax.P('data') cannot cut: give it jax.P() in `batch_spec`, for a value that "
        "all devices have",
    ),
    Row(
        "zero1-batch-elsewhere",
        lambda: step(elsewhere(jnp.ones(8)))(),
        ValueError,
        "`batch` leaf `0`: got an array on 1 device (…), expected one on the 8 of the mesh: "
        "jax.device_put(x, jax.NamedSharding(tx.mesh, jax.P('data')))",
    ),
    Row(
        "zero1-batch-axis",
        step(jnp.ones(8), spec=P("model")),
        ValueError,
        "`batch_spec`: expected axes of the mesh, ('data',), got 'model'",
    ),
    Row(
        "zero1-batch-specs",
        step(jnp.ones(8), jnp.ones(8), spec=(P("data"),)),
        ValueError,
        "`batch_spec`: expected a PartitionSpec, or a tuple with one for each of the 2 arguments behind the state, got "
        "(…('data',),)",
    ),
    Row(
        "zero1-batch-no-spec",
        step(jnp.ones(8), spec="data"),
        TypeError,
        "`batch_spec` of `batch` leaf `0`: expected a PartitionSpec, got str",
    ),
    # Parameters, gradients and states.
    Row(
        "zero1-params-elsewhere",
        step(flat=lambda: elsewhere(fusedopt.pack(params(), tx()))),
        ValueError,
        "`params` leaf `bias.float32@…`: got an array on 1 device (…), expected one on the 8 of the mesh: "
        "jax.device_put(x, jax.NamedSharding(tx.mesh, jax.P()))",
    ),
    Row(
        "zero1-init-elsewhere",
        lambda: tx().init(elsewhere(params())),
        ValueError,
        "`params` leaf `a/bias`: got an array on 1 device (…), expected one on the 8 of the mesh: "
        "jax.device_put(x, jax.NamedSharding(tx.mesh, jax.P()))",
    ),
    Row(
        "zero1-grads-elsewhere",
        lambda: tx().apply(elsewhere(params()), start()[1], params()),
        ValueError,
        "`grads` leaf `a/bias`: got an array on 1 device (…), expected one on the 8 of the mesh: "
        "jax.device_put(x, jax.NamedSharding(tx.mesh, jax.P()))",
    ),
    Row(
        "zero1-state-of-four-devices",
        step(state=of_four_devices),
        ValueError,
        "`state.mu` is of another layout: bucket `bias.float32` with leaf `a/bias`: got shape (4096,), expected (8192,). "
        "tx.init(params) makes a state for these devices; one of others moves by fusedopt.repack, or by path with "
        "to_optax_state and from_optax_state, and tx.place",
    ),
    Row(
        "zero1-state-of-others",
        step(state=lambda: fusedopt.sgd(1e-3).init(params())),
        ValueError,
        "`state.mu` is of another layout: got 0 buffers, expected 2 for these parameters (bias.float32, weight.float32); a "
        "state of another optimizer does not go on here",
    ),
    Row(
        "zero1-specs",
        lambda: tx().specs(start()[1].mu),
        ValueError,
        "`state`: expected the FusedState of this optimizer's init, got tuple (restore a checkpoint into the structure of "
        "`tx.init(params)`)",
    ),
    Row(
        "zero1-another-axis",
        over_another_axis,
        ValueError,
        "`axis`: got a shard_map over ('model',), expected one over 'data' too, or none",
    ),
]
