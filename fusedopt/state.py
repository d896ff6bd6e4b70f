"""What a state holds, bucket by bucket, and how to tell one that belongs to other parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from fusedopt.layout import Bucket, FlatLayout, Segment
from fusedopt.paths import show, type_of

if TYPE_CHECKING:
    from fusedopt.optimizer import Optimizer


ABSENT: Any = ()
"""A field that an optimizer does not use: no leaf, so that a checkpoint does not hold it either."""


class FusedState(NamedTuple):
    """State of a fusedopt optimizer: arrays only, so that every checkpoint library takes it.

    Slots are tuples with one buffer for each bucket that is not frozen, in layout order; fields
    that an optimizer does not use are ``()``. Buffers hold no names: `to_optax_state` gives them by
    path, `check_restored` looks at buffers out of a checkpoint.

    Attributes:
      count: int32 []: finite steps taken; it stops at ``2**31 - 1``.
      mu: slot: first moment or velocity, float32 (float64 for float64 parameters) unless another dtype was asked for.
      nu: slot: second moment, likewise.
      ema: slot: average of the parameters, float32 or wider.
      master: slot: float32 copies of the buckets of lower precision, and of these only.
      accumulated: slot: gradients of a step so far, float32 or wider; the last step's if none.
      hyperparams: float32 [k] (float64 with float64 parameters); decays b as 1 - b. Read by ``tx.hyperparams``.
      skipped: bool []: the last step was skipped.
      total_skipped: int32 [].
      trust_ratios: float32 [segments with a trust ratio], of the last step. Read by ``tx.trust_ratios``.
      grad_norm: float32 []: norm of the last step's gradients, unscaled, before clipping.
      micro_step: int32 []: gradients in `accumulated`.
    """

    count: jax.Array
    mu: tuple[jax.Array, ...] = ()
    nu: tuple[jax.Array, ...] = ()
    ema: tuple[jax.Array, ...] = ()
    master: tuple[jax.Array, ...] = ()
    accumulated: tuple[jax.Array, ...] = ()
    hyperparams: jax.Array = ABSENT
    skipped: jax.Array = ABSENT
    total_skipped: jax.Array = ABSENT
    trust_ratios: jax.Array = ABSENT
    grad_norm: jax.Array = ABSENT
    micro_step: jax.Array = ABSENT


def live_buckets(layout: FlatLayout) -> list[Bucket]:
    """The buckets that have slots, in the order of the slots."""
    return [b for b in layout.buckets if not b.frozen]


def trusted(layout: FlatLayout) -> list[Segment]:
    """The segments that have a trust ratio, in the order of `FusedState.trust_ratios`."""
    return [s for b in live_buckets(layout) if b.trust for s in layout.segments_of(b)]


def buffers_of(opt: Optimizer, state: FusedState, layout: FlatLayout) -> dict[Bucket, dict[str, Any]]:
    """The state's buffers by bucket and by name."""
    rest = {name: iter(getattr(state, name)) for name in opt.buffer_names}
    return {b: {name: next(rest[name]) for name in opt.kept(b)} for b in live_buckets(layout)}


def fields_of(opt: Optimizer, buffers: dict[Bucket, dict[str, Any]]) -> dict[str, Any]:
    """The fields of a state, from its buffers by bucket and by name."""
    return {name: tuple(b[name] for b in buffers.values() if name in b) for name in opt.buffer_names}


MOVE = "; fusedopt.repack moves a state to another layout"
STEP_ORDER = "; a step takes (grads, state, params)"


def check_kind(state: Any, hint: str = "") -> None:
    """Raises ValueError for what is no state of ours."""
    if not isinstance(state, FusedState):
        raise ValueError(
            f"`state`: expected the FusedState of this optimizer's init, got {type_of(state)} "
            f"(restore a checkpoint into the structure of `tx.init(params)`){hint}"
        )
    for name, field in zip(state._fields, state):
        if isinstance(field, list):  # the new state would have tuples: no branch of a cond, no carry of a scan
            raise ValueError(
                f"`state.{name}`: expected a tuple of buffers, got a list (restore a checkpoint into the structure of "
                "`tx.init(params)`, or make tuples of its lists)"
            )


def check_state(opt: Optimizer, state: FusedState, layout: FlatLayout) -> None:
    """Raises ValueError if the buffers were laid out for other parameters, naming the leaf."""
    check_kind(state)
    for name in opt.buffer_names:
        buffers, holders = getattr(state, name), [b for b in live_buckets(layout) if name in opt.kept(b)]
        if len(buffers) != len(holders):
            names = ", ".join(b.name for b in holders[:4]) + (", ..." if len(holders) > 4 else "")
            message = (
                f"`state.{name}` is of another layout: got {len(buffers)} buffers, expected {len(holders)} for these "
                f"parameters ({names})"
            )
            if buffers:
                message += MOVE
            elif name in opt.rule.slots:
                message += "; a state of another optimizer does not go on here"
            else:
                message += (
                    f"; a state of an optimizer without them gets them by state._replace({name}=tx.init(params).{name})"
                )
            raise ValueError(message)
        for b, buffer in zip(holders, buffers, strict=True):
            if jnp.shape(buffer) != b.shape:
                raise ValueError(
                    f"`state.{name}` is of another layout: bucket `{b.name}` with leaf "
                    f"`{show(layout.segments_of(b)[0].path)}`: got shape {jnp.shape(buffer)}, expected {b.shape}{MOVE}"
                )
    names = opt.hyperparams.names()
    if jnp.shape(state.hyperparams) != (len(names),):
        raise ValueError(
            f"`state.hyperparams` is of another optimizer: got shape {jnp.shape(state.hyperparams)}, expected {(len(names),)} "
            f"for {', '.join(names)}; fusedopt.repack moves a state from one optimizer to another"
        )
    count = len(trusted(layout)) if opt.rule.trust else 0
    if opt.rule.trust and jnp.shape(state.trust_ratios) != (count,):
        raise ValueError(
            f"`state.trust_ratios` is of another layout: got shape {jnp.shape(state.trust_ratios)}, expected {(count,)}{MOVE}"
        )


def signature(state: FusedState) -> tuple:
    """By which the parameters of a state are recognised, where only the state is given."""
    return tuple(jnp.shape(x) for x in jax.tree.leaves(state))
