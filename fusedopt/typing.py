"""The types of public signatures: what an editor shows, and what a type checker holds callers to.

They are coarser than the checks at run time, which look at shapes and ranges: a `Scalar` may be of any shape here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeVar

import jax
import numpy as np
from jax.typing import ArrayLike

PyTree: TypeAlias = Any
"""A pytree of arrays, or `FlatParams`, which are one."""

Scalar: TypeAlias = float | np.number | np.ndarray | jax.Array
"""A number, or a 0-d array or tracer."""

Flag: TypeAlias = bool | np.bool_ | Scalar
"""Anything 0-d: nonzero means yes."""

Schedule: TypeAlias = Callable[[jax.Array], ArrayLike]
"""``count -> value``: int32 [] -> a number or a 0-d array."""

ScalarOrSchedule: TypeAlias = Scalar | Schedule
"""A hyperparameter."""

Mask: TypeAlias = Callable[[PyTree], PyTree] | PyTree
"""An optax mask: a tree of Python bools that is shaped like the parameters or a prefix of them, or a function of the
parameters that gives one."""

State = TypeVar("State")
Params = TypeVar("Params")
State_co = TypeVar("State_co", covariant=True)


class Init(Protocol[State_co]):
    """The type of ``tx.init``."""

    def __call__(self, params: PyTree) -> State_co:
        """The state of fresh parameters.

        Args:
          params: a tree of arrays or of abstract values, or `FlatParams`.
        """
        ...


class Update(Protocol[State]):
    """The type of ``tx.update``."""

    def __call__(
        self,
        updates: PyTree,
        state: State,
        params: PyTree | None = None,
        *,
        loss_scale: Scalar | None = None,
        has_nan: Flag | None = None,
        **extra: Any,
    ) -> tuple[Any, State]:
        """``(updates, state)``: one step in the protocol of optax, for `optax.apply_updates`.

        Args:
          updates: the gradients: a tree, or `FlatParams`.
          state: of the step before.
          params: the parameters, like the gradients; None where the optimizer needs none.
          loss_scale: what the gradients are divided by; 0 counts as 1, inf and NaN skip the step.
          has_nan: 0-d; nonzero skips the step.
          **extra: hyperparameters of this step, such as ``learning_rate=0.1``; other names are ignored, as optax asks.
        """
        ...


class Apply(Protocol[State]):
    """The type of ``tx.apply``."""

    def __call__(
        self,
        grads: PyTree,
        state: State,
        params: Params,
        *,
        loss_scale: Scalar | None = None,
        has_nan: Flag | None = None,
        **extra: Any,
    ) -> tuple[Params, State]:
        """``(params, state)`` after one step; in place where a jitted function around it donates them.

        Args:
          grads: the gradients: a tree, or `FlatParams`.
          state: of the step before.
          params: the parameters, like the gradients.
          loss_scale: what the gradients are divided by; 0 counts as 1, inf and NaN skip the step.
          has_nan: 0-d; nonzero skips the step.
          **extra: hyperparameters of this step, such as ``learning_rate=0.1``; other names are ignored, as optax asks.
        """
        ...
