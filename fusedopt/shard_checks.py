"""What `zero1` refuses: arrays that are sharded or elsewhere, batches that cannot be cut, gradients summed already."""

from __future__ import annotations

import functools
import math
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fusedopt.layout import FlatLayout
from fusedopt.optimizer import Optimizer
from fusedopt.packing import FlatParams, sharded_by
from fusedopt.paths import path_of, show
from fusedopt.shards import Shards, varying
from fusedopt.state import MOVE, FusedState, check_state


def check_whole(tree: Any, name: str, mesh: Mesh | None = None) -> None:
    """Raises ValueError naming a leaf that is sharded, as far as arrays and types tell (not in a jit over an Auto mesh).

    With `mesh`, also one that was put on other devices, or that is of one process among several: JAX would take whatever
    each process has for the same.
    """
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if mesh is not None and _elsewhere(x, mesh):
            raise ValueError(_misplaced(x, f"`{name}` leaf `{show(path_of(path))}`", mesh, P()))
        if mesh is not None and _of_one_process(x, mesh):
            _refuse_own(
                f"`{name}` leaf `{show(path_of(path))}`",
                mesh,
                "jax.device_put(x, jax.NamedSharding(tx.mesh, jax.P())), which also compares what they have",
            )
        if (spec := sharded_by(x)) is not None:
            raise ValueError(
                f"`{name}` leaf `{show(path_of(path))}`: got an array sharded by {spec}, expected one that every device has "
                "whole: zero1 shards the state of replicated parameters and gathers nothing unasked. Replicate it, "
                "jax.device_put(x, NamedSharding(mesh, P())), or give sharded leaves an optimizer of their own that works leaf "
                "by leaf (optax.partition with optax.adamw)"
            )


@functools.lru_cache(maxsize=64)
def _places(mesh: Mesh) -> tuple[frozenset, int]:
    """The devices of a mesh, and how many processes they belong to."""
    devices = frozenset(mesh.devices.flat)
    return devices, len({device.process_index for device in devices})


def _elsewhere(x: Any, mesh: Mesh) -> bool:
    """Whether an array was put on other devices than those of the mesh."""
    placed = isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.committed
    return placed and x.sharding.device_set != _places(mesh)[0] and not _of_one_process(x, mesh)


def _of_one_process(x: Any, mesh: Mesh) -> bool:
    """Whether an array is known to one process, where the mesh is of several."""
    if _places(mesh)[1] == 1 or isinstance(x, Tracer):
        return False
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def _refuse_own(what: str, mesh: Mesh, remedy: str) -> NoReturn:
    raise ValueError(
        f"{what}: got an array of this process alone, expected one over all {_places(mesh)[1]} processes: {remedy}"
    )


def _misplaced(x: Any, what: str, mesh: Mesh, spec: P) -> str:
    where = sorted(map(str, x.sharding.device_set))
    count = f"{len(where)} device{'s' if len(where) > 1 else ''}"
    return (
        f"{what}: got an array on {count} ({', '.join(where[:3])}), expected one on the {mesh.size} of the mesh: "
        f"jax.device_put(x, jax.NamedSharding(tx.mesh, {_shown(spec)}))"
    )


def _shown(spec: P) -> str:
    return f"jax.P({', '.join(map(repr, spec))})"


def check_batch(batch: tuple, batch_spec: Any, mesh: Mesh) -> None:
    """Raises ValueError naming an array of a batch that cannot be cut by its PartitionSpec, or that is not whole.

    Over several processes JAX takes an array of one process for one that all of them have whole. Passing each process's
    part would train on parts of the parts.
    """
    try:
        specs = jax.tree.broadcast(batch_spec, batch, is_leaf=lambda x: isinstance(x, P))
    except ValueError as error:
        raise ValueError(
            f"`batch_spec`: expected a PartitionSpec, or a tuple with one for each of the {len(batch)} arguments behind the "
            f"state, got {batch_spec}"
        ) from error
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    for (path, x), spec in zip(leaves, jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P)), strict=True):
        what = f"`batch` leaf `{show(path_of(path))}`"
        if not isinstance(spec, P):
            raise TypeError(f"`batch_spec` of {what}: expected a PartitionSpec, got {type(spec).__name__}")
        shape = jnp.shape(x)
        if len(spec) > len(shape):
            raise ValueError(
                f"{what}: got shape {shape}, which {_shown(spec)} cannot cut: give it jax.P() in `batch_spec`, for a value "
                "that all devices have"
            )
        for i, part in enumerate(spec):
            names = () if part is None else part if isinstance(part, tuple) else (part,)
            if unknown := [name for name in names if name not in mesh.axis_names]:
                raise ValueError(f"`batch_spec`: expected axes of the mesh, {mesh.axis_names}, got {unknown[0]!r}")
            count = math.prod(mesh.shape[name] for name in names)
            if shape[i] % count:
                raise ValueError(
                    f"{what}: got shape {shape}, expected dimension {i} to be a multiple of {count}, the devices that share "
                    "it: leave the last examples out, or pad them and weigh them with 0 in the loss"
                )
        if _elsewhere(x, mesh):
            raise ValueError(_misplaced(x, what, mesh, spec))
        if _of_one_process(x, mesh) and any(part is not None for part in spec):
            _refuse_own(
                what,
                mesh,
                f"jax.make_array_from_process_local_data(jax.NamedSharding(tx.mesh, {_shown(spec)}), x) makes it from the "
                "part of each; where every process has the whole, jax.device_put to that sharding does",
            )


def check_local(shards: Shards, g: FlatParams) -> None:
    """Raises ValueError for gradients that the shard_map around has summed over devices, where types tell."""
    if not shards.checked():
        return  # nothing is summed unasked there
    for b, x in zip(g.layout.buckets, g.buckets, strict=True):
        if shards.axis not in varying(x):
            raise ValueError(
                f"`grads` bucket `{b.name}`: got gradients that are the same on all devices of axis {shards.axis!r}, expected "
                "local ones, of which zero1 takes the mean. Under check_vma=True gradients of replicated parameters are "
                f"summed already, {shards.count} times too large for a mean: differentiate with respect to "
                f'jax.lax.pcast(params, {shards.axis!r}, to="varying") and leave any psum or pmean of your own out, or use '
                "tx.train_step, or shard_map with check_vma=False"
            )


def check_shards(opt: Optimizer, state: FusedState, layout: FlatLayout, local: FlatLayout) -> None:
    """Raises ValueError for buffers that are not shards: of `local`, which is cut from `layout`."""
    shapes = {b.shape for b in layout.buckets} - {b.shape for b in local.buckets}
    for name in opt.buffer_names if isinstance(state, FusedState) else ():
        if any(jnp.shape(x) in shapes for x in getattr(state, name)):
            raise ValueError(
                f"`state.{name}`: got whole buffers inside a shard_map, expected the shards of this device: pass the state "
                "with in_specs and out_specs of tx.specs(state)"
            )
    check_state(opt, state, local)


def check_whole_state(opt: Optimizer, state: FusedState, layout: FlatLayout) -> None:
    """`check_state` outside a shard_map, where a state of another mesh is the likely mistake."""
    try:
        check_state(opt, state, layout)
    except ValueError as error:
        if not str(error).endswith(MOVE):
            raise
        raise ValueError(
            f"{str(error).removesuffix(MOVE)}. tx.init(params) makes a state for these devices; one of others moves by "
            "fusedopt.repack, or by path with to_optax_state and from_optax_state, and tx.place"
        ) from None
