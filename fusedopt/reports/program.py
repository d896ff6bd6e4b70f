"""The step of an optimizer as a program: compiled for a device, and counted."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from fusedopt.packing import FlatParams, pack
from fusedopt.paths import path_of, show
from fusedopt.reports import hlo
from fusedopt.transformation import FusedTransformation
from fusedopt.zero1 import Zero1Transformation

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective")


@dataclasses.dataclass(frozen=True)
class Program:
    """A step as it was compiled, parameters and state donated.

    Attributes:
      kernels: what is launched in a step, by who made it: "xla", "triton", "mosaic", "collectives"; kernels for scalars and
        copies included. None if the program has parts that do not say how often they run.
      accessed: bytes that the kernels read and write, each operand and result once a kernel; None as above.
      temporary, aliased, donated: bytes of memory on one device: besides arguments and results; written in place; of
        parameters and state. None if the platform does not say.
      uncountable: what `kernels` or `accessed` were not counted for.
    """

    kernels: dict[str, int] | None
    accessed: int | None
    temporary: int | None
    aliased: int | None
    donated: int
    uncountable: str = ""

    @property
    def total(self) -> int | None:
        """All kernels of a step."""
        return None if self.kernels is None else sum(self.kernels.values())


def abstract(tree: Any) -> Any:
    """Shapes, dtypes and shardings of a tree of arrays, abstract values, Python numbers."""

    def one(x: Any) -> jax.ShapeDtypeStruct:
        if not hasattr(x, "dtype"):
            x = jax.eval_shape(jnp.asarray, x)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))

    return jax.tree.map(one, tree)


def pack_abstract(tx: FusedTransformation, params: Any) -> FlatParams:
    """Abstract FlatParams of an abstract tree."""
    flat = jax.eval_shape(lambda tree: pack(tree, tx), params)
    return _placed(flat, sharding_of(params))


def sharding_of(params: Any) -> Any:
    """Where all parameters are; None if they do not say.

    Raises:
      ValueError: a leaf that is sharded, or that is elsewhere than another one.
    """
    found = None
    for keys, x in jax.tree_util.tree_leaves_with_path(params):
        own = x.sharding
        if own is None:
            continue
        if not own.is_fully_replicated:
            raise ValueError(
                f"`params` leaf `{show(path_of(keys))}` is sharded, {own}: a step of sharded leaves is compiled by the program "
                "around it; report its shapes without shardings"
            )
        found = own if found is None else found
        if own.device_set != found.device_set:
            raise ValueError(f"`params` leaf `{show(path_of(keys))}` is on other devices than the first one: {own}")
    return found


def zero1_of(tx: FusedTransformation) -> Zero1Transformation | None:
    """The optimizer in shards that `tx` is, or that a chain ends in; None if there is none."""
    while tx.last is not None:
        tx = tx.last
    return tx if isinstance(tx, Zero1Transformation) else None


def compile_step(tx: FusedTransformation, params: Any, mode: str, device: Any = None) -> Program:
    """Compiles one step and counts it.

    Args:
      params: abstract, as a tree or as FlatParams; their shardings say where.
      mode: "optax", "apply" or "flat".
      device: a `jax.Device` instead.

    Raises:
      ValueError: parameters that are sharded; a backend that cannot run there.
    """
    sharding = sharding_of(params) if device is None else SingleDeviceSharding(device)
    sharded = zero1_of(tx)
    if sharded is not None:
        sharding = NamedSharding(sharded.mesh, P())
    params = _placed(params, sharding)
    with _optax_promotion():
        state = _placed(jax.eval_shape(tx.init, params), sharding)
        if sharded is not None:
            own = tx._find_state(state)
            own = jax.tree.map(lambda x, spec: _on(x, NamedSharding(sharded.mesh, spec)), own, sharded.specs(own))
            state = tx._put_state(state, own)
        grads = params if mode == "flat" else jax.tree.map(_gradient, params)

        def step(params, state, grads):
            if mode != "optax":
                return tx.apply(grads, state, params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, grads).compile()
    return read(compiled, sum(map(_local_size, jax.tree.leaves((params, state)))))


def read(compiled: Any, donated: int) -> Program:
    """Counts a compiled step."""
    text, memory = compiled.as_text(), compiled.memory_analysis()
    loops, partial = hlo.uncountable(text, bytes_too=False), hlo.uncountable(text)
    kernels = None
    if not loops:
        kernels = {}
        for x in hlo.kernels(hlo.entry(text)):
            kernels[_maker(x)] = kernels.get(_maker(x), 0) + 1
    return Program(
        kernels,
        None if partial else hlo.accessed_bytes(text),
        getattr(memory, "temp_size_in_bytes", None),
        getattr(memory, "alias_size_in_bytes", None),
        donated,
        partial,
    )


def _maker(x: hlo.Instruction) -> str:
    if x.op.startswith(COLLECTIVES):
        return "collectives"
    return next((name for name in ("triton", "mosaic") if name in x.target), "xla")


def _local_size(x: Any) -> int:
    """Bytes of an array on one device."""
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize


def _gradient(x: Any) -> Any:
    return x if jnp.issubdtype(x.dtype, jnp.floating) else None


def _placed(tree: Any, sharding: Any) -> Any:
    return jax.tree.map(lambda x: _on(x, sharding), tree)


def _on(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


@contextlib.contextmanager
def _optax_promotion() -> Iterator[None]:
    """JAX's own rules of promotion, which optax counts on, whatever the caller has set."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
