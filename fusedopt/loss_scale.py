"""A loss scale that finds its own size, for gradients that do not fit into float16."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fusedopt.packing import slot_dtype
from fusedopt.scalars import callers_flag
from fusedopt.typing import Flag, Scalar


class _Fields(NamedTuple):
    loss_scale: jax.Array
    counter: jax.Array
    left: jax.Array
    period: jax.Array
    factor: jax.Array
    min_loss_scale: jax.Array
    max_loss_scale: jax.Array
    hysteresis: jax.Array


class DynamicLossScale(_Fields):
    """The factor of the loss, and when to change it. A named tuple of 0-d arrays, all of them operands.

    ```python
    scale = fusedopt.DynamicLossScale()

    @jax.jit
    def train_step(params, state, scale, batch):
        loss, grads = scale.value_and_grad(loss_fn)(params, batch)
        params, state = tx.apply(grads, state, params, loss_scale=scale.loss_scale)
        return params, state, scale.update(state.skipped), loss
    ```

    The gradients stay scaled: the division is part of the optimizer's step, which also sees what
    is not finite, skips itself and says so in ``state.skipped``.

    Args:
      loss_scale: to begin with, float32.
      period: consecutive finite steps after which the scale grows, int32.
      factor: it is multiplied and divided by, float32 > 1; a power of two loses no bit.
      min_loss_scale, max_loss_scale: limits, float32.
      hysteresis: overflows until it shrinks, int32 >= 1: with 2, the first one keeps it. All of
        them are tolerated anew once the scale has grown.

    Attributes:
      counter: consecutive finite steps so far, int32.
      left: overflows left until it shrinks, int32.

    Raises:
      ValueError: Python numbers out of range. Arrays are not looked at.
    """

    __slots__ = ()

    def __new__(
        cls,
        loss_scale: Scalar = 2.0**15,
        counter: Scalar = 0,
        left: Scalar | None = None,
        period: Scalar = 2000,
        factor: Scalar = 2.0,
        min_loss_scale: Scalar = 1.0,
        max_loss_scale: Scalar = 2.0**24,
        hysteresis: Scalar = 1,
    ):
        _check("loss_scale", loss_scale, lambda x: 0 < x < np.inf, "a finite number > 0")
        _check("period", period, lambda x: x >= 1, "an int >= 1")
        _check("factor", factor, lambda x: 1 < x < np.inf, "a finite number > 1")
        _check("min_loss_scale", min_loss_scale, lambda x: 0 < x < np.inf, "a finite number > 0")
        _check("max_loss_scale", max_loss_scale, lambda x: 0 < x < np.inf, "a finite number > 0")
        _check("hysteresis", hysteresis, lambda x: x >= 1, "an int >= 1")
        left = hysteresis if left is None else left
        floats = (jnp.float32, (loss_scale, factor, min_loss_scale, max_loss_scale))
        ints = (jnp.int32, (counter, left, period, hysteresis))
        (scale, growth, low, high), (count, tolerated, steps, overflows) = (
            [_array(x, dtype) for x in values] for dtype, values in (floats, ints)
        )
        return super().__new__(cls, scale, count, tolerated, steps, growth, low, high, overflows)

    def scale(self, loss: ArrayLike) -> jax.Array:
        """``loss * loss_scale``, in float32 or wider: a 16-bit loss is widened first."""
        loss = jnp.asarray(loss)
        wide = loss.astype(slot_dtype(loss.dtype))
        return wide * self.loss_scale.astype(wide.dtype)

    def value_and_grad(
        self, fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
    ) -> Callable[..., tuple[Any, Any]]:
        """`jax.value_and_grad` of the scaled loss: the loss as `fun` gives it, and gradients times `loss_scale`."""

        def scaled(*args, **kwargs):
            out = fun(*args, **kwargs)
            loss = out[0] if has_aux else out
            return self.scale(loss), out

        differentiated = jax.grad(scaled, argnums, has_aux=True)

        def value_and_grad(*args, **kwargs):
            grads, out = differentiated(*args, **kwargs)
            return out, grads

        return value_and_grad

    def update(self, has_nan: Flag) -> DynamicLossScale:
        """The scale of the next step.

        Args:
          has_nan: 0-d, nonzero if this step's gradients were not finite: ``state.skipped``.
        """
        bad = callers_flag(has_nan)
        one, zero = np.int32(1), np.int32(0)
        counter = jnp.where(bad, zero, self.counter + one)
        grows = counter >= self.period
        shrinks = bad & (self.left <= one)
        larger = jnp.minimum(self.loss_scale * self.factor, self.max_loss_scale)
        smaller = jnp.maximum(self.loss_scale / self.factor, self.min_loss_scale)
        left = jnp.where(grows, self.hysteresis, jnp.where(bad, jnp.maximum(self.left - one, one), self.left))
        return self._replace(
            # A scale above its maximum, or below its minimum, given so by the caller, moves only the other way.
            loss_scale=jnp.where(
                shrinks,
                jnp.minimum(smaller, self.loss_scale),
                jnp.where(grows, jnp.maximum(larger, self.loss_scale), self.loss_scale),
            ),
            counter=jnp.where(grows, zero, counter),
            left=left,
        )


def _check(name: str, value: Any, ok: Callable[[Any], bool], expected: str) -> None:
    if isinstance(value, (int, float, np.number)) and not ok(value):
        raise ValueError(f"`{name}`: expected {expected}, got {value!r}")


def _array(x: Any, dtype: Any) -> Any:
    # Transformations put anything where arrays go; only numbers are ours to convert.
    return jnp.asarray(x, dtype) if isinstance(x, (int, float, np.number, np.ndarray)) else x
