"""Hyperparameters as operands.

All hyperparameters of an optimizer live in one small vector in its state: one leaf to dispatch,
and a number that is an operand never recompiles anything. Decays (b1, b2, momentum) are stored
as their complement ``1 - b``, taken in float64 from Python floats: 1 - 0.999 keeps all its digits.

For each hyperparameter the value of a step is the first of
  1. the keyword of this ``update``/``apply`` call (this step only, not stored),
  2. the schedule given to the factory, at the state's count,
  3. the array or tracer given to the factory,
  4. the state's own value, seeded at ``init`` from the factory's Python number.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Decay(NamedTuple):
    """A decay rate b and its complement 1 - b, each to full precision."""

    keep: jax.Array
    complement: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Hyperparam:
    """One hyperparameter: its name, the factory's value, and the range of Python constants."""

    name: str
    value: Any  # Python number, 0-d array or tracer, or a schedule: count -> value
    low: float = 0.0
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    decay: bool = False

    def __post_init__(self):
        check(self, self.value)

    @property
    def is_schedule(self) -> bool:
        return callable(self.value)

    @property
    def is_constant(self) -> bool:
        return is_number(self.value)


def is_number(value: Any) -> bool:
    """A Python or NumPy scalar: known now, hence checked and seeded, never traced."""
    return isinstance(value, (bool, int, float, np.generic))


def check(h: Hyperparam, value: Any) -> None:
    """Range of constants, rank and dtype of arrays; schedules are checked when they are called.

    Raises:
      ValueError: a constant out of range, or an array that is not 0-d.
      TypeError: no number, array or schedule; or a decay in 16 bits, which cannot hold 0.999.
    """
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"`{h.name}`: expected a number, a 0-d array or a schedule, got {value!r}")
    if is_number(value):
        number = float(value)
        above = number > h.low if h.open_low else number >= h.low
        below = number < h.high if h.open_high else number <= h.high
        if not (above and below and math.isfinite(number)):
            left, right = "(" if h.open_low else "[", ")" if h.open_high or h.high == math.inf else "]"
            raise ValueError(f"`{h.name}`: expected a number in {left}{h.low:g}, {h.high:g}{right}, got {value!r}")
        return
    if callable(value) and not hasattr(value, "dtype"):
        return
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is None or shape is None:
        raise TypeError(f"`{h.name}`: expected a number, a 0-d array or a schedule, got {type(value).__name__}")
    if shape != ():
        raise ValueError(f"`{h.name}`: expected a 0-d array, got shape {shape}")
    if h.decay and jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        raise TypeError(
            f"`{h.name}` arrives as {dtype}, in which 0.999 is 1.0: pass it in float32, with "
            "optax.inject_hyperparams by `hyperparam_dtype=jnp.float32`"
        )


def _given(h: Hyperparam, count: jax.Array) -> Any:
    """The factory's value at a count; what a schedule returns is checked like any other value."""
    if not h.is_schedule:
        return h.value
    value = h.value(count)
    check(h, value)
    return value


