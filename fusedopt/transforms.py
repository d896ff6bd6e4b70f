"""The optimizers. Signatures, names and defaults are optax's, with our options behind them.

Common options, all keyword-only:
  groups: sequence of `Group`: leaves with hyperparameters of their own; the default groups
    ``bias`` and ``weight`` stand behind them.
  packing: a `Packing`: which leaves share a buffer.
  backend: "xla", "mosaic", "triton", or None for the best one of the device.
  skip_nonfinite: skip steps whose gradients are not finite (static).
A hyperparameter is a Python number, a 0-d array or tracer, or a schedule (count -> value). It is
an operand: no value, and no change of it, compiles anything anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from fusedopt.factory import build, check_static
from fusedopt.grouping import Group, is_python_zero
from fusedopt.hyperparams import Hyperparam, decay_rate
from fusedopt.layout import Packing
from fusedopt.rules import Adam, Lars, Lion, Rule, Sgd
from fusedopt.transformation import FusedTransformation

Backend = Literal["xla", "mosaic", "triton"]


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
      groups, packing, backend, skip_nonfinite: see the module's docstring.

    State: ``mu`` with momentum, else no buffer. Equal to ``optax.sgd`` without weight decay.

    Raises: ValueError for numbers out of range, TypeError for arguments of a wrong kind.
    """
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
        weight_decay=weight_decay,
        mask=mask,
        groups=groups,
        packing=packing,
        backend=backend,
        skip_nonfinite=skip_nonfinite,
        slot_dtypes={"mu": ("accumulator_dtype", accumulator_dtype)},
        absent=absent,
    )


def adam(
    learning_rate: Any,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    eps_root: Any = 0.0,
    mu_dtype: Any = None,
    *,
    nesterov: bool = False,
    weight_decay: Any = 0.0,
    mask: Any = None,
    nu_dtype: Any = None,
    eps_inside: bool = False,
    groups: Sequence[Group] = (),
    packing: Packing | None = None,
    backend: Backend | None = None,
    skip_nonfinite: bool = True,
) -> FusedTransformation:
    """Adam; `weight_decay` is the original L2 penalty, added to the gradient.

        g = g + weight_decay*w
        m = b1*m + (1-b1)*g
        v = b2*v + (1-b2)*g*g
        w = w - learning_rate*(m/(1-b1^t)) / (sqrt(v/(1-b2^t) + eps_root) + eps)

    See `adamw` for the arguments and for `nesterov` and `eps_inside`. Here the Python number 0
    for `weight_decay` removes decay from the program, and ``update`` needs no `params`.
    Equal to ``optax.adam``.
    """
    return _adam(
        [Hyperparam("learning_rate", learning_rate), decay_rate("b1", b1), decay_rate("b2", b2), Hyperparam("eps", eps)],
        decoupled=False,
        nesterov=nesterov,
        eps_inside=eps_inside,
        eps_root=eps_root,
        slot_dtypes={"mu": ("mu_dtype", mu_dtype), "nu": ("nu_dtype", nu_dtype)},
        weight_decay=weight_decay,
        mask=mask,
        groups=groups,
        packing=packing,
        backend=backend,
        skip_nonfinite=skip_nonfinite,
    )


