"""LAMB."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusedopt.factory import Backend, Options, build
from fusedopt.grouping import Group
from fusedopt.hyperparams import Hyperparam
from fusedopt.layout import Packing
from fusedopt.rules import Adam, Lamb
from fusedopt.transformation import FusedTransformation
from fusedopt.transforms.adam import adam_items, adam_slots


def lamb(
    learning_rate: Any,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-6,
    eps_root: Any = 0.0,
    weight_decay: Any = 0.0,
    mask: Any = None,
    *,
    trust_ratio_mask: Any = None,
    max_trust_ratio: Any = None,
    mu_dtype: Any = None,
    nu_dtype: Any = None,
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
    """LAMB: Adam's direction, as long as the parameters it moves, for each leaf.

        m = b1*m + (1-b1)*g
        v = b2*v + (1-b2)*g*g
        d = (m/(1-b1^t)) / (sqrt(v/(1-b2^t) + eps_root) + eps) + weight_decay*w
        eta = |w| / |d|,  1 where one of the norms is 0
        w = w - learning_rate*eta*d

    Args:
      learning_rate: a hyperparameter >= 0.
      b1, b2: decays of the moments, hyperparameters in [0, 1).
      eps, eps_root: added outside and inside the root, hyperparameters >= 0.
      weight_decay: a hyperparameter >= 0.
      mask: None: group ``weight`` decays and ``bias`` does not; or an optax mask of what decays.
      trust_ratio_mask: None: every leaf has a trust ratio, as in optax; or an optax mask of what has:
        ``fusedopt.weight_mask`` leaves biases and norm scales to AdamW, as the published BERT runs do.
      max_trust_ratio: None for no limit, or a hyperparameter > 0.
      mu_dtype, nu_dtype: dtypes of m and v; None: float32, float64 for float64 parameters.
      groups and what follows: see `fusedopt.transforms`.

    State: ``mu``, ``nu`` and ``trust_ratios``, read by ``tx.trust_ratios(state)``. Norms do not overflow
    or underflow in float32, and have the same bits in every run. Gradients, parameters and moments are
    read twice a step. Equal to ``optax.lamb(..., mask=fusedopt.weight_mask)``.

    Raises:
      ValueError: numbers out of range.
      TypeError: arguments of a wrong kind.
    """
    options = Options(
        groups, packing, backend, skip_nonfinite, master_weights, ema_decay, ema_debias, clip_norm, accumulate
    )
    items, absent = adam_items(learning_rate, b1, b2, eps, eps_root)
    if max_trust_ratio is not None:
        items.append(Hyperparam("max_trust_ratio", max_trust_ratio, open_low=True))
    else:
        absent["max_trust_ratio"] = "this optimizer was made without a limit"
    return build(
        Lamb(),
        items,
        options,
        plain_rule=Adam(decoupled=True),
        weight_decay=weight_decay,
        mask=mask,
        trust_mask=trust_ratio_mask,
        bias_trust=True,
        slot_dtypes=adam_slots(mu_dtype, nu_dtype, b2),
        absent=absent,
        keep_decay=True,
    )