def _stored(h: Hyperparam, value: Any, dtype: Any) -> jax.Array:
    """The value as the vector holds it: the complement for decays."""
    if is_number(value):
        return jnp.asarray(np.asarray(1.0 - float(value) if h.decay else float(value)), dtype)
    value = jnp.asarray(value)
    if h.decay:
        wide = value if jnp.issubdtype(value.dtype, jnp.floating) else value.astype(dtype)
        return (jnp.ones((), wide.dtype) - wide).astype(dtype)
    return value.astype(dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class Hyperparams:
    """The hyperparameters of one optimizer, in the order of the vector.

    `absent` names those that its static options have removed, and says why: asking for one of
    them is an error, where any other unknown keyword is ignored as optax asks.
    """

    items: tuple[Hyperparam, ...]
    absent: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def names(self) -> tuple[str, ...]:
        return tuple(h.name for h in self.items)

    def init(self, dtype: Any) -> jax.Array:
        """The vector of a new state, shape ``(len(items),)``: the values of the first step."""
        count = jnp.zeros((), jnp.int32)
        return self._stack([_stored(h, _given(h, count), dtype) for h in self.items], dtype)

    def resolve(
        self, vector: jax.Array, count: jax.Array, overrides: Mapping[str, Any]
    ) -> tuple[dict[str, Any], jax.Array]:
        """Values of this step by name (`Decay` pairs for decays), and the vector to store."""
        for name, why in self.absent.items():
            if overrides.get(name) is not None:
                raise ValueError(f"`{name}` cannot be set: {why}")
        dtype, values, stored = vector.dtype, {}, []
        for i, h in enumerate(self.items):
            own = vector[i] if h.is_constant else _stored(h, _given(h, count), dtype)
            stored.append(own)
            override = overrides.get(h.name)
            if override is not None:
                if callable(override) and not hasattr(override, "dtype"):
                    raise TypeError(
                        f"`{h.name}`: a keyword of one step is a number or a 0-d array, got a function: give schedules to the "
                        "factory"
                    )
                check(h, override)
                own = _stored(h, override, dtype)
            values[h.name] = Decay(jnp.ones((), dtype) - own, own) if h.decay else own
        if all(h.is_constant for h in self.items):
            return values, vector
        return values, self._stack(stored, dtype)

    def read(self, vector: jax.Array) -> dict[str, jax.Array]:
        """The values by name; leading axes (a state made under vmap) are kept."""
        one = jnp.ones((), vector.dtype)
        return {h.name: one - vector[..., i] if h.decay else vector[..., i] for i, h in enumerate(self.items)}

    def replace(self, vector: jax.Array, values: Mapping[str, Any]) -> jax.Array:
        """The vector with some values replaced.

        Raises:
          ValueError: unknown name, a constant out of range, or a hyperparameter that a schedule
            or an array of the factory would overwrite at the next step.
        """
        by_name = {h.name: i for i, h in enumerate(self.items)}
        for name, value in values.items():
            if name in self.absent:
                raise ValueError(f"`{name}` cannot be set: {self.absent[name]}")
            if name not in by_name:
                raise ValueError(f"unknown hyperparameter `{name}`: expected one of {', '.join(by_name)}")
            h = self.items[by_name[name]]
            if not h.is_constant:
                kind = "a schedule" if h.is_schedule else "an array"
                raise ValueError(
                    f"`{name}` was given to the factory as {kind}, which decides its value at "
                    f"every step: pass `{name}=` to update or apply instead"
                )
            if getattr(value, "shape", ()) != vector.shape[:-1] or not vector.shape[:-1]:
                check(h, value)  # one number for all; with leading axes also one for each
            # No scatter: over an Explicit mesh it takes no value that is not placed there.
            chosen = np.broadcast_to(np.arange(len(by_name)) == by_name[name], vector.shape)
            stored = _stored(h, value, vector.dtype)
            vector = jnp.where(chosen, jnp.broadcast_to(stored[..., None], vector.shape), vector)
        return vector

    @staticmethod
    def _stack(values: list[jax.Array], dtype: Any) -> jax.Array:
        return jnp.stack(values) if values else jnp.zeros((0,), dtype)


def bias_correction(decay: Decay, t: jax.Array) -> jax.Array:
    """``1 - b**t`` to 2e-7 relative in float32, for any t >= 1 (0-d, the dtype of `decay`).

    Computed as ``-expm1(t * log1p(-(1-b)))``: ``1 - b**t`` itself loses all digits when b is
    close to 1. The series below serve where float32 `log1p` and `expm1` are a few ulp off; each
    is written as its first term and the rest, so that it rounds once.
    """
    c = decay.complement
    t = t.astype(c.dtype)
    if c.dtype != jnp.float32:
        return -jnp.expm1(t * jnp.log1p(-c))
    tail = jnp.zeros_like(c)
    for k in range(10, 1, -1):  # c/2 + c**2/3 + ...: log1p(-c) = -(c + c*tail), the error below 0.125**10 / 11
        tail = c * (np.float32(1 / k) + tail)
    log = jnp.where(c <= 0.125, -(c + c * tail), jnp.log1p(-c))
    x = t * log
    # The series must not overflow where it is not used either: its derivative would be 0 * inf.
    near = jnp.where(x >= -0.5, x, jnp.zeros_like(x))
    tail = jnp.zeros_like(x)
    for k in range(10, 1, -1):  # x/2! + x**2/3! + ...: expm1(x) = x + x*tail
        tail = near * (np.float32(1) + tail) / np.float32(k)
    return -jnp.where(x >= -0.5, near + near * tail, jnp.expm1(x))


HyperparamFactory = Callable[..., Hyperparam]


def decay_rate(name: str, value: Any, *, open_high: bool = True) -> Hyperparam:
    """A decay rate in [0, 1), or [0, 1] with ``open_high=False``."""
    return Hyperparam(name, value, high=1.0, open_high=open_high, decay=True)
