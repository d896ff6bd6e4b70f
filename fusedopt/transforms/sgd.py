"""SGD, with momentum or Nesterov momentum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusedopt.factory import Backend, Options, build, check_static
from fusedopt.grouping import Group
from fusedopt.hyperparams import Hyperparam, decay_rate
from fusedopt.layout import Packing
from fusedopt.rules import Sgd
from fusedopt.transformation import FusedTransformation


def sgd(
    learning_rate: Any,
    momentum: Any = None,
    nesterov: bool = False,
    accumulator_dtype: Any = None,
    *,
    weight_decay: Any = 0.0,
    mask: Any = None,
    groups: Sequence[Group] = (),
    packing: Packing | None = None,
    backend: Backend | None = None,
    skip_nonfinite: bool = True,
    master_weights: bool = False,
    ema_decay: Any = None,
    ema_debias: bool = False,
    clip_norm: Any = None,
    accumulate: int | None = None,
) -> FusedTransformation:
    """SGD, with momentum or Nesterov momentum, and decoupled weight decay.

        m = momentum*m + g
        d = g | m | g + momentum*m              plain | momentum | nesterov
        w = w - learning_rate*(d + weight_decay*w)

    Args:
      learning_rate: lr, a hyperparameter >= 0.
      momentum: None for none (no state), or a hyperparameter in [0, 1].
      nesterov: static; needs `momentum`, as in optax it is ignored without.
      accumulator_dtype: dtype of m; None: float32, float64 for float64 parameters.
      weight_decay: a hyperparameter >= 0. The Python number 0 removes decay from the program, and
        `params` may then be left out of ``update``.
      mask: None: group ``weight`` decays; or an optax mask of what decays.
      groups and what follows: see `fusedopt.transforms`.

    State: ``mu`` with momentum, else no buffer. Equal to ``optax.sgd`` without weight decay.

    Raises:
      ValueError: numbers out of range.
      TypeError: arguments of a wrong kind.
    """
    options = Options(
        groups, packing, backend, skip_nonfinite, master_weights, ema_decay, ema_debias, clip_norm, accumulate
    )
    check_static("nesterov", nesterov)
    items = [Hyperparam("learning_rate", learning_rate)]
    absent = {}
    if momentum is not None:
        items.append(decay_rate("momentum", momentum, open_high=False))
    else:
        absent["momentum"] = "this optimizer was made without momentum and holds no velocity"
    return build(
        Sgd(momentum=momentum is not None, nesterov=bool(nesterov) and momentum is not None),
        items,
        options,
        weight_decay=weight_decay,
        mask=mask,
        slot_dtypes={"mu": ("accumulator_dtype", accumulator_dtype)},
        absent=absent,
    )
