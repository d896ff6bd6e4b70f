"""LARS."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from fusedopt.factory import Backend, Options, build, check_static
from fusedopt.grouping import Group
from fusedopt.hyperparams import Hyperparam, decay_rate
from fusedopt.layout import Packing
from fusedopt.rules import Lars, Rule, Sgd
from fusedopt.transformation import FusedTransformation


def lars(
    learning_rate: Any,
    weight_decay: Any = 0.0,
    weight_decay_mask: Any = None,
    trust_coefficient: Any = 0.001,
    eps: Any = 0.0,
    trust_ratio_mask: Any = None,
    momentum: Any = 0.9,
    nesterov: bool = False,
    *,
    trust_ratio: Literal["paper", "optax"] = "paper",
    max_trust_ratio: Any = 100.0,
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
    """LARS: a learning rate for each leaf of group ``weight``, from norms over the whole leaf.

        eta = trust_coefficient*|w| / (|g| + weight_decay*|w| + eps)
        eta = min(eta, max_trust_ratio), and 1 where |w| or |g| is below 1e-12
        m = momentum*m + learning_rate*eta*(g + weight_decay*w)
        w = w - m             nesterov: w - (momentum*m + learning_rate*eta*(g + weight_decay*w))

    Leaves without a trust ratio (group ``bias``) take SGD with (Nesterov) momentum instead.

    Args:
      learning_rate: a hyperparameter >= 0; inside the momentum, as in the paper.
      weight_decay: a hyperparameter >= 0.
      weight_decay_mask: None: group ``weight`` decays; or an optax mask of what decays.
      trust_coefficient: a hyperparameter >= 0.
      eps: added to the denominator, a hyperparameter >= 0.
      trust_ratio_mask: None: group ``weight`` has trust ratios; or an optax mask of what has.
      momentum: a hyperparameter in [0, 1].
      nesterov: static.
      trust_ratio: "paper" as above; "optax": ``eta = trust_coefficient*|w| / (|g + weight_decay*w| + eps)``, no
        cap, floors on these two norms, and leaves without a ratio take eta = 1 with the learning rate inside the
        momentum. That equals ``optax.lars`` with the same masks.
      max_trust_ratio: a hyperparameter > 0; paper form only.
      groups and what follows: see `fusedopt.transforms`.

    State: ``mu``, and ``trust_ratios``, read by ``tx.trust_ratios(state)``. Norms do not overflow
    or underflow in float32, and have the same bits in every run.

    Raises:
      ValueError: numbers out of range, or an unknown `trust_ratio`.
      TypeError: arguments of a wrong kind.
    """
    options = Options(
        groups, packing, backend, skip_nonfinite, master_weights, ema_decay, ema_debias, clip_norm, accumulate
    )
    if trust_ratio not in ("paper", "optax"):
        raise ValueError(f"`trust_ratio`: expected 'paper' or 'optax', got {trust_ratio!r}")
    check_static("nesterov", nesterov)
    items = [
        Hyperparam("learning_rate", learning_rate),
        decay_rate("momentum", momentum, open_high=False),
        Hyperparam("trust_coefficient", trust_coefficient),
        Hyperparam("eps", eps),
    ]
    absent = {}
    if trust_ratio == "paper":
        items.append(Hyperparam("max_trust_ratio", max_trust_ratio, open_low=True))
        plain: Rule = Sgd(momentum=True, nesterov=nesterov)
    else:
        absent["max_trust_ratio"] = "the form of optax has no cap"
        plain = Lars(form="optax", nesterov=nesterov, trust=False)
    return build(
        Lars(form=trust_ratio, nesterov=nesterov),
        items,
        options,
        plain_rule=plain,
        weight_decay=weight_decay,
        mask=weight_decay_mask,
        mask_argument="weight_decay_mask",
        trust_mask=trust_ratio_mask,
        absent=absent,
        keep_decay=True,
    )
