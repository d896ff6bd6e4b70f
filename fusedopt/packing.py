"""FlatParams: a model's parameters as a few buffers, and the ways between a tree and its buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fusedopt import layout as _layout
from fusedopt import paths as _paths
from fusedopt.grouping import place
from fusedopt.layout import Bucket, FlatLayout, Packing, Segment
from fusedopt.paths import show


@jax.tree_util.register_pytree_with_keys_class
class FlatParams:
    """Parameters laid out in buckets; a pytree with one leaf a bucket.

    ```python
    flat = fusedopt.pack(params)
    loss, grads = jax.value_and_grad(lambda flat: loss_fn(flat.tree, batch))(flat)
    flat, state = tx.apply(grads, state, flat)
    ```

    Gradients with respect to it are FlatParams too. Elementwise code (`jax.tree.map`,
    `optax.apply_updates`, `optax.tree.norm`, clipping, EMA) works on it; optax code that means
    something by a leaf (per-leaf norms, masks by name) sees buckets instead and does not. What is
    mapped over them must map 0 to 0, because padding between the leaves must stay zero: noise and
    g/|g| belong on trees.

    Attributes:
      buckets: arrays, one for each of ``layout.buckets``. Padding is zero.
      rest: leaves that are carried along: integers, booleans, random keys.
      layout: the static `FlatLayout`.
    """

    __slots__ = ("__weakref__", "buckets", "layout", "rest")

    def __init__(self, buckets: Sequence[Any], rest: Sequence[Any], layout: FlatLayout):
        self.buckets, self.rest, self.layout = tuple(buckets), tuple(rest), layout

    def tree_flatten_with_keys(self):
        names = [b.name for b in self.layout.buckets]
        names += [f"other.{i}" for i in range(len(self.rest))]
        keys = map(jax.tree_util.DictKey, names)
        return tuple(zip(keys, (*self.buckets, *self.rest), strict=True)), self.layout

    def tree_flatten(self):
        return (*self.buckets, *self.rest), self.layout

    @classmethod
    def tree_unflatten(cls, layout: FlatLayout, children: Sequence[Any]) -> FlatParams:
        # No checks: transformations put sentinels, specs and shardings where arrays go.
        n = len(layout.buckets)
        new = object.__new__(cls)
        new.buckets, new.rest, new.layout = tuple(children[:n]), tuple(children[n:]), layout
        return new

    @property
    def tree(self) -> Any:
        """The parameters as the user's tree. Differentiable; leading batch axes are kept."""
        leaves: list[Any] = [None] * self.layout.num_leaves
        for bucket, buffer in zip(self.layout.buckets, self.buckets, strict=True):
            members = self.layout.segments_of(bucket)
            for segment, leaf in zip(members, scatter(buffer, bucket, members), strict=True):
                leaves[segment.leaf] = leaf
        carried = iter(self.rest)
        for i in self.layout.others:
            leaves[i] = None if i in self.layout.absent else next(carried)
        return self.layout.treedef.unflatten(leaves)

    def __contains__(self, key: object) -> bool:
        """Whether `key` is a top-level key of the tree (Flax asks this of its params)."""
        tree = self.layout.treedef.unflatten(range(self.layout.num_leaves))
        return isinstance(tree, Mapping) and key in tree

    def __repr__(self) -> str:
        return f"FlatParams({self.layout!r})"