def adamw(
    learning_rate: Any,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    eps_root: Any = 0.0,
    mu_dtype: Any = None,
    weight_decay: Any = 1e-4,
    mask: Any = None,
    *,
    nesterov: bool = False,
    nu_dtype: Any = None,
    eps_inside: bool = False,
    groups: Sequence[Group] = (),
    packing: Packing | None = None,
    backend: Backend | None = None,
    skip_nonfinite: bool = True,
) -> FusedTransformation:
    """Adam with decoupled weight decay.

        m = b1*m + (1-b1)*g
        v = b2*v + (1-b2)*g*g
        w = w - learning_rate*( (m/(1-b1^t)) / (sqrt(v/(1-b2^t) + eps_root) + eps)
                                + weight_decay*w )

    Args:
      learning_rate: a hyperparameter >= 0.
      b1, b2: decays of the moments, hyperparameters in [0, 1).
      eps: added outside the root, a hyperparameter >= 0. Where the whole denominator is 0 the
        update is 0.
      eps_root: added inside the root, a hyperparameter >= 0; > 0 for gradients through the step.
      mu_dtype, nu_dtype: dtypes of m and v; None: float32, float64 for float64 parameters.
      weight_decay: a hyperparameter >= 0.
      mask: None: group ``weight`` decays and ``bias`` does not; or an optax mask of what decays.
      nesterov: static; m/(1-b1^t) becomes b1*m/(1-b1^(t+1)) + (1-b1)*g/(1-b1^t).
      eps_inside: static; the other published form,
        w - (learning_rate*sqrt(1-b2^t)/(1-b1^t) * m/sqrt(v + eps) + learning_rate*weight_decay*w).
      groups, packing, backend, skip_nonfinite: see the module's docstring.

    State: ``mu`` and ``nu``. Equal to ``optax.adamw(..., mask=fusedopt.weight_mask)``.

    Raises: ValueError for numbers out of range, and for `eps_inside` with `nesterov` or
    `eps_root`; TypeError for arguments of a wrong kind.
    """
    return _adam(
        [Hyperparam("learning_rate", learning_rate), decay_rate("b1", b1), decay_rate("b2", b2), Hyperparam("eps", eps)],
        decoupled=True,
        nesterov=nesterov,
        eps_inside=eps_inside,
        eps_root=eps_root,
        slot_dtypes={"mu": ("mu_dtype", mu_dtype), "nu": ("nu_dtype", nu_dtype)},
        weight_decay=weight_decay,
        mask=mask,
        groups=groups,
        packing=packing,
        backend=backend,
        skip_nonfinite=skip_nonfinite,
    )


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
      trust_ratio: "paper" as above; "optax": eta = trust_coefficient*|w| / (|g + weight_decay*w|
        + eps), no cap, floors on these two norms, and leaves without a ratio take eta = 1 with
        the learning rate inside the momentum. That equals ``optax.lars`` with the same masks.
      max_trust_ratio: a hyperparameter > 0; paper form only.
      groups, packing, backend, skip_nonfinite: see the module's docstring.

    State: ``mu``, and ``trust_ratios``, read by ``tx.trust_ratios(state)``. Norms do not overflow
    or underflow in float32, and have the same bits in every run.

    Raises: ValueError for numbers out of range or an unknown `trust_ratio`; TypeError for
    arguments of a wrong kind.
    """
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
        plain_rule=plain,
        weight_decay=weight_decay,
        mask=weight_decay_mask,
        groups=groups,
        packing=packing,
        backend=backend,
        skip_nonfinite=skip_nonfinite,
        mask_argument="weight_decay_mask",
        trust_mask=trust_ratio_mask,
        absent=absent,
        keep_decay=True,
    )


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
      groups, packing, backend, skip_nonfinite: see the module's docstring.

    State: ``mu``. Equal to ``optax.lion(..., mask=fusedopt.weight_mask)``.

    Raises: ValueError for numbers out of range, TypeError for arguments of a wrong kind.
    """
    return build(
        Lion(),
        [Hyperparam("learning_rate", learning_rate), decay_rate("b1", b1), decay_rate("b2", b2)],
        slot_dtypes={"mu": ("mu_dtype", mu_dtype)},
        weight_decay=weight_decay,
        mask=mask,
        groups=groups,
        packing=packing,
        backend=backend,
        skip_nonfinite=skip_nonfinite,
        keep_decay=True,
    )


def _adam(
    items: list[Hyperparam],
    *,
    decoupled: bool,
    nesterov: bool,
    eps_inside: bool,
    eps_root: Any,
    **options: Any,
) -> FusedTransformation:
    """What `adam` and `adamw` share: all but where the weight decay goes."""
    check_static("nesterov", nesterov)
    check_static("eps_inside", eps_inside)
    rule = Adam(decoupled=decoupled, nesterov=nesterov, eps_inside=eps_inside)
    absent = {}
    if not eps_inside:
        items = [*items, Hyperparam("eps_root", eps_root)]
    elif is_python_zero(eps_root):
        absent["eps_root"] = "`eps_inside` has no `eps_root`"
    else:
        raise ValueError(
            f"`eps_inside` has no `eps_root`: expected the Python number 0, got {eps_root!r}; under "
            "optax.inject_hyperparams name `eps_root` in `static_args`"
        )
    return build(rule, items, keep_decay=decoupled, absent=absent, **options)
