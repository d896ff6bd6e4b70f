"""What an optimizer holds of a model: regions of its layout, and bytes of its state beside optax's."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from fusedopt import optax_nodes
from fusedopt.by_path import leaves_by_path
from fusedopt.layout import FlatLayout
from fusedopt.optimizer import Optimizer
from fusedopt.rules import Adam, Lamb, Lars, Lion
from fusedopt.state import FusedState, live_buckets

FRONT = "transformations in front"
"""In the memory of a chain: what stands before the fused optimizer."""


class Region(NamedTuple):
    """A run of leaves of one kind, dtype and group.

    Attributes:
      group, region, dtype: their names.
      decays, trust, frozen: whether the leaves have weight decay, a trust ratio each, or are never updated.
      leaves, parameters: how many.
      solo: leaves that are buckets of their own.
      padding: elements between and behind its leaves in packed buckets; the end of a bucket belongs to its last region.
      bytes: of the parameters, without padding.
    """

    group: str
    region: str
    dtype: str
    decays: bool
    trust: bool
    frozen: bool
    leaves: int
    parameters: int
    solo: int
    padding: int
    bytes: int


class Memory(NamedTuple):
    """Bytes of one kind of buffers. `padding` is part of `bytes`."""

    buffers: int
    dtypes: tuple[str, ...]
    bytes: int
    padding: int


def regions(layout: FlatLayout) -> list[Region]:
    """The regions of a layout, in memory order."""
    found: dict[tuple, list[int]] = {}
    for bucket in layout.buckets:
        members = layout.segments_of(bucket)
        for s in members:
            key = (s.group, s.region, s.dtype.name, bucket.decays, bucket.trust, bucket.frozen)
            end = bucket.size - s.offset - s.size - s.padding if s is members[-1] else 0
            added = (1, s.size, int(bucket.solo), s.padding + end, s.size * s.dtype.itemsize)
            found[key] = [a + b for a, b in zip(found.get(key, [0] * 5), added, strict=True)]
    return [Region(*key, *numbers) for key, numbers in found.items()]


def tree_memory(tree: Any, padding: int = 0) -> Memory:
    """All arrays of a tree, abstract or not; Python numbers as JAX takes them."""
    leaves = [jax.ShapeDtypeStruct(np.shape(x), _dtype(x)) for x in jax.tree.leaves(tree)]
    names = tuple(sorted({x.dtype.name for x in leaves}))
    return Memory(len(leaves), names, sum(map(_size, leaves)), padding)


def _dtype(x: Any) -> Any:
    return x.dtype if hasattr(x, "dtype") else jax.dtypes.canonicalize_dtype(np.asarray(x).dtype)


def _size(x: Any) -> int:
    return x.size * x.dtype.itemsize


def state_memory(opt: Optimizer, layout: FlatLayout, fused: FusedState, state: Any) -> dict[str, Memory]:
    """Bytes of a state by what holds them: its buffers by name, everything else of it, and transformations in front.

    Args:
      fused: the fused part of `state`; both may be abstract.
    """
    found: dict[str, Memory] = {}
    for name in opt.buffer_names:
        holders = [b for b in live_buckets(layout) if name in opt.kept(b)]
        buffers = getattr(fused, name)
        padding = [(b.size - sum(layout.sizes_of(b))) * x.dtype.itemsize for b, x in zip(holders, buffers, strict=True)]
        if buffers:
            found[name] = tree_memory(buffers, sum(padding))
    rest = tree_memory([x for name, x in fused._asdict().items() if name not in opt.buffer_names])
    found["scalars"] = rest
    others = sum(map(_size, jax.tree.leaves(state))) - sum(m.bytes for m in found.values())
    if others:
        leaves = [x for x in jax.tree.leaves(state, is_leaf=lambda x: x is fused) if x is not fused]
        found[FRONT] = tree_memory(leaves)._replace(bytes=others)
    return found


def name_of(opt: Optimizer) -> str:
    """The optimizer's name: that of its factory, "momentum" for SGD with momentum."""
    rule = opt.rule
    if isinstance(rule, Lamb):
        return "lamb"
    if isinstance(rule, Adam):
        return "adamw" if rule.decoupled else "adam"
    return {Lars: "lars", Lion: "lion"}.get(type(rule)) or ("momentum" if rule.slots else "sgd")


def optax_memory(opt: Optimizer, layout: FlatLayout, tree: Any) -> tuple[str, dict[str, Memory]]:
    """What the namesake in optax would hold for the leaves that this optimizer updates, and what it is called.

    Its moments have the dtypes of the parameters, unless `mu_dtype` or `accumulator_dtype` says otherwise. With
    `accumulate` it is in an `optax.MultiSteps`. Averages and master weights are not part of optax's optimizers.

    Args:
      tree: the parameters, abstract.
    """
    rule = name_of(opt)
    name = f"optax.{'sgd' if rule == 'momentum' else rule}"
    own = optax_nodes.namesake(opt)
    if opt.accumulate > 1:
        name, own = f"{name} in optax.MultiSteps", optax.MultiSteps(own, opt.accumulate)
    state = jax.eval_shape(own.init, tree)
    live = {s.path for b in live_buckets(layout) for s in layout.segments_of(b)}
    trees = {"accumulated": state.acc_grads} if opt.accumulate > 1 else {}
    for kind, node in optax_nodes.nodes(state):
        trees |= {slot: getattr(node, field) for field, slot in optax_nodes.MOMENTS.get(kind, {}).items()}
    scalars = sum(map(_size, jax.tree.leaves(state))) - sum(_size(x) for x in jax.tree.leaves(trees))
    dtypes = {} if rule == "lamb" else {"mu": opt.slot_dtypes.get("mu")}  # what optax lets one choose
    found = {}
    for slot in sorted(trees, key=("mu", "nu", "accumulated").index):
        kept = [x for path, x in leaves_by_path(trees[slot]).items() if path in live]
        found[slot] = tree_memory([jax.ShapeDtypeStruct(x.shape, dtypes.get(slot) or x.dtype) for x in kept])
    return name, {**found, "scalars": Memory(0, (), scalars, 0)}
