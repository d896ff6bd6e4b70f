"""Buffers that come from a checkpoint: whether they are of this layout, and how to move them to another one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fusedopt.by_path import exported, installed, unwrapped
from fusedopt.layout import Bucket, FlatLayout, Packing
from fusedopt.packing import FlatParams, pack
from fusedopt.paths import show
from fusedopt.state import FusedState, buffers_of, check_kind, check_state
from fusedopt.transformation import FusedTransformation
from fusedopt.typing import Params, PyTree, State


def repack(
    params: Params,
    state: Any,
    tx: FusedTransformation[Any],
    new_tx: FusedTransformation[Any] | None = None,
    *,
    packing: Packing | None = None,
) -> tuple[Params, Any]:
    """Moves parameters and their state to the layout of another optimizer: leaf by leaf, the same bits.

    For raw buffers that were stored under another packing, padding or grouping: restore them into what the old `tx`
    makes, then repack.

    ```python
    old, new = fusedopt.adamw(1e-3), fusedopt.adamw(1e-3, packing=fusedopt.Packing(solo_from=None))
    params, state = fusedopt.repack(params, state, old, new)
    ```

    Args:
      params: a tree, which stays as it is, or FlatParams.
      state: of `tx` for these `params`.
      tx: the optimizer, or `fusedopt.chain`, whose layout they have.
      new_tx: the one whose layout they get; None: `tx` itself. Buffers and hyperparameters that only it has begin as at
        init, those that only `tx` has are dropped; averages in slots of another dtype are rounded to it.
      packing: of the new FlatParams; None: that of `new_tx`.

    Returns:
      ``(params, state)``; FlatParams and buffers are copies.

    Raises:
      TypeError: optimizers that are not of fusedopt.
      ValueError: a state of other parameters; moments that `tx` does not keep; `packing` for a tree, whose buffers
        `new_tx` alone decides; chains of different lengths.
    """
    new_tx = tx if new_tx is None else new_tx
    for name, x in (("tx", tx), ("new_tx", new_tx)):
        if not isinstance(x, FusedTransformation):
            raise TypeError(f"`{name}`: expected an optimizer made by fusedopt, got {type(x).__name__}")
    flat = isinstance(params, FlatParams)
    if packing is not None and not flat:
        raise ValueError("`packing` is for FlatParams; the state of a tree is laid out by the `packing` of `new_tx`")
    missing = [s for s in new_tx.optimizer.rule.slots if s not in tx.optimizer.rule.slots]
    if missing:
        raise ValueError(f"`state` has no `{missing[0]}`, which `new_tx` needs; `tx` keeps {tx.optimizer.rule.slots}")

    def moved(x: Any) -> Any:
        return pack(x.tree, new_tx, packing=packing) if isinstance(x, FlatParams) else x

    new_params = moved(params)

    def one(old: Any, template: Any) -> Any:
        if isinstance(old, FusedState) != isinstance(template, FusedState):
            raise ValueError(
                f"`state`: got {_described(old)}, expected {_described(template)} as that of `new_tx`: fusedopt.chain both "
                "optimizers, or none"
            )
        if isinstance(old, FusedState):
            given = exported(tx.optimizer, old, tx.optimizer.layout_of_params(params))
            return installed(new_tx.optimizer, new_params, given)
        if len(old) != len(template):
            raise ValueError(f"`state`: got {_described(old)}, expected {_described(template)} as that of `new_tx`")
        front = jax.tree.map(moved, tuple(old[:-1]), is_leaf=lambda x: isinstance(x, FlatParams))
        return (*front, one(old[-1], template[-1]))

    return new_params, one(state, jax.eval_shape(new_tx.init, new_params))


def _described(state: Any) -> str:
    return "a FusedState" if isinstance(state, FusedState) else f"the tuple of a chain of {len(state)}"


def check_restored(tx: FusedTransformation[State], state: State, params: PyTree) -> None:
    """Raises if restored buffers are those of other leaves. Reads all of them once; not for use under jit.

    Buffers of two layouts may have the same shapes. What tells them apart is the padding: it is zero in every buffer of
    this library, and other leaves of other sizes leave numbers there. Leaves of the same sizes in another order cannot
    be told apart; checkpoints by path (`to_optax_state`) and FlatParams, whose names in orbax carry a fingerprint, can.

    Args:
      tx: the optimizer, or `fusedopt.chain`.
      state: as restored, arrays.
      params: what it is to go on with: a tree, or FlatParams, whose own padding is looked at too.

    Raises:
      TypeError: `tx` is not of fusedopt.
      ValueError: another shape, or a number in the padding behind a leaf, named by path.
    """
    if not isinstance(tx, FusedTransformation):
        raise TypeError(f"`tx`: expected an optimizer made by fusedopt, got {type(tx).__name__}")
    fused = tx._find_state(state)
    check_kind(fused)
    opt, fused = tx.optimizer, unwrapped(fused)
    layout = opt.layout_of_params(params)
    check_state(opt, fused, layout)
    for b, own in buffers_of(opt, fused, layout).items():
        for name, buffer in own.items():
            _check_padding(f"state.{name}", b, buffer, layout)
    if isinstance(params, FlatParams):
        for b, buffer in zip(layout.buckets, params.buckets, strict=True):
            if jnp.shape(buffer) != b.shape:
                raise ValueError(f"`params` bucket `{b.name}`: got shape {jnp.shape(buffer)}, expected {b.shape}")
            _check_padding("params", b, buffer, layout)


def _check_padding(name: str, bucket: Bucket, buffer: Any, layout: FlatLayout) -> None:
    if bucket.solo:
        return
    buffer = jnp.asarray(buffer)
    members = layout.segments_of(bucket)
    ends = np.zeros(
        bucket.size + 1, np.int8
    )  # +1 where a leaf begins, -1 behind its end; leaves of no elements cancel out
    np.add.at(ends, [s.offset for s in members], 1)
    np.add.at(ends, [s.offset + s.size for s in members], -1)
    padding = np.cumsum(ends[:-1]) == 0
    # A NaN there may be one of gradients that nobody checked.
    wrong = jnp.isfinite(buffer) & (buffer != jnp.zeros((), buffer.dtype)) & padding
    if wrong.any():
        at = int(np.argmax(np.asarray(wrong)))
        s = [s for s in members if s.offset <= at][-1]
        raise ValueError(
            f"`{name}` is of another layout: bucket `{bucket.name}` has {float(buffer[at]):g} at element {at}, in the "
            f"padding behind leaf `{show(s.path)}` {s.shape}, expected zeros"
        )