def pack(params: Any, tx: Any = None, *, packing: Packing | None = None) -> FlatParams:
    """Lays a tree of parameters out in buckets. Copies: donating the result keeps `params` alive.

    Args:
      params: a pytree of arrays (or Python and NumPy numbers). Floating point leaves go to
        buckets, others are carried along.
      tx: the fusedopt optimizer that will update them; needed if it has ``groups=``, masks or a
        ``packing=`` of its own.
      packing: which leaves share a bucket; by default that of `tx`, else ``Packing()``.

    Returns:
      FlatParams; works under `jax.jit`, `jax.vmap` and `jax.eval_shape`.

    Raises:
      TypeError: complex leaves, or leaves that are no arrays, named by path.
    """
    if isinstance(params, FlatParams):
        raise TypeError("`params` is FlatParams already; pack `params.tree` to change its layout")
    if packing is not None and not isinstance(packing, Packing):
        raise TypeError(f"`packing`: expected a Packing, got {type(packing).__name__}")
    flat = _paths.flatten(params)
    optimizer = getattr(tx, "optimizer", None)
    if tx is not None and optimizer is None:
        raise TypeError(f"`tx`: expected an optimizer made by fusedopt, got {type(tx).__name__}")
    if optimizer is None:
        layout = _default_layout(flat, packing or Packing())
    else:
        layout = optimizer.layout_of(flat, "params", packing=packing)
    leaves = flat.leaves
    buckets = [gather(leaves, b, layout.segments_of(b), copy=True) for b in layout.buckets]
    rest = [jnp.array(leaves[i], copy=True) for i in layout.others if i not in layout.absent]
    return FlatParams(buckets, rest, layout)


def _default_layout(flat: _paths.Flattened, packing: Packing) -> FlatLayout:
    leaves, names = _layout.leaf_descriptions(flat, "params"), flat.paths()
    return _layout.build(flat.treedef, names, leaves, place(names, leaves), (), packing)


def gather(leaves: Sequence[Any], bucket: Bucket, members: Sequence[Segment], copy: bool = False) -> jax.Array:
    """The buffer of a bucket from the leaves of a tree; absent leaves (None) count as zeros.

    A packed buffer has the leaves' common dtype; if they differ (bfloat16 gradients beside
    float32 ones), float32 or wider.
    """
    if bucket.solo:
        leaf = leaves[members[0].leaf]
        if leaf is None:
            return jnp.zeros(bucket.shape, bucket.dtype)
        return jnp.array(leaf, copy=True) if copy else jnp.asarray(leaf)
    arrays = [None if leaves[s.leaf] is None else jnp.asarray(leaves[s.leaf]) for s in members]
    dtypes = {x.dtype for x in arrays if x is not None}
    dtype = next(iter(dtypes), bucket.dtype) if len(dtypes) < 2 else slot_dtype(bucket.dtype)
    pieces, end = [], 0
    for s, x in zip(members, arrays, strict=True):
        if s.size and x is not None:
            pieces.append(x.astype(dtype).reshape(-1))
        elif s.size:
            pieces.append(jnp.zeros((s.size,), dtype))
        if s.padding:
            pieces.append(jnp.zeros((s.padding,), dtype))
        end = s.offset + s.size + s.padding
    if end < bucket.size:
        pieces.append(jnp.zeros((bucket.size - end,), dtype))
    if not pieces:
        return jnp.zeros(bucket.shape, dtype)
    # One piece comes back as it is, the caller's own array where that fills the bucket.
    return jnp.array(pieces[0], copy=copy) if len(pieces) == 1 else jnp.concatenate(pieces)


def scatter(buffer: Any, bucket: Bucket, members: Sequence[Segment]) -> list[Any]:
    """The leaves of a bucket, in the order of its segments."""
    if bucket.solo:
        return [buffer]
    sizes: list[int] = []
    for s in members:
        sizes += [s.size, s.padding]
    sizes.append(bucket.size - sum(sizes))
    # One split: its transpose is one concatenate, where slices would be as many pads and adds.
    pieces = jax.lax.split(buffer, sizes, axis=buffer.ndim - 1)
    batch = buffer.shape[:-1]
    return [x.reshape(batch + s.shape) for x, s in zip(pieces[: 2 * len(members) : 2], members, strict=True)]


def slot_dtype(dtype: Any) -> Any:
    """Optimizer state is float32 for float32 and lower precision, float64 for float64."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def check_shapes(leaves: Sequence[Any], layout: FlatLayout, name: str) -> None:
    """Raises ValueError naming the first leaf whose shape is not the layout's."""
    for s in layout.segments:
        leaf = leaves[s.leaf]
        if leaf is not None and jnp.shape(leaf) != s.shape:
            raise ValueError(f"`{name}` leaf `{show(s.path)}`: got shape {jnp.shape(leaf)}, expected {s.shape}")
