"""The scalars of a step: computed once, handed to every bucket as one small array."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fusedopt.layout import Bucket
from fusedopt.optimizer import Optimizer


def unscale_factor(loss_scale: Any, dtype: Any) -> tuple[jax.Array | None, jax.Array | None]:
    """Whether the loss scale is unusable, and the factor that undoes it; 0 counts as 1."""
    if loss_scale is None:
        return None, None
    scale = jnp.asarray(loss_scale).astype(dtype)
    if scale.shape != ():
        raise ValueError(f"`loss_scale`: expected a 0-d value, got shape {scale.shape}")
    scale = jnp.where(scale == 0, jnp.ones_like(scale), scale)
    return jnp.logical_not(jnp.isfinite(scale)), 1 / scale


def callers_flag(flag: Any) -> jax.Array:
    """The caller's has_nan as a bool: anything nonzero counts, also 2.0."""
    flag = jnp.asarray(flag)
    if flag.shape != ():
        raise ValueError(f"`has_nan`: expected a 0-d flag, got shape {flag.shape}")
    return flag != jnp.zeros((), flag.dtype)


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


def scalar_vectors(opt, layout, values, count, unscale, bad) -> dict[tuple, tuple]:
    """key -> (names, vector): the scalars of the rule, neutral if the step is bad.

    The vectors pass an optimization barrier: without it XLA computes bias corrections again
    for every element that uses them.
    """
    vectors, names = {}, {}
    for b in layout.buckets:
        key = scalars_key(opt, b)
        if b.frozen or key in vectors:
            continue
        rule = key[0]
        scalars = rule.scalars(of_group(values, b), count)
        dtype = values_dtype(values)
        head = {}
        if bad is not None:
            head["bad"] = bad.astype(dtype)
            for name, neutral in rule.neutral.items():
                if name in scalars:
                    scalars[name] = jnp.where(bad, np.asarray(neutral, dtype), scalars[name])
        if unscale is not None:
            head["unscale"] = unscale
        scalars = {**head, **scalars}
        names[key] = tuple(scalars)
        vectors[key] = jnp.stack(list(scalars.values()))
    keys = list(vectors)
    barred = jax.lax.optimization_barrier([vectors[k] for k in keys])
    return {k: (names[k], v) for k, v in zip(keys, barred, strict=True)}
