"""Lion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusedopt.factory import Backend, Options, build
from fusedopt.grouping import Group
from fusedopt.hyperparams import Hyperparam, decay_rate
from fusedopt.layout import Packing
from fusedopt.rules import Lion
from fusedopt.transformation import FusedTransformation


def lion(
    learning_rate: Any,
    b1: Any = 0.9,
    b2: Any = 0.99,
    mu_dtype: Any = None,
    weight_decay: Any = 1e-3,
    mask: Any = None,
    *,
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
    """Lion: the sign of an interpolated momentum, with decoupled weight decay.

        d = sign(b1*m + (1-b1)*g)
        m = b2*m + (1-b2)*g
        w = w - learning_rate*(d + weight_decay*w)

    Args:
      learning_rate: a hyperparameter >= 0; three to ten times smaller than AdamW's.
      b1, b2: decays of what the sign is taken of, and of m; hyperparameters in [0, 1).
      mu_dtype: dtype of m; None: float32, float64 for float64 parameters.
      weight_decay: a hyperparameter >= 0.
      mask: None: group ``weight`` decays and ``bias`` does not; or an optax mask of what decays.
      groups and what follows: see `fusedopt.transforms`.

    State: ``mu``. Equal to ``optax.lion(..., mask=fusedopt.weight_mask)``.

    Raises:
      ValueError: numbers out of range.
      TypeError: arguments of a wrong kind.
    """
    options = Options(
        groups, packing, backend, skip_nonfinite, master_weights, ema_decay, ema_debias, clip_norm, accumulate
    )
    return build(
        Lion(),
        [Hyperparam("learning_rate", learning_rate), decay_rate("b1", b1), decay_rate("b2", b2)],
        options,
        slot_dtypes={"mu": ("mu_dtype", mu_dtype)},
        weight_decay=weight_decay,
        mask=mask,
        keep_decay=True,
    )
