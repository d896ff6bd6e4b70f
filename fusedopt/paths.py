"""Leaves of a user's pytree: how they are named, what they are, what is refused.

The rest of the library speaks of a leaf by its *path*, a tuple of plain key strings such as
``("block_3", "attn", "kernel")``. Paths, not tree structures, are compared: Flax NNX hands
``init`` a tree whose leaves sit in variable wrappers and ``update`` the same tree without them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

Path = tuple[str, ...]


class Leaf(NamedTuple):
    """What the layout needs to know of one leaf.

    Attributes:
      shape: its shape.
      dtype: its dtype as JAX would hold it (float64 only in x64 mode); None for a ``None`` leaf.
      trainable: real floating point, hence laid out in a bucket. Integers, booleans, random
        keys and ``None`` are carried along untouched.
    """

    shape: tuple[int, ...]
    dtype: Any
    trainable: bool


class Flattened(NamedTuple):
    """A pytree with ``None`` counted as a leaf, so that trees with absent gradients line up."""

    leaves: list[Any]
    treedef: Any
    source: Any

    def paths(self) -> tuple[Path, ...]:
        """Paths of the leaves, in order. Slow: only for new layouts and for messages."""
        entries, _ = jax.tree_util.tree_flatten_with_path(self.source, is_leaf=_is_none)
        return tuple(path_of(keys) for keys, _ in entries)


def _is_none(x: Any) -> bool:
    return x is None


def flatten(tree: Any) -> Flattened:
    leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_none)
    return Flattened(leaves, treedef, tree)


def path_of(keys: Sequence[Any]) -> Path:
    """Plain strings of a key path; a trailing ``.value`` wrapper is dropped."""
    if keys and isinstance(keys[-1], jax.tree_util.GetAttrKey) and keys[-1].name == "value":
        keys = keys[:-1]
    return tuple(_key_string(k) for k in keys)


def _key_string(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def show(path: Path) -> str:
    """``params['a']['b']`` reads worse than ``a/b`` in a message; the root leaf is ``<root>``."""
    return "/".join(path) if path else "<root>"


def type_of(x: Any) -> str:
    """What a message calls the type of an argument: JAX's own names for its arrays mean nothing to their users."""
    if isinstance(x, Tracer):
        return "a tracer"
    return "a jax.Array" if isinstance(x, jax.Array) else type(x).__name__


def describe(leaf: Any, name: Callable[[], str]) -> Leaf:
    """Classifies a leaf (array, abstract value, NumPy or Python scalar, ``None``).

    Raises:
      TypeError: for complex leaves and for objects that are no arrays, naming the leaf.
    """
    if leaf is None:
        return Leaf((), None, False)
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not hasattr(leaf, "shape"):
        if not isinstance(leaf, (bool, int, float, complex)):
            raise TypeError(
                f"{name()}: expected an array or a number, got {type(leaf).__name__}; keep what is not trained out of the tree"
            )
        dtype = np.dtype(type(leaf))
    shape = tuple(getattr(leaf, "shape", ()))
    if jnp.issubdtype(dtype, jax.dtypes.extended) or dtype == jax.dtypes.float0:
        return Leaf(shape, dtype, False)
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f"{name()} is {dtype}: complex parameters are not supported; keep real and "
            "imaginary parts as two leaves, or wrap with optax.contrib.split_real_and_imaginary"
        )
    return Leaf(shape, np.dtype(dtype), bool(jnp.issubdtype(dtype, jnp.floating)))


def same_structure(got: Flattened, expected: Flattened, got_name: str, expected_name: str) -> None:
    """Raises ValueError naming the first path at which two trees part."""
    if got.treedef == expected.treedef:
        return
    a, b = got.paths(), expected.paths()
    if a == b:  # other containers around the same leaves (dict and FrozenDict, nnx wrappers)
        return
    only_got, only_expected = sorted(set(a) - set(b)), sorted(set(b) - set(a))
    raise ValueError(
        f"`{got_name}` and `{expected_name}` have different structures: "
        f"{_some(only_got)} only in `{got_name}`, {_some(only_expected)} only in "
        f"`{expected_name}`"
    )


def _some(paths: list[Path]) -> str:
    if not paths:
        return "nothing"
    names = ", ".join(f"`{show(p)}`" for p in paths[:3])
    return names + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
