"""What an optimizer has to say for itself."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

# x + NEGATIVE_ZERO is x for every x, also for x = -0.0; x + 0.0 is not.
NEGATIVE_ZERO = np.float32(-0.0)


@dataclasses.dataclass(frozen=True)
class Rule(abc.ABC):
    """An optimizer's formula for one element, and the scalars it needs once a step.

    Symbols, the same in every rule:
      g   gradient, unscaled and clipped, float32 (float64 for float64 parameters)
      w   parameter, same dtype; None where weight decay does not apply and no ratio needs it
      u   the update: new w = w + u
      s   scalars: attributes named by `scalars`, and `s.eta`, the trust ratio, if `trust`
      m, v  slots, in the order of `slots`

    Class attributes:
      slots: names of the state's buffers, each shaped like the parameters.
      measures: slots that `measured` reads, of a rule with a trust ratio.
      squares_gradient: the formula needs g*g, so |g| > 1.8446743e19 is as bad as an infinity.
      neutral: value of each scalar for which every slot keeps its bits when g = -0.0. That is
        how a step is skipped without a branch and without a copy: see `fusedopt.guard`.
    """

    slots: ClassVar[tuple[str, ...]] = ()
    measures: ClassVar[tuple[str, ...]] = ()
    squares_gradient: ClassVar[bool] = False
    trust: ClassVar[bool] = False
    neutral: ClassVar[Mapping[str, float]] = {}

    @abc.abstractmethod
    def scalars(self, h: Mapping[str, Any], t: jax.Array) -> dict[str, jax.Array]:
        """The scalars of step t (int32, from 1), from the hyperparameters `h`."""

    @abc.abstractmethod
    def formula(self, s: Any, g: jax.Array, w: jax.Array | None, *slots: jax.Array) -> tuple:
        """``(u, *new_slots)``, elementwise."""

    def measured(self, s: Any, g: jax.Array, w: jax.Array, *slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        """If `trust`: the two quantities whose norms the trust ratio needs, elementwise; `slots` are `measures`."""
        raise NotImplementedError(
            f"{type(self).__name__} has a trust ratio and does not say of what: define `measured`"
        )

    def trust_ratio(self, h: Mapping[str, Any], wd: jax.Array, norms: jax.Array) -> jax.Array:
        """If `trust`: `s.eta` of each segment, shape (S,), from norms (2, S) of `measured`."""
        raise NotImplementedError(
            f"{type(self).__name__} measures norms and makes nothing of them: define `trust_ratio`"
        )


def decay_term(wd: jax.Array, w: jax.Array) -> jax.Array:
    """``wd * w``, and nothing at all where wd is 0, although w may be inf (0 * inf is NaN)."""
    return jnp.where(wd == 0, NEGATIVE_ZERO.astype(w.dtype), wd * w)
