"""Learning-rate schedules that optax does not have in this form; all of optax's work as well."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

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
      ValueError: step numbers out of order, or a peak or end that is not finite and >= 0.
    """
    if not 0 <= warmup_steps <= total_steps or total_steps < 1:
        raise ValueError(
            "expected 0 <= `warmup_steps` <= `total_steps` and `total_steps` >= 1, got "
            f"warmup_steps={warmup_steps}, total_steps={total_steps}"
        )
    for name, value in (("peak_value", peak_value), ("end_value", end_value)):
        if isinstance(value, (int, float)) and not (math.isfinite(value) and value >= 0):
            raise ValueError(f"`{name}`: expected a finite number >= 0, got {value!r}")

    def schedule(count: ArrayLike) -> jax.Array:
        t = jnp.asarray(count).astype(jnp.float32)
        peak = jnp.asarray(peak_value).astype(jnp.float32)
        end = jnp.asarray(end_value).astype(jnp.float32)
        warm = peak * (t + 1) / max(warmup_steps, 1)
        r = jnp.clip((t - warmup_steps) / max(total_steps - warmup_steps, 1), 0.0, 1.0)
        if total_steps == warmup_steps:
            r = jnp.ones_like(r)
        decayed = end + (peak - end) / 2 * (1 + jnp.cos(jnp.pi * r))
        return jnp.where(t < warmup_steps, warm, decayed)

    return schedule
