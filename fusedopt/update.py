"""One optimizer step, from what the caller passes to what it gets back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from fusedopt import measure
from fusedopt.bucket import Shared, accumulate, update_bucket
from fusedopt.guard import any_nan
from fusedopt.layout import Bucket
from fusedopt.operands import close_operands, open_operands
from fusedopt.optimizer import Optimizer
from fusedopt.scalars import callers_flag, guarded, of_group, rule_scalars, scalars_key, unscale_factor
from fusedopt.state import STEP_ORDER, FusedState, buffers_of, check_kind, check_state, fields_of, live_buckets

INT32_MAX = np.int32(2**31 - 1)


def step(
    opt: Optimizer,
    grads: Any,
    state: FusedState,
    params: Any,
    extra: Mapping[str, Any],
    in_place: bool,
) -> tuple[Any, FusedState]:
    """``(new params, state)`` if `in_place`, else ``(updates, state)``. See `transforms`."""
    check_kind(state, STEP_ORDER)
    check_params_given(opt, params, in_place)
    layout, g, p = open_operands(opt, grads, params)
    check_state(opt, state, layout)
    opt.remember(state, layout)
    kept = buffers_of(opt, state, layout)
    values, vector = opt.hyperparams.resolve(state.hyperparams, state.count, extra)
    dtype = vector.dtype

    # What a gradient alone can say.
    leaves_of = dict(zip(layout.buckets, g.buckets, strict=True))
    gradients = dict(leaves_of)
    absent = {b for b in live_buckets(layout) if g.absent(layout, b)}
    scale = extra.get("loss_scale")
    unusable, unscale = (None, None) if scale is None else unscale_factor(scale, dtype)
    flags = [] if unusable is None else [unusable]
    if extra.get("has_nan") is not None:
        flags.append(callers_flag(extra["has_nan"]))
    micro_step = bad = None
    if opt.accumulate > 1:
        squared = opt.clips or opt.rule.trust  # so that no norm of the sum can overflow either
        if opt.skip_nonfinite:
            flags.append(any_nan(measure.nonfinite(opt, layout, gradients, unscale, squared=squared)))
        bad = _any(flags)
        gradients |= _accumulate(opt, layout, gradients, state, kept, unscale, bad, dtype)
        unscale, absent = None, set()
        micro_step = state.micro_step + np.int32(1)
        flags = [micro_step < opt.accumulate] + ([] if bad is None else [bad])

    weights = {} if p is None else dict(zip(layout.buckets, p.buckets, strict=True))
    truths = {b: kept[b].get("master", weights.get(b)) for b in kept}
    count = jnp.where(state.count == INT32_MAX, INT32_MAX, state.count + np.int32(1))
    scalars = rule_scalars(opt, layout, values, count)
    measured = _measure(opt, layout, gradients, truths, kept, values, scalars, unscale)
    factors, norms = measured.factors, measured.norms
    if opt.skip_nonfinite:
        flags.append(any_nan(measured.zeros))
    still = _any(flags)  # the last word on the step

    ratios = {
        b: opt.rule.trust_ratio(
            values, of_group(values, b)["weight_decay"] if b.decays else jnp.zeros((), dtype), norms[b]
        )
        for b in norms
    }
    scalars = guarded(scalars, factors, still, list(norms.values()) if opt.rule.measures else ())
    # Taken apart once, not for each of hundreds of leaves.
    taken = {key: (names, v, tuple(v[i] for i in range(v.size))) for key, (names, v) in scalars.items()}
    shared, new = Shared(opt, layout, in_place, still), []
    for b, w in zip(layout.buckets, g.buckets if p is None else p.buckets, strict=True):
        w = None if p is None else w
        if b.frozen or b in absent:  # no gradient is not a zero gradient: nothing changes
            new.append(w if in_place else None if b.frozen else _no_update(gradients[b], b))
            continue
        own = {name: x for name, x in kept[b].items() if name != "accumulated"}
        result, new_own = update_bucket(shared, b, taken[scalars_key(opt, b)], ratios.get(b), gradients[b], w, own)
        kept[b] |= new_own
        like = leaves_of[b]
        if isinstance(like, pallas_kernels.Pieces) and not isinstance(result, pallas_kernels.Pieces):
            result = like.replaced(like.split(result), result.dtype)
        new.append(result)

    fields: dict[str, Any] = {"count": count, **fields_of(opt, kept)}
    if vector is not state.hyperparams:
        fields["hyperparams"] = vector
    if ratios:
        fields["trust_ratios"] = jnp.concatenate(list(ratios.values()))
    if opt.clips:
        fields["grad_norm"] = measured.grad_norm
    state = _next_state(state, fields, still, bad, micro_step, opt.accumulate)
    return close_operands(layout, new, g, p, in_place), state


def check_params_given(opt: Optimizer, params: Any, in_place: bool) -> None:
    if params is None and (in_place or opt.needs_params):
        call = "apply" if in_place else "update"
        raise ValueError(
            f"`params` are needed, got None: call {call}(grads, state, params); weight decay, trust ratios, averages and master "
            "weights are computed from them"
        )


class Measured(NamedTuple):
    """What reading the gradients says.

    Attributes:
        factors: what they are to be multiplied with, by name.
        norms: (2, segments) of each bucket with trust ratios.
        grad_norm: 0-d, of all of them before clipping; None if they are not clipped.
        zeros: 1-D arrays of zeros if all gradients are usable; otherwise with a NaN somewhere.
    """

    factors: dict[str, jax.Array]
    norms: dict[Bucket, jax.Array]
    grad_norm: Any
    zeros: list[jax.Array]


def _measure(opt, layout, gradients, truths, kept, values, scalars, unscale) -> Measured:
    """Each gradient is read once for clipping or for the guard, and once for trust ratios."""
    factors = {} if unscale is None else {"unscale": unscale}
    zeros, grad_norm = [], None
    if opt.clips:
        clip_norm = values["clip_norm"]
        grad_norm = measure.global_norm(opt, layout, gradients, unscale, clip_norm.dtype)
        first, clip = measure.clip_factors(grad_norm, clip_norm)
        factors = {"unscale": first if unscale is None else unscale * first, "clip": clip}
        # No gradient is larger than the norm, so if the norm can be squared they can.
        largest = jnp.square(jnp.minimum(grad_norm, clip_norm)) if opt.rule.squares_gradient else grad_norm
        zeros += [(x - x).reshape(1) for x in (grad_norm, largest)]
    norms = measure.trust_norms(opt, layout, gradients, truths, kept, scalars, factors)
    zeros += [(x[1] - x[1]).reshape(-1) for x in norms.values()]
    if opt.skip_nonfinite and opt.accumulate == 1:  # a sum is finite: its parts have been looked at
        seen = [b for b in layout.buckets if b in norms or (opt.clips and not b.frozen)]
        zeros += measure.nonfinite(opt, layout, gradients, unscale, seen)
    return Measured(factors, norms, grad_norm, zeros)


def _any(flags: Sequence[jax.Array]) -> jax.Array | None:
    """Whether one of them is set; None if there are none."""
    found = None
    for flag in flags:
        found = flag if found is None else found | flag
    return found


def _accumulate(opt, layout, gradients, state, kept, unscale, bad, dtype) -> dict[Bucket, jax.Array]:
    """The accumulated gradients, with their share of these ones added unless they are bad; put in `kept` too.

    The sum of a step is left to the next one to begin anew from: writing zeros there would be one more pass.
    """
    share = jnp.full((), 1 / opt.accumulate, dtype) * (jnp.ones((), dtype) if unscale is None else unscale)
    flag = jnp.zeros((), dtype) if bad is None else bad.astype(dtype)
    scalars = jnp.stack([flag, (state.micro_step == 0).astype(dtype), share])
    shared, new = Shared(opt, layout, True, bad), {}
    for b, own in kept.items():
        new[b] = own["accumulated"] = accumulate(shared, b, scalars, gradients[b], own["accumulated"])
    return new


def _no_update(g: Any, bucket: Bucket) -> Any:
    if isinstance(g, pallas_kernels.Pieces):
        return g.replaced((jnp.zeros(shape, bucket.dtype) for shape in g.shapes), bucket.dtype)
    return jnp.zeros(bucket.shape, bucket.dtype)


def _next_state(
    state: FusedState, new: dict[str, Any], still: Any, bad: Any, micro_step: Any, accumulate: int
) -> FusedState:
    """The state after a step that left everything `still`, or not.

    Args:
      new: fields of the state after a step.
      bad: with `micro_step`: whether these gradients were left out.
      micro_step: gradients accumulated now, or None.
    """
    skipped = still
    if micro_step is not None:
        whole = micro_step >= accumulate
        skipped = still & whole if bad is None else bad | (still & whole)
        after = jnp.where(whole, np.int32(0), micro_step)
        new["micro_step"] = jnp.where(skipped, state.micro_step, after)
    if skipped is None:
        # False, as a result of the kernel that counts: a constant would take a launch of its own to be copied.
        return state._replace(skipped=new["count"] < np.int32(0), **new)
    for field in ("count", "hyperparams", "trust_ratios", "grad_norm"):
        if field in new:
            new[field] = jnp.where(still, getattr(state, field), new[field])
    total = state.total_skipped + skipped.astype(jnp.int32)
    total = jnp.where(state.total_skipped == INT32_MAX, INT32_MAX, total)
    return state._replace(skipped=skipped, total_skipped=total, **new)
