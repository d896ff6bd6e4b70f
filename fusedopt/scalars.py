"""The scalars of a step: computed once, handed to every bucket as one small array."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fusedopt.hyperparams import bias_correction
from fusedopt.layout import Bucket, FlatLayout
from fusedopt.optimizer import Optimizer
from fusedopt.state import live_buckets

Scalars = dict[tuple, tuple[tuple[str, ...], jax.Array]]
"""`scalars_key` -> names and vector of the scalars that its buckets share."""


def unscale_factor(loss_scale: Any, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Whether the loss scale is unusable, and the factor that undoes it; 0 counts as 1."""
    scale = _scalar("loss_scale", loss_scale).astype(dtype)
    scale = jnp.where(scale == 0, jnp.ones_like(scale), scale)
    return jnp.logical_not(jnp.isfinite(scale)), 1 / scale


def callers_flag(flag: Any) -> jax.Array:
    """The caller's has_nan as a bool: anything nonzero counts, also 2.0."""
    flag = _scalar("has_nan", flag)
    return flag != jnp.zeros((), flag.dtype)


def _scalar(name: str, value: Any) -> jax.Array:
    """0-d, whatever number or array it came as."""
    if not isinstance(value, (bool, int, float)) and not hasattr(value, "dtype"):
        raise TypeError(f"`{name}`: expected a 0-d number or array, got {type(value).__name__}")
    array = jnp.asarray(value)
    if array.shape != ():
        raise ValueError(f"`{name}`: expected a 0-d number or array, got shape {array.shape}")
    return array


def values_dtype(values: Mapping[str, Any]) -> Any:
    """float32, or float64 with float64 parameters: the dtype of all scalars."""
    return next(iter(jax.tree.leaves(values))).dtype


def of_group(values: Mapping[str, Any], bucket: Bucket) -> dict[str, Any]:
    """The hyperparameters as a group's overrides leave them."""
    own = dict(values)
    scale = own.get(f"learning_rate_scale/{bucket.group}")
    if scale is not None:
        own["learning_rate"] = own["learning_rate"] * scale
    decay = own.get(f"weight_decay/{bucket.group}")
    if decay is not None:
        own["weight_decay"] = decay
    return own


def scalars_key(opt: Optimizer, bucket: Bucket) -> tuple:
    """Buckets of one key share their scalars."""
    overridden = any(g.name == bucket.group for g in opt.groups)
    return opt.rule_of(bucket), bucket.group if overridden else None


def rule_scalars(opt: Optimizer, layout: FlatLayout, values: Mapping[str, Any], count: jax.Array) -> Scalars:
    """The scalars of each rule and group as they are, whatever the gradients turn out to be."""
    found: dict[tuple, tuple] = {}
    for b in live_buckets(layout):
        key = scalars_key(opt, b)
        if key in found:
            continue
        scalars = key[0].scalars(of_group(values, b), count)
        if opt.averages:
            decay = values["ema_decay"]
            # Debiased: what the average of zeros and the parameters since, divided by 1 - d^t, moves by.
            rate = decay.complement / bias_correction(decay, count) if opt.ema_debias else decay.complement
            scalars["ema_rate"] = rate
        found[key] = tuple(scalars), jnp.stack(list(scalars.values()))
    return _barred(found) if opt.rule.measures else found


def guarded(
    scalars: Scalars, factors: Mapping[str, jax.Array], bad: jax.Array | None, norms: Sequence[jax.Array] = ()
) -> Scalars:
    """The scalars that a step works with: neutral if it is bad, with the flag and the gradients' factors in front.

    They depend on `norms`, so that what is overwritten with them has been measured before: where XLA could do the one
    beside the other, it copies what both need.
    """
    new = {}
    for key, (names, vector) in scalars.items():
        dtype, head = vector.dtype, {}
        if bad is not None:
            head["bad"] = bad.astype(dtype)
            neutral = [key[0].neutral.get(name) for name in names]
            known = np.asarray([n is not None for n in neutral])
            if known.any():
                vector = jnp.where(
                    jnp.broadcast_to(bad, known.shape) & known, np.asarray([n or 0.0 for n in neutral], dtype), vector
                )
        head |= factors
        if head:
            vector = jnp.concatenate([jnp.stack(list(head.values())), vector])
        if norms:
            below = sum(map(jnp.sum, norms)) < 0  # never, but XLA does not know; a NaN is not either
            vector = jnp.where(below, jnp.zeros_like(vector), vector)
        new[key] = (*head, *names), vector
    return _barred(new)


def _barred(scalars: Scalars) -> Scalars:
    """Behind an optimization barrier: without it XLA computes bias corrections again for every element."""
    vectors = jax.lax.optimization_barrier([vector for _, vector in scalars.values()])
    return {key: (names, v) for (key, (names, _)), v in zip(scalars.items(), vectors, strict=True)}
