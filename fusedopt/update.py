"""One optimizer step: the one place where a rule meets a launcher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from fusedopt.guard import any_nan, zero_or_nan
from fusedopt.layout import Bucket, FlatLayout
from fusedopt.operands import close_operands, open_operands
from fusedopt.optimizer import FusedState, Optimizer
from fusedopt.packing import slot_dtype
from fusedopt.rules import Rule
from fusedopt.rules.base import NEGATIVE_ZERO
from fusedopt.scalars import callers_flag, of_group, scalar_vectors, scalars_key, unscale_factor, values_dtype

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
    if params is None and (in_place or opt.needs_params):
        raise ValueError(
            "`params` are needed: weight decay and trust ratios are computed from the "
            "parameters; call update(grads, state, params)"
        )
    layout, g, p = open_operands(opt, grads, params)
    opt.check_state(state, layout)
    opt.remember(state, layout)

    count = jnp.where(state.count == INT32_MAX, INT32_MAX, state.count + np.int32(1))
    values, vector = opt.hyperparams.resolve(state.hyperparams, state.count, extra)
    dtype = vector.dtype
    bad, unscale = unscale_factor(extra.get("loss_scale"), dtype)
    norms = _norms(opt, layout, g, p, values, unscale)
    flags = [] if bad is None else [bad]
    if opt.skip_nonfinite:
        flags.append(_nonfinite(opt, layout, g, norms, unscale))
    if extra.get("has_nan") is not None:
        flags.append(callers_flag(extra["has_nan"]))
    bad = None
    for flag in flags:
        bad = flag if bad is None else bad | flag

    ratios = {
        b: opt.rule.trust_ratio(
            values, of_group(values, b)["weight_decay"] if b.decays else jnp.zeros((), dtype), norms[b]
        )
        for b in norms
    }
    scalars = scalar_vectors(opt, layout, values, count, unscale, bad)
    new, slots = [], {slot: [] for slot in opt.rule.slots}
    live = 0
    for i, bucket in enumerate(layout.buckets):
        w = None if p is None else p.buckets[i]
        if bucket.frozen:
            new.append(w if in_place else None)
            continue
        old = [getattr(state, slot)[live] for slot in opt.rule.slots]
        live += 1
        if g.absent(layout, bucket):  # no gradient is not a zero gradient: nothing changes
            result, changed = (w if in_place else _no_update(g.buckets[i], bucket)), old
        else:
            result, changed = _update_bucket(
                opt,
                bucket,
                layout,
                scalars[scalars_key(opt, bucket)],
                ratios.get(bucket),
                bad,
                g.buckets[i],
                w,
                old,
                in_place,
            )
        new.append(result)
        for slot, buffer in zip(opt.rule.slots, changed, strict=True):
            slots[slot].append(buffer)

    state = _next_state(opt, state, count, vector, bad, ratios, slots)
    return close_operands(layout, new, g, p, in_place), state


# ------------------------------------------------------------------ what is known before writing


def _norms(opt, layout, g, p, values, unscale) -> dict[Bucket, jax.Array]:
    """Norms (2, segments) of what the trust ratio is made of, for each bucket that has one."""
    norms = {}
    for buckets, w, grads, sizes, row in _measured_together(opt, layout, g, p):
        first = buckets[0]
        wd = of_group(values, first)["weight_decay"] if first.decays else None
        dtype, own = values_dtype(values), slot_dtype(first.dtype)
        one, zero = jnp.ones((), dtype), jnp.zeros((), dtype)
        scalars = jnp.stack([one if unscale is None else unscale, zero if wd is None else wd])

        def measured(s, w, g, dtype=dtype, own=own):
            return opt.rule.measured(SimpleNamespace(wd=s[1]), g.astype(own).astype(dtype) * s[0], w.astype(dtype))

        name = f"fusedopt_norms_{first.group}"
        sums = pallas_kernels.segment_sumsq(
            measured, scalars, (w, grads), sizes, row=row, backend=opt.backend, name=name
        )
        ends = np.cumsum([b.last - b.first for b in buckets])[:-1].tolist()
        norms |= zip(buckets, jnp.split(pallas_kernels.norm(sums), ends, axis=1), strict=True)
    return norms


def _measured_together(opt, layout, g, p):
    """(buckets, parameters, gradients, sizes, row) of each call that takes norms.

    A packed bucket is one call. Solo ones that are treated alike are the pieces of one, where kernels can take them so.
    """
    alike: dict[tuple, list[int]] = {}
    for i, b in enumerate(layout.buckets):
        if b.frozen or not b.trust:
            continue
        if opt.backend == "mosaic" and not b.solo and layout.align != pallas_kernels.BLOCK:
            raise ValueError(
                f"`backend`='mosaic' takes norms of whole blocks: pack with packing=fusedopt.Packing("
                f"align={pallas_kernels.BLOCK}), got align={layout.align}, or leave `backend` to the device"
            )
        together = b.solo and pallas_kernels.runs_pieces(opt.backend, g.buckets[i])
        alike.setdefault((b.group, b.decays, b.dtype, g.buckets[i].dtype) if together else (i,), []).append(i)
    for key, members in alike.items():
        buckets = [layout.buckets[i] for i in members]
        sizes = [n for b in buckets for n in layout.sizes_of(b)]
        w, grads = ([x.buckets[i] for i in members] for x in (p, g))
        if len(key) == 1:
            yield buckets, w[0], grads[0], sizes, layout.align
        else:
            w, grads = (pallas_kernels.pieces_of(x, x[0].dtype) for x in (w, grads))
            yield buckets, w, grads, sizes, grads.row


def _nonfinite(opt, layout, g, norms, unscale) -> jax.Array:
    """Whether a gradient is unusable; the norms have seen those of their buckets already."""
    alike: dict[tuple, list[jax.Array]] = {}
    for b, x in zip(layout.buckets, g.buckets, strict=True):
        if x is None or b in norms:
            continue
        squared = opt.rule_of(b).squares_gradient and not b.frozen
        # In the dtype of the formula: float64 gradients of a float32 parameter may overflow there.
        alike.setdefault((squared, slot_dtype(b.dtype)), []).extend(pallas_kernels.arrays_of(x))
    zeros = [
        zero_or_nan(arrays, unscale, squared=squared, dtype=dtype, backend=opt.backend)
        for (squared, dtype), arrays in alike.items()
    ]
    if norms:
        zeros += [x[1] - x[1] for x in norms.values()]
    return any_nan(zeros)


# ------------------------------------------------------------------ the update itself


def _update_bucket(
    opt: Optimizer,
    bucket: Bucket,
    layout: FlatLayout,
    named: tuple,
    eta: Any,
    bad: Any,
    g: jax.Array,
    w: Any,
    slots: Sequence[jax.Array],
    in_place: bool,
) -> tuple[jax.Array, list[jax.Array]]:
    """``(new w or u, new slots)`` of one bucket, in one pass over it."""
    rule = opt.rule_of(bucket)
    names, vector = named
    if vector.dtype == jnp.float64 and bucket.dtype != np.float64:  # float32 beside float64
        vector = vector.astype(jnp.float32)
        eta = None if eta is None else eta.astype(jnp.float32)
    row_scalars: tuple = ()
    if eta is not None:
        names = (*names, "eta")
        if bad is not None:
            eta = jnp.where(bad, jnp.zeros_like(eta), eta)
        if bucket.solo:
            vector = jnp.append(vector, eta)
        else:
            sizes = layout.sizes_of(bucket)
            row_scalars = (pallas_kernels.spread(eta, sizes, layout.align, bucket.size),)
    reads_w = bucket.decays or bucket.trust
    fn = _body(rule, names, vector.dtype, len(slots), reads_w and bucket.decays, in_place, has_w=in_place or reads_w)
    updated, read = list(slots), [g]
    if in_place:
        updated.insert(0, w)
    elif reads_w:
        read.insert(0, w)
    new, emitted = pallas_kernels.elementwise(
        fn,
        vector,
        updated,
        read,
        emit=() if in_place else (bucket.dtype,),
        row_scalars=row_scalars,
        row=layout.align,
        early_exit=bad is not None,
        # One leaf alone: XLA's kernel of it is as good as ours, compiles faster, and takes along what made the
        # gradient (a cast, an unscale), which a kernel of ours would wait for.
        backend="xla" if opt.backend is None and bucket.solo else opt.backend,
        name=f"fusedopt_{type(rule).__name__.lower()}_{bucket.group}",
    )
    return (new[0], list(new[1:])) if in_place else (emitted[0], list(new))


def _no_update(g: Any, bucket: Bucket) -> Any:
    if isinstance(g, pallas_kernels.Pieces):
        return g.replaced((jnp.zeros(shape, bucket.dtype) for shape in g.shapes), bucket.dtype)
    return jnp.zeros(bucket.shape, bucket.dtype)


def _body(rule: Rule, names, dtype, num_slots: int, decays: bool, in_place: bool, has_w: bool):
    """The elementwise function of a bucket: unscale, guard, the rule's formula, the sum.

    Block order: in place ``w, *slots, g``; otherwise ``*slots, [w,] g``.
    """

    def body(values, *blocks):
        s = SimpleNamespace(**dict(zip(names, values, strict=True)))
        blocks = [x.astype(dtype) for x in blocks]
        g = blocks.pop()
        w = blocks.pop(0 if in_place else -1) if has_w else None
        bad = s.bad != 0 if "bad" in names else None
        if "unscale" in names:
            g = g * s.unscale
        if bad is not None:
            g = jnp.where(bad, NEGATIVE_ZERO.astype(dtype), g)
        u, *slots = rule.formula(s, g, w if decays else None, *blocks)
        assert len(slots) == num_slots
        if in_place:
            new = w + u
            return (new if bad is None else jnp.where(bad, w, new), *slots)
        return (*slots, u if bad is None else jnp.where(bad, jnp.zeros_like(u), u))

    return body


def _next_state(opt, state, count, vector, bad, ratios, slots) -> FusedState:
    new: dict[str, Any] = {slot: tuple(buffers) for slot, buffers in slots.items()}
    if ratios:
        new["trust_ratios"] = jnp.concatenate(list(ratios.values()))
    new["count"] = count
    if vector is not state.hyperparams:
        new["hyperparams"] = vector
    if bad is None:
        # False, as a result of the kernel that counts: a constant would take a launch of its own to be copied.
        return state._replace(skipped=count < np.int32(0), **new)
    for field in ("count", "hyperparams", "trust_ratios"):
        if field in new:
            new[field] = jnp.where(bad, getattr(state, field), new[field])
    total = jnp.where(state.total_skipped == INT32_MAX, INT32_MAX, state.total_skipped + bad.astype(jnp.int32))
    return state._replace(skipped=bad, total_skipped=total, **new)
