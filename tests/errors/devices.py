"""`zero1`: what it is made of, parameters and gradients that are placed otherwise, and steps in a shard_map of one's own."""

import functools

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fusedopt
from tests.errors.table import Row


def params():
    return {"a": {"bias": jnp.ones(8), "kernel": jnp.ones((8, 8))}}


@functools.cache
def mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


@functools.cache
def tx(name="adamw", **options):
    return fusedopt.zero1(getattr(fusedopt, name)(1e-3, **options), mesh())


@functools.cache
def start():
    flat = jax.device_put(fusedopt.pack(params(), tx()), NamedSharding(mesh(), P()))
    return flat, tx().init(flat)


def sharded():
    return {"a": {**params()["a"], "kernel": jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh(), P("data")))}}


def in_shard_map(body, *args, in_specs=None, check_vma=False):
    in_specs = P() if in_specs is None else in_specs
    run = jax.shard_map(body, mesh=mesh(), in_specs=in_specs, out_specs=P(), check_vma=check_vma)
    return jax.eval_shape(run, *args)


def summed():
    """Gradients that shard_map has added up over devices."""
    flat, state = start()

    def body(flat, state, x):
        grads = jax.grad(lambda f: jnp.mean(f.tree["a"]["kernel"]) * jnp.mean(x))(flat)
        return tx().apply(grads, state, flat)[0]

    return in_shard_map(body, flat, state, jnp.ones(8), in_specs=(P(), tx().specs(state), P("data")), check_vma=True)


def whole():
    flat, state = start()
    return in_shard_map(tx().apply, flat, state, flat)


def without_a_gradient():
    grads = {"a": {**params()["a"], "bias": None}}
    return tx().apply(grads, start()[1], params())


ROWS = [
    Row(
        "zero1-optax",
        lambda: fusedopt.zero1(optax.adam(0.1), mesh()),
        TypeError,
        "`tx`: expected an optimizer made by fusedopt, got GradientTransformationExtraArgs; a chain goes around zero1",
    ),
    Row(
        "zero1-chain",
        lambda: fusedopt.zero1(fusedopt.chain(fusedopt.adam(0.1)), mesh()),
        TypeError,
        "`tx`: expected an optimizer made by fusedopt, got a fusedopt.chain; a chain goes around zero1",
    ),
    Row(
        "zero1-twice",
        lambda: fusedopt.zero1(tx(), mesh()),
        TypeError,
        "`tx`: expected an optimizer that is not sharded, got one made by fusedopt.zero1",
    ),
    Row(
        "zero1-mesh",
        lambda: fusedopt.zero1(fusedopt.adam(0.1), jax.devices()),
        TypeError,
        "`mesh`: expected a jax.sharding.Mesh, got list",
    ),
    Row(
        "zero1-axis",
        lambda: fusedopt.zero1(fusedopt.adam(0.1), mesh(), "model"),
        ValueError,
        "`axis`: expected one of the axes of the mesh, ('data',), got 'model'",
    ),
    Row(
        "zero1-packed-for-others",
        lambda: tx().init(fusedopt.pack(params())),
        ValueError,
        "`params` bucket `bias.float32` with leaf `a/bias`: got shape (1024,), expected one dimension, a "
        "multiple of 8 devices * 1024 elements: pack for the devices, fusedopt.pack(params, tx) with the `tx`"
        " of fusedopt.zero1",
    ),
    Row(
        "zero1-sharded-params",
        lambda: tx().init(sharded()),
        ValueError,
        "`params` leaf `a/kernel`: got an array sharded by …, expected one that every device has whole: zero1"
        " shards the state of replicated parameters and gathers nothing unasked. Replicate it, "
        "jax.device_put(x, NamedSharding(mesh, P())), or give sharded leaves an optimizer of their own that "
        "works leaf by leaf (optax.partition with optax.adamw)",
    ),
    Row(
        "zero1-no-gradient",
        without_a_gradient,
        ValueError,
        "`grads` leaf `a/bias`: expected an array, got None; under zero1 every leaf needs a gradient, or a "
        "frozen Group",
    ),
    Row(
        "zero1-no-params",
        lambda: tx().update(start()[0], start()[1]),
        ValueError,
        "`params` are needed, got None: call update(grads, state, params); weight decay, trust ratios, "
        "averages and master weights are computed from them",
    ),
    Row(
        "zero1-init-inside",
        lambda: in_shard_map(tx().init, start()[0]),
        ValueError,
        "`init` inside a shard_map: make the state outside, and pass it by tx.specs(state)",
    ),
    Row(
        "zero1-state",
        lambda: tx().train_step(lambda tree: jnp.mean(tree["a"]["kernel"]))(start()[0], start()[1].mu),
        ValueError,
        "`state`: expected the FusedState of this optimizer's init, got tuple (restore a checkpoint into the "
        "structure of `tx.init(params)`)",
    ),
    Row(
        "zero1-whole-state-inside",
        whole,
        ValueError,
        "`state.mu`: got whole buffers inside a shard_map, expected the shards of this device: pass the state"
        " with in_specs and out_specs of tx.specs(state)",
    ),
    Row(
        "zero1-summed-gradients",
        summed,
        ValueError,
        "`grads` bucket `bias.float32`: got gradients that are the same on all devices of axis 'data', "
        "expected local ones, of which zero1 takes the mean. Under check_vma=True gradients of replicated "
        "parameters are summed already, 8 times too large for a mean: differentiate with respect to "
        "jax.lax.pcast(params, 'data', to=\"varying\") and leave any psum or pmean of your own out, or use "
        "tx.train_step, or shard_map with check_vma=False",
    ),
    Row(
        "zero1-keyword",
        lambda: tx().apply(start()[0], start()[1], start()[0], learning_rate=-1.0),
        ValueError,
        "`learning_rate`: expected a number in [0, inf), got -1.0",
    ),
]
