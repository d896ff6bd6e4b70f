"""One of several processes that train together under zero1: `python -m tests.multiprocess`, which test_multiprocess starts.

The gradients are sums of few binary digits, exact in any order of the devices: the collectives between processes add in
another order than those inside of one. Everything behind the sum is to have the same bits, whatever the processes.
"""

from __future__ import annotations

import argparse
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import fusedopt

STEPS, EXAMPLES = 10, 32
SHAPES = {"a": {"kernel": (50, 64), "bias": (64,)}, "b": {"kernel": (64, 300), "bias": (300,)}}
OPTIMIZERS = {
    "adamw": (lambda: fusedopt.adamw(1e-2, weight_decay=0.1, ema_decay=0.9), AxisType.Explicit),
    "lars": (lambda: fusedopt.lars(0.5, weight_decay=1e-3), AxisType.Auto),
}


def mesh_of(kind: AxisType) -> Mesh:
    return jax.make_mesh((8,), ("data",), axis_types=(kind,))


def examples(step: int) -> np.ndarray:
    """Small integers (EXAMPLES, 3), the same for a step in every process."""
    return np.random.default_rng(step).integers(-3, 4, (EXAMPLES, 3)).astype(np.float32)


def own_part(x: np.ndarray) -> np.ndarray:
    """This process's part of a batch."""
    size = len(x) // jax.process_count()
    return x[jax.process_index() * size :][:size]


def params_of() -> dict:
    def leaf(i, shape):
        return np.random.default_rng(100 + i).normal(size=shape).astype(np.float32)

    leaves, treedef = jax.tree.flatten(SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    return treedef.unflatten([leaf(i, shape) for i, shape in enumerate(leaves)])


def loss_fn(params, x):
    """Whose gradient at a weight w is the mean of ``x[:, i] * round(64 w) / 64``: at most 16 binary digits in a sum."""
    parts = [
        jnp.mean(x[:, i % 3]) * jnp.sum(jax.lax.stop_gradient(jnp.round(64 * w) / 64) * w)
        for i, w in enumerate(jax.tree.leaves(params))
    ]
    return sum(parts)


def run(name: str, steps: int = STEPS, note=lambda step: None) -> dict[str, np.ndarray]:
    """Trains; parameters and state by name, whole."""
    make, kind = OPTIMIZERS[name]
    mesh = mesh_of(kind)
    tx = fusedopt.zero1(make(), mesh)
    flat = jax.device_put(fusedopt.pack(params_of(), tx), NamedSharding(mesh, P()))
    state = tx.init(flat)
    step = tx.train_step(loss_fn)
    for t in range(steps) if steps else itertools.count():
        x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), own_part(examples(t)))
        flat, state, loss = step(flat, state, x)
        jax.block_until_ready(loss)
        note(t)
    optax_state, extras = fusedopt.to_optax_state(tx, state, flat)
    result = {"params": flat.tree, "by_path": optax_state, "extras": extras}
    result["buffers"] = multihost_utils.process_allgather((state.mu, state.nu), tiled=True)
    if name == "adamw":
        result["ema"] = tx.ema_params(state, flat).tree
        result["reset"] = tx.hyperparams(tx.set_hyperparams(state, learning_rate=0.5))["learning_rate"]
    return {jax.tree_util.keystr(p): np.asarray(x) for p, x in jax.tree_util.tree_leaves_with_path(result)}


def refusals() -> list[str]:
    """What train_step says to a part of a batch, and to parameters, that were not made arrays of all processes."""
    tx = fusedopt.zero1(fusedopt.sgd(0.1), mesh_of(AxisType.Auto))
    own = fusedopt.pack(params_of(), tx)
    flat = jax.device_put(own, NamedSharding(tx.mesh, P()))
    state, said = tx.init(flat), []
    for params in (flat, own):
        try:
            tx.train_step(loss_fn)(params, state, own_part(examples(0)))
            said.append("accepted")
        except ValueError as error:
            said.append(str(error))
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, kind in (("port", str), ("count", int), ("id", int), ("heartbeat", int), ("out", str)):
        parser.add_argument(name, type=kind)
    args = parser.parse_args()
    jax.distributed.initialize(
        f"127.0.0.1:{args.port}",
        num_processes=args.count,
        process_id=args.id,
        initialization_timeout=60,
        heartbeat_timeout_seconds=args.heartbeat,
        shutdown_timeout_seconds=20,
    )
    if not args.out:  # trains until it is stopped
        run("adamw", 0, lambda t: print(f"step {t} done"))
    arrays = {f"{name}{path}": x for name in OPTIMIZERS for path, x in run(name).items()}
    np.savez(args.out, refusals=refusals(), **arrays)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
