"""Learning-rate schedules that optax does not have in this form; all of optax's work as well."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from fusedopt.hyperparams import is_number
from fusedopt.paths import type_of
from fusedopt.typing import Scalar


def warmup_cosine(
    peak_value: Scalar, warmup_steps: int, total_steps: int, end_value: Scalar = 0.0
) -> Callable[[ArrayLike], jax.Array]:
    """Linear warmup that never wastes a step at 0, then one half cosine.

        t < warmup:  peak * (t + 1) / warmup
        else:        end + (peak - end)/2 * (1 + cos(pi * r)),
                     r = min(1, (t - warmup) / (total - warmup))

    Args:
      peak_value: value at the end of the warmup, a number or a 0-d array.
      warmup_steps: number of warmup steps, >= 0.
      total_steps: the step at which `end_value` is reached, >= warmup_steps and >= 1.
      end_value: value from `total_steps` on.

    Returns:
      A schedule: count (int, 0-d) -> float32, 0-d.

    Raises:
      ValueError: step numbers out of order, or a peak or end that is not finite and >= 0, or not 0-d.
      TypeError: what is no number.
    """
    warmup, total = _steps("warmup_steps", warmup_steps), _steps("total_steps", total_steps)
    if not 0 <= warmup <= total or total < 1:
        raise ValueError(
            "expected 0 <= `warmup_steps` <= `total_steps` and `total_steps` >= 1, got "
            f"warmup_steps={warmup_steps}, total_steps={total_steps}"
        )
    _check_value("peak_value", peak_value)
    _check_value("end_value", end_value)

    def schedule(count: ArrayLike) -> jax.Array:
        t = jnp.asarray(count).astype(jnp.float32)
        peak = jnp.asarray(peak_value).astype(jnp.float32)
        end = jnp.asarray(end_value).astype(jnp.float32)
        warm = peak * (t + 1) / max(warmup, 1.0)
        r = jnp.clip((t - warmup) / max(total - warmup, 1.0), 0.0, 1.0)
        if total == warmup:
            r = jnp.ones_like(r)
        decayed = end + (peak - end) / 2 * (1 + jnp.cos(jnp.pi * r))
        return jnp.where(t < warmup, warm, decayed)

    return schedule


def _steps(name: str, value: Any) -> float:
    """As a Python number, whose type no other one gives way to: arrays that are known are taken too."""
    array = isinstance(value, (np.ndarray, jax.Array)) and not isinstance(value, Tracer) and value.ndim == 0
    if isinstance(value, (bool, np.bool_)) or not (array or is_number(value)):
        raise TypeError(f"`{name}`: expected a number that is known now, got {type_of(value)}")
    return float(value)


def _check_value(name: str, value: Any) -> None:
    """Numbers by their range, arrays and tracers by their shape."""
    shape = getattr(value, "shape", None)
    if isinstance(value, (bool, np.bool_)) or (shape is None and not is_number(value)):
        raise TypeError(f"`{name}`: expected a number or a 0-d array, got {type_of(value)}")
    if shape:
        raise ValueError(f"`{name}`: expected a number or a 0-d array, got shape {shape}")
    if is_number(value) and not (math.isfinite(value) and value >= 0):
        raise ValueError(f"`{name}`: expected a finite number >= 0, got {value!r}")
