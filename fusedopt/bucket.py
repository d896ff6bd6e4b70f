"""The update of one bucket: the one place where a rule meets a launcher."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import pallas_kernels
from fusedopt.layout import Bucket, FlatLayout
from fusedopt.optimizer import Optimizer
from fusedopt.rules.base import NEGATIVE_ZERO

FACTORS = ("unscale", "clip")
"""Scalars that the gradients are multiplied with."""


class Shared(NamedTuple):
    """What the buckets of a step share.

    Attributes:
        opt, layout: whose buckets they are.
        in_place: new parameters, not updates.
        bad: a flag: leave everything as it is; None if no step is ever skipped.
    """

    opt: Optimizer
    layout: FlatLayout
    in_place: bool
    bad: Any


def update_bucket(
    step: Shared,
    bucket: Bucket,
    scalars: tuple[tuple[str, ...], jax.Array, tuple[jax.Array, ...]],
    eta: Any,
    g: Any,
    w: Any,
    kept: Mapping[str, Any],
) -> tuple[Any, dict[str, Any]]:
    """``(new w or u, new buffers of the state)`` of one bucket, in one pass over it.

    Args:
      scalars: names and vector; the numbers of the vector.
      eta: trust ratios (segments,), or None.
      g: the gradients.
      w: the parameters, or None.
      kept: the bucket's buffers of the state by name.
    """
    opt, layout, rule = step.opt, step.layout, step.opt.rule_of(bucket)
    names, vector, numbers = scalars
    backend = backend_of(opt, bucket)
    if vector.dtype == jnp.float64 and bucket.dtype.itemsize < 8:  # float32 beside float64
        vector, numbers = vector.astype(jnp.float32), tuple(x.astype(jnp.float32) for x in numbers)
        eta = None if eta is None else eta.astype(jnp.float32)
    row_scalars: tuple = ()
    if eta is not None:
        names = (*names, "eta")
        if step.bad is not None:
            eta = jnp.where(step.bad, jnp.zeros_like(eta), eta)
        if bucket.solo:
            vector, numbers = jnp.append(vector, eta), (*numbers, eta.reshape(()))
        else:
            count = 1 if opt.shards is None else opt.shards.count
            rows = pallas_kernels.spread(eta, layout.sizes_of(bucket), layout.align, bucket.size * count)
            row_scalars = (rows if opt.shards is None else opt.shards.own(rows),)
    masters, averages = "master" in kept, "ema" in kept
    reads_w = step.in_place or averages or masters or bucket.decays or bucket.trust
    updated, read = dict(kept), {}
    if step.in_place:
        updated = {"w": w, **kept}
    elif reads_w:
        read["w"] = w
    read["g"] = g
    # Only so that the rounded master is exactly where the parameter ends: p + u has the dtype of p anyway.
    emit = () if step.in_place else (vector.dtype if masters else bucket.dtype,)
    new, emitted = pallas_kernels.elementwise(
        _body(rule, names, vector.dtype, bucket, (*updated, *read), tuple(updated)),
        numbers if backend == "xla" else vector,
        tuple(updated.values()),
        tuple(read.values()),
        emit=emit,
        row_scalars=row_scalars,
        row=layout.align,
        early_exit=step.bad is not None,
        backend=backend,
        name=f"fusedopt_{type(rule).__name__.lower()}_{bucket.group}",
    )
    result = dict(zip(updated, new, strict=True))
    return (result.pop("w") if step.in_place else emitted[0]), result


def backend_of(opt: Optimizer, bucket: Bucket) -> pallas_kernels.Backend | None:
    # One leaf alone: XLA's kernel of it is as good as ours, compiles faster, and takes along what made the
    # gradient (a cast, an unscale), which a kernel of ours would wait for.
    return "xla" if opt.backend is None and bucket.solo else opt.backend


def _body(rule, names, dtype, bucket: Bucket, inputs: tuple[str, ...], updated: tuple[str, ...]):
    """The elementwise function of a bucket: unscale, guard, the rule's formula, the sum, and what follows the sum.

    Args:
      names: of the scalars.
      inputs: of the blocks that it takes; `updated`: of those that it returns, an update behind them if ``w`` is none.
    """

    def body(values, *blocks):
        s = SimpleNamespace(**dict(zip(names, values, strict=True)))
        old = {name: x.astype(dtype) for name, x in zip(inputs, blocks, strict=True)}
        g = old["g"]
        bad = _flag(getattr(s, "bad", 0.0))
        for factor in FACTORS:
            if factor in names:
                g = g * getattr(s, factor)
        if bad is not None:
            g = jnp.where(bad, NEGATIVE_ZERO.astype(dtype), g)
        truth = old.get("master", old.get("w"))  # the parameter with all its digits
        slots = [old[slot] for slot in rule.slots]
        u, *slots = rule.formula(s, g, truth if bucket.decays else None, *slots)
        new = dict(zip(rule.slots, slots, strict=True))

        def guarded(name, value):
            return value if bad is None else jnp.where(bad, old[name], value)

        # What follows the parameter is made from what is written, guard and all: from anything else XLA would make a
        # kernel that reads the old parameter beside the one that overwrites it, and copy it first.
        if "master" in old:
            new["master"] = after = guarded("master", old["master"] + u)
            if "w" in old:
                new["w"] = guarded("w", after)
        elif "w" in old:
            new["w"] = guarded("w", old["w"] + u)
            after = pallas_kernels.rounded(new["w"], bucket.dtype)
        if "ema" in old:
            # Not d*ema + (1-d)*w: if d and 1-d do not add up to 1 in float32, that is off by 3e-4 at d = 0.9999.
            new["ema"] = guarded("ema", old["ema"] + s.ema_rate * (after - old["ema"]))
        out = [new[name] for name in updated]
        if "w" not in updated:
            if "master" in old:
                u = pallas_kernels.rounded(after, bucket.dtype) - old["w"]
            out.append(u if bad is None else jnp.where(bad, jnp.zeros_like(u), u))
        return out

    return body


def _flag(value: Any) -> jax.Array | None:
    """None where it is known that the flag is not set."""
    return None if isinstance(value, float) else value != 0


def accumulate(step: Shared, bucket: Bucket, scalars: jax.Array, g: Any, total: jax.Array) -> jax.Array:
    """``total + share*g``, or only ``share*g`` if it is the first.

    Args:
      scalars: a flag, not 0 to leave `total` as it is; a flag, not 0 for the first; the share.
    """
    dtype = total.dtype

    def body(s, total, g):
        new = jnp.where(s[1] != 0, jnp.zeros_like(total), total) + s[2].astype(dtype) * g.astype(dtype)
        bad = None if step.bad is None else _flag(s[0])
        return (new if bad is None else jnp.where(bad, total, new),)

    if isinstance(g, pallas_kernels.Pieces) and g.absent:  # a place that is left alone would keep what it had before
        zeros = map(jnp.zeros, g.shapes, [g.dtype] * len(g.shapes))
        g = g.replaced(z if x is None else x for x, z in zip(g.arrays, zeros, strict=True))
    (total,), _ = pallas_kernels.elementwise(
        body,
        scalars,
        (total,),
        (g,),
        row=step.layout.align,
        early_exit=step.bad is not None,
        backend=backend_of(step.opt, bucket),
        name=f"fusedopt_accumulate_{bucket.group}",
    )
    return total
