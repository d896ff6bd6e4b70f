"""`FlatParams` in flax.serialization: stored as the tree they were packed from."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp

_registered = False


def register() -> None:
    """Teaches flax.serialization about FlatParams, once it is imported. Costs nothing after that.

    The stored form is that of ``flat.tree``: it can be restored into FlatParams of any layout and into the tree itself.
    """
    global _registered
    if _registered or "flax.serialization" not in sys.modules:
        return
    from flax import serialization

    from fusedopt.packing import FlatParams

    if not hasattr(serialization, "register_serialization_state"):  # it is just being imported
        return
    serialization.register_serialization_state(FlatParams, _to_state_dict, _from_state_dict, override=True)
    _registered = True


def _to_state_dict(flat: Any) -> Any:
    from flax import serialization

    return serialization.to_state_dict(flat.tree)


def _from_state_dict(flat: Any, state_dict: Any) -> Any:
    """FlatParams of the layout of `flat`.

    Raises:
      ValueError: a leaf that is missing, unknown, or of another shape, named by path.
    """
    from flax import serialization

    from fusedopt.packing import FlatParams, check_shapes, pack_whole
    from fusedopt.paths import flatten, show

    layout = flat.layout
    like = jax.eval_shape(lambda f: f.tree, flat)
    # Flax ignores what is stored for leaves that the target does not have.
    got, want = (set(flatten(x).paths()) for x in (state_dict, serialization.to_state_dict(like)))
    for path in sorted(got ^ want):
        where = "stored but not in the target" if path in got else "in the target but not stored"
        raise ValueError(f"`FlatParams` leaf `{show(path)}` is {where}: fusedopt.pack a tree of what is stored instead")
    found = flatten(serialization.from_state_dict(like, state_dict))
    check_shapes(found.leaves, layout, "FlatParams")
    leaves = [None if x is None else jnp.asarray(x) for x in found.leaves]
    for s in layout.segments:
        if leaves[s.leaf] is None:
            raise ValueError(f"`FlatParams` leaf `{show(s.path)}`: got None, expected an array of shape {s.shape}")
        leaves[s.leaf] = leaves[s.leaf].astype(s.dtype)
    buckets = [pack_whole(leaves, bucket, layout) for bucket in layout.buckets]
    rest = [jnp.array(leaves[i]) for i in layout.others if i not in layout.absent]
    return FlatParams(buckets, rest, layout)
