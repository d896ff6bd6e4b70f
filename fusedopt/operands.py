"""What the caller passed, as buffers, and buffers back as what the caller passed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from fusedopt import paths as _paths
from fusedopt.layout import Bucket, FlatLayout
from fusedopt.optimizer import Optimizer
from fusedopt.packing import FlatParams, check_shapes, gather, placed_like
from pallas_kernels import Pieces


class Operands(NamedTuple):
    """Gradients or parameters as buffers, whatever they came as.

    Attributes:
      buckets: one for each bucket of the layout: an array, or the pieces of a tree's packed
        bucket; None for frozen buckets of a tree.
      leaves: of the tree in order, None where absent; empty for FlatParams.
      source: the tree or FlatParams itself.
      treedef: of the tree, to build results with.
    """

    buckets: list[Any]
    leaves: list[Any]
    source: Any
    treedef: Any

    def absent(self, layout: FlatLayout, bucket: Bucket) -> bool:
        """Whether the bucket came without any gradient."""
        members = layout.segments_of(bucket)
        return bool(self.leaves) and bool(members) and all(self.leaves[s.leaf] is None for s in members)


def open_operands(opt: Optimizer, grads: Any, params: Any) -> tuple[FlatLayout, Operands, Operands | None]:
    flat = isinstance(grads, FlatParams), isinstance(params, FlatParams)
    if params is not None and flat[0] != flat[1]:
        raise ValueError(
            f"`grads` are {_paths.type_of(grads)} but `params` are {_paths.type_of(params)}: "
            "differentiate with respect to the FlatParams, or keep both as trees"
        )
    if flat[0]:
        if params is not None and grads.layout != params.layout:
            difference = grads.layout.difference(params.layout) or "the same places in other trees"
            raise ValueError(
                f"`grads` have layout {grads.layout!r}, `params` {params.layout!r}: {difference} "
                "(fusedopt.repack moves parameters and states to another layout)"
            )
        layout = opt.adapt(grads if params is None else params)
        return layout, _of_flat(grads, layout, "grads"), None if params is None else _of_flat(params, layout, "params")
    g = _paths.flatten(grads)
    g = g._replace(leaves=[None if _is_float0(x) else x for x in g.leaves])
    owner = g if params is None else _paths.flatten(params)
    if params is not None:
        _paths.same_structure(g, owner, "grads", "params")
    layout = opt.layout_of(owner, "grads" if params is None else "params")
    check_shapes(g.leaves, layout, "grads")
    _check_dtypes(g.leaves, layout)

    def bucket(leaves, b):
        x = gather(leaves, b, layout.segments_of(b), layout.align)
        if isinstance(x, Pieces) and not pallas_kernels.runs_pieces(opt.backend, x):
            x = dataclasses.replace(x, whole=x.joined)  # once, not wherever it is read
        return x

    def buckets(leaves, frozen):
        return [None if b.frozen and not frozen else bucket(leaves, b) for b in layout.buckets]

    p = None
    if params is not None:
        p = Operands(buckets(owner.leaves, False), owner.leaves, params, owner.treedef)
    look = opt.skip_nonfinite
    return layout, Operands(buckets(g.leaves, look), g.leaves, grads, owner.treedef), p


def _of_flat(flat: FlatParams, layout: FlatLayout, name: str) -> Operands:
    for b, buffer in zip(layout.buckets, flat.buckets, strict=True):
        if jnp.shape(buffer) != b.shape:
            raise ValueError(
                f"`{name}` bucket `{b.name}`: got shape {jnp.shape(buffer)}, expected {b.shape}; what is mapped over FlatParams "
                "must be elementwise"
            )
    return Operands(list(flat.buckets), [], flat, None)


def close_operands(layout: FlatLayout, new: list, g: Operands, p: Operands | None, in_place: bool) -> Any:
    """Buffers back into what the caller passed: FlatParams, or a tree of its structure."""
    like = g if p is None else p
    if isinstance(like.source, FlatParams):
        buckets = [jnp.zeros(b.shape, b.dtype) if x is None else x for b, x in zip(layout.buckets, new, strict=True)]
        rest = like.source.rest
        if not in_place:
            rest = [_zero_update(x) for x in rest]
        return FlatParams(buckets, rest, like.source.layout)
    out = [x if in_place else _zero_update(x) for x in like.leaves]
    for bucket, buffer in zip(layout.buckets, new, strict=True):
        if buffer is not None:
            members = layout.segments_of(bucket)
            arrays = buffer.arrays if isinstance(buffer, Pieces) else [buffer]
            for s, leaf in zip(members, arrays, strict=True):
                out[s.leaf] = leaf if bucket.solo else placed_like(leaf, like.leaves[s.leaf])
    return like.treedef.unflatten(out)


def _zero_update(leaf: Any) -> Any:
    """The update of a leaf that stays as it is: zero of its dtype, or itself if it has none."""
    if leaf is None or jnp.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.extended):
        return leaf
    return leaf if _is_float0(leaf) else jnp.zeros_like(jnp.asarray(leaf))


def _is_float0(leaf: Any) -> bool:
    return getattr(leaf, "dtype", None) == jax.dtypes.float0


def _check_dtypes(leaves: Sequence[Any], layout: FlatLayout) -> None:
    for s in layout.segments:
        x = leaves[s.leaf]
        if x is not None and not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            raise TypeError(
                f"`grads` leaf `{_paths.show(s.path)}`: expected real floating point gradients "
                f"for a {s.dtype} parameter, got {jnp.result_type(x)}"
            )


def joined(layout: FlatLayout, operands: Operands, name: str) -> FlatParams:
    """Operands as one array a bucket, which `zero1` cuts into shards; ValueError where a leaf has none."""
    buckets = []
    for b, x in zip(layout.buckets, operands.buckets, strict=True):
        if isinstance(x, pallas_kernels.Pieces) and x.absent:
            leaf = _paths.show(layout.segments_of(b)[min(x.absent)].path)
            raise ValueError(
                f"`{name}` leaf `{leaf}`: expected an array, got None; under zero1 every leaf needs a gradient, or a frozen Group"
            )
        buckets.append(jnp.zeros(b.shape, b.dtype) if x is None else pallas_kernels.join(x))
    return FlatParams(buckets, (), layout)
