"""Adam and AdamW."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from fusedopt.factory import Backend, Options, build, check_static
from fusedopt.grouping import Group, is_python_zero
from fusedopt.hyperparams import Hyperparam, decay_rate, is_number
from fusedopt.layout import Packing
from fusedopt.rules import Adam
from fusedopt.transformation import FusedTransformation


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
    master_weights: bool = False,
    ema_decay: Any = None,
    ema_debias: bool = False,
    clip_norm: Any = None,
    accumulate: int | None = None,
) -> FusedTransformation:
    """Adam; `weight_decay` is the original L2 penalty, added to the gradient.

        g = g + weight_decay*w
        m = b1*m + (1-b1)*g
        v = b2*v + (1-b2)*g*g
        w = w - learning_rate*(m/(1-b1^t)) / (sqrt(v/(1-b2^t) + eps_root) + eps)

    Arguments, state, `nesterov`, `eps_inside` and what is raised are those of `adamw`. Here the Python
    number 0 for `weight_decay` removes decay from the program, and ``update`` needs no `params`.
    Equal to ``optax.adam``.
    """
    options = Options(
        groups, packing, backend, skip_nonfinite, master_weights, ema_decay, ema_debias, clip_norm, accumulate
    )
    rule = Adam(decoupled=False, **_static(nesterov=nesterov, eps_inside=eps_inside))
    items, absent = adam_items(learning_rate, b1, b2, eps, eps_root, eps_inside)
    slot_dtypes = adam_slots(mu_dtype, nu_dtype, b2)
    return build(
        rule,
        items,
        options,
        weight_decay=weight_decay,
        mask=mask,
        slot_dtypes=slot_dtypes,
        absent=absent,
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
    master_weights: bool = False,
    ema_decay: Any = None,
    ema_debias: bool = False,
    clip_norm: Any = None,
    accumulate: int | None = None,
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
      nesterov: static; ``m/(1-b1^t)`` becomes ``b1*m/(1-b1^(t+1)) + (1-b1)*g/(1-b1^t)``.
      eps_inside: static; the other published form,
        ``w = w - learning_rate*( sqrt(1-b2^t)/(1-b1^t) * m/sqrt(v + eps) + weight_decay*w )``.
      groups and what follows: see `fusedopt.transforms`.

    State: ``mu`` and ``nu``. Equal to ``optax.adamw(..., mask=fusedopt.weight_mask)``.

    Raises:
      ValueError: numbers out of range, or `eps_inside` with `nesterov` or `eps_root`.
      TypeError: arguments of a wrong kind.
    """
    options = Options(
        groups, packing, backend, skip_nonfinite, master_weights, ema_decay, ema_debias, clip_norm, accumulate
    )
    rule = Adam(decoupled=True, **_static(nesterov=nesterov, eps_inside=eps_inside))
    items, absent = adam_items(learning_rate, b1, b2, eps, eps_root, eps_inside)
    slot_dtypes = adam_slots(mu_dtype, nu_dtype, b2)
    return build(
        rule,
        items,
        options,
        weight_decay=weight_decay,
        mask=mask,
        slot_dtypes=slot_dtypes,
        absent=absent,
        keep_decay=True,
    )


def adam_items(
    learning_rate: Any, b1: Any, b2: Any, eps: Any, eps_root: Any, eps_inside: bool = False
) -> tuple[list[Hyperparam], dict[str, str]]:
    """Adam's hyperparameters, and those that are absent, and why."""
    items = [
        Hyperparam("learning_rate", learning_rate),
        decay_rate("b1", b1),
        decay_rate("b2", b2),
        Hyperparam("eps", eps),
    ]
    if not eps_inside:
        return [*items, Hyperparam("eps_root", eps_root)], {}
    if is_python_zero(eps_root):
        return items, {"eps_root": "`eps_inside` has no `eps_root`"}
    raise ValueError(
        f"`eps_inside` has no `eps_root`: expected the Python number 0, got {eps_root!r}; under "
        "optax.inject_hyperparams name `eps_root` in `static_args`"
    )


def adam_slots(mu_dtype: Any, nu_dtype: Any, b2: Any) -> dict[str, tuple[str, Any]]:
    """The dtypes of Adam's slots as asked for; warns where a second moment of 16 bits is known to stand still."""
    if nu_dtype is not None and is_number(b2) and b2 >= 0.99 and jnp.dtype(nu_dtype).itemsize < 4:
        warnings.warn(
            f"`nu_dtype`={jnp.dtype(nu_dtype).name} with b2={b2}: a step changes nu by less than its rounding, so that it stops "
            "moving (and float16 takes squares below 6e-8 for 0); leave `nu_dtype` at float32, or take b2 < 0.99",
            stacklevel=3,
        )
    return {"mu": ("mu_dtype", mu_dtype), "nu": ("nu_dtype", nu_dtype)}


def _static(**flags: Any) -> dict[str, bool]:
    for name, value in flags.items():
        check_static(name, value)
    return {name: bool(value) for name, value in flags.items()}
