"""What is known of the gradients before anything is written: norms, and whether they are usable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from fusedopt.guard import zero_or_nan
from fusedopt.layout import Bucket, FlatLayout
from fusedopt.optimizer import Optimizer
from fusedopt.packing import slot_dtype
from fusedopt.scalars import Scalars, scalars_key
from fusedopt.state import live_buckets

Buffers = Mapping[Bucket, Any]


def global_norm(opt: Optimizer, layout: FlatLayout, grads: Buffers, unscale: Any, dtype: Any) -> jax.Array:
    """Norm of the unscaled gradients of all buckets that are updated, 0-d; in one read of them."""
    alike: dict[Any, list[jax.Array]] = {}
    for b in live_buckets(layout):
        alike.setdefault(slot_dtype(b.dtype), []).extend(pallas_kernels.arrays_of(grads[b]))
    total = None
    for own, arrays in alike.items():

        def unscaled(s, g, own=own):
            return (g.astype(own).astype(dtype) * s[0],)

        scalars = (jnp.ones((), dtype) if unscale is None else unscale).reshape(1)
        sums = _summed(opt).total_sumsq(unscaled, scalars, arrays, backend=opt.backend, name="fusedopt_grad_norm")
        total = sums if total is None else jax.tree.map(jnp.add, total, sums)
    return jnp.zeros((), dtype) if total is None else pallas_kernels.norm(total).reshape(())


def clip_factors(norm: jax.Array, clip_norm: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two factors that limit the norm to `clip_norm` together: exactly 1 below it, and for a norm that is NaN.

    Two, because ``clip_norm/norm`` alone would underflow where gradients are close to the largest float32.
    """
    beyond = norm > clip_norm
    first = jnp.where(beyond & (norm > 2.0**64), jnp.full_like(norm, 2.0**-64), jnp.ones_like(norm))
    return first, jnp.where(beyond, clip_norm / jnp.where(beyond, norm * first, 1), jnp.ones_like(norm))


def trust_norms(
    opt: Optimizer,
    layout: FlatLayout,
    grads: Buffers,
    weights: Buffers,
    slots: Mapping[Bucket, Mapping[str, jax.Array]],
    scalars: Scalars,
    factors: Mapping[str, jax.Array],
) -> dict[Bucket, jax.Array]:
    """Norms (2, segments) of what the trust ratio is made of, for each bucket that has one.

    Args:
      scalars: as they are, not those of a skipped step.
      factors: of the gradients, by name.
    """
    norms: dict[Bucket, jax.Array] = {}
    for buckets, arrays, sizes, row in _measured_together(opt, layout, grads, weights, slots):
        first = buckets[0]
        names, vector = scalars[scalars_key(opt, first)]
        dtype, own = vector.dtype, slot_dtype(first.dtype)
        if factors:
            names, vector = (*factors, *names), jnp.concatenate([jnp.stack(list(factors.values())), vector])

        def measured(s, w, g, *slots, names=names, decays=first.decays, dtype=dtype, own=own):
            s = SimpleNamespace(**dict(zip(names, s, strict=True)))
            if not decays:
                s.wd = jnp.zeros((), dtype)
            g = g.astype(own).astype(dtype)
            for name in factors:
                g = g * getattr(s, name)
            return opt.rule.measured(s, g, w.astype(dtype), *(x.astype(dtype) for x in slots))

        name = f"fusedopt_norms_{first.group}"
        sums = _summed(opt).segment_sumsq(measured, vector, arrays, sizes, row=row, backend=opt.backend, name=name)
        ends = np.cumsum([b.last - b.first for b in buckets])[:-1].tolist()
        norms |= zip(buckets, jnp.split(pallas_kernels.norm(sums), ends, axis=1), strict=True)
    return norms


def _measured_together(opt, layout, grads, weights, slots) -> Iterator[tuple[list[Bucket], list, list[int], int]]:
    """(buckets, arrays, sizes, row) of each call that takes norms.

    A packed bucket is one call. Solo ones that are treated alike are the pieces of one, where kernels can take them so.
    """
    alike: dict[tuple, list[Bucket]] = {}
    for b in live_buckets(layout):
        if not b.trust:
            continue
        if opt.backend == "mosaic" and not b.solo and layout.align != pallas_kernels.BLOCK:
            raise ValueError(
                f"`backend`='mosaic' takes norms of whole blocks: pack with packing=fusedopt.Packing("
                f"align={pallas_kernels.BLOCK}), got align={layout.align}, or leave `backend` to the device"
            )
        together = b.solo and pallas_kernels.runs_pieces(opt.backend, grads[b])
        alike.setdefault((b.group, b.decays, b.dtype, grads[b].dtype) if together else (b,), []).append(b)
    for key, buckets in alike.items():
        sizes = [n for b in buckets for n in layout.sizes_of(b)]
        columns = [[weights[b] for b in buckets], [grads[b] for b in buckets]]
        columns += [[slots[b][name] for b in buckets] for name in opt.rule.measures]
        if len(key) == 1:
            arrays, row = [x for (x,) in columns], layout.align
            if len({isinstance(x, pallas_kernels.Pieces) for x in arrays}) > 1:
                arrays = list(map(pallas_kernels.join, arrays))
        else:
            arrays = [pallas_kernels.pieces_of(x, x[0].dtype) for x in columns]
            row = arrays[0].row
        yield buckets, arrays, sizes, row


def nonfinite(
    opt: Optimizer, layout: FlatLayout, grads: Buffers, unscale: Any, seen: Sequence[Bucket] = (), squared: bool = False
) -> list[jax.Array]:
    """`zero_or_nan` of all gradients but those of the buckets `seen`; frozen ones too.

    Args:
      squared: in any case, not only where the rule squares gradients.
    """
    alike: dict[tuple, list[jax.Array]] = {}
    for b in layout.buckets:
        if grads.get(b) is None or b in seen:
            continue
        squares = (squared or opt.rule_of(b).squares_gradient) and not b.frozen
        # In the dtype of the formula: float64 gradients of a float32 parameter may overflow there.
        alike.setdefault((squares, slot_dtype(b.dtype)), []).extend(pallas_kernels.arrays_of(grads[b]))
    zeros = [
        zero_or_nan(arrays, unscale, squared=squares, dtype=dtype, backend=opt.backend)
        for (squares, dtype), arrays in alike.items()
    ]
    return zeros if opt.shards is None else opt.shards.zeros(zeros)


def _summed(opt: Optimizer) -> Any:
    """Whose `total_sumsq` and `segment_sumsq` sum the buffers: those of whole ones, or of shards."""
    return pallas_kernels if opt.shards is None else opt.shards
