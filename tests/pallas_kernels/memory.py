"""Runs a Triton kernel block by block in a memory of ours, and fails at an access outside of a buffer.

Pallas's own interpreter pads what is read past an end and drops what is written there, so that a missing mask shows in none
of its results. On a GPU it is somebody else's memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk

BEHIND = np.uint32(0x7FC0BAD1)
"""The bits of a NaN, behind the end of each buffer."""


@dataclasses.dataclass
class Buffer:
    """`size` elements, and as many as a block behind them that nobody may touch."""

    memory: np.ndarray
    size: int

    @classmethod
    def of(cls, x: Any) -> Buffer:
        x = np.asarray(x).reshape(-1)
        behind = np.resize(np.frombuffer(BEHIND.tobytes(), np.uint8), 1024 * x.itemsize).view(x.dtype)
        return cls(np.concatenate([x, behind]), x.size)

    def intact(self) -> bool:
        return self.memory[self.size :].tobytes() == Buffer.of(self.memory[:0]).memory.tobytes()

    def places(self, indexers: Any, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        """Indices into the memory, and which of them are meant."""
        ((index,),) = (indexer.indices for indexer in indexers)  # all refs have one dimension
        if hasattr(index, "start"):
            index = int(index.start) + np.arange(index.size) * (index.stride or 1)
        index = np.asarray(index)
        meant = np.broadcast_to(True if mask is None else np.asarray(mask), index.shape)
        outside = meant & ((index < 0) | (index >= self.size))
        if outside.any():
            raise IndexError(f"element {index[outside].flat[0]} of a buffer of {self.size}")
        return np.where(meant, index, 0), meant


def run(call: Callable[..., Any], *args: Any) -> Any:
    """`call(*args)`, with its kernels run here.

    Raises:
      IndexError: an access outside of a buffer.
    """
    with pk.interpret():
        closed, shapes = jax.make_jaxpr(call, return_shape=True)(*args)
    assert "pallas_call" in str(closed)
    return jax.tree.unflatten(
        jax.tree.structure(shapes), _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args), None)
    )


def _launch(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    buffers = [Buffer.of(x) for x in operands]
    aliases = {out: i for i, out in eqn.params["input_output_aliases"]}
    outs = [
        buffers[aliases[i]] if i in aliases else Buffer.of(np.zeros(a.shape, a.dtype))
        for i, a in enumerate(eqn.params["out_avals"])
    ]
    for block in range(*eqn.params["grid_mapping"].grid):
        _evaluate(eqn.params["jaxpr"], (), [*buffers, *outs], block)
    assert all(b.intact() for b in (*buffers, *outs))
    return [
        jnp.asarray(b.memory[: b.size].reshape(a.shape)) for b, a in zip(outs, eqn.params["out_avals"], strict=True)
    ]


def _evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], block: int | None) -> list[Any]:
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(x: Any) -> Any:
        return x.val if hasattr(x, "val") else values[x]

    for eqn in jaxpr.eqns:
        name, params, given = eqn.primitive.name, eqn.params, [read(x) for x in eqn.invars]
        inner = params.get("call_jaxpr", params.get("jaxpr"))
        if name == "pallas_call":
            out = _launch(eqn, given)
        elif name == "program_id":
            out = [jnp.int32(block)]
        elif name == "cond":
            chosen = params["branches"][int(given[0])]
            out = _evaluate(chosen.jaxpr, chosen.consts, given[1:], block)
        elif name in ("get", "masked_load"):
            tree = params["args_tree"] if name == "masked_load" else params["tree"]
            ref, indexers, mask, other = (
                jax.tree.unflatten(tree, given)
                if name == "masked_load"
                else (given[0], jax.tree.unflatten(tree, given[1:]), None, None)
            )
            index, meant = ref.places(indexers, mask)
            out = [
                jnp.asarray(
                    np.where(meant, ref.memory[index], np.asarray(0 if other is None else other, ref.memory.dtype))
                )
            ]
        elif name in ("swap", "masked_swap"):
            if name == "masked_swap":
                ref, indexers, value, mask = jax.tree.unflatten(params["args_tree"], given)
            else:
                ref, value, indexers, mask = given[0], given[1], jax.tree.unflatten(params["tree"], given[2:]), None
            index, meant = ref.places(indexers, mask)
            out = [jnp.asarray(ref.memory[index])]
            ref.memory[index[meant]] = np.broadcast_to(np.asarray(value), index.shape)[meant]
        elif inner is not None:
            out = _evaluate(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), given, block)
        else:
            out = eqn.primitive.bind(*given, **params)
            out = out if eqn.primitive.multiple_results else [out]
        values.update(zip(eqn.outvars, out, strict=True))
    return [read(x) for x in jaxpr.outvars]
