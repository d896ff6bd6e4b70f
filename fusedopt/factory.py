"""From a factory's arguments to an optimizer: the checks and defaults that all factories share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fusedopt.grouping import Group, is_callable_mask, is_python_zero, takes
from fusedopt.hyperparams import Hyperparam, Hyperparams, decay_rate
from fusedopt.layout import Packing
from fusedopt.optimizer import Optimizer
from fusedopt.paths import type_of
from fusedopt.rules import Rule
from fusedopt.transformation import FusedTransformation, fused


@dataclasses.dataclass(frozen=True)
class Options:
    """What all factories take, keyword-only; explained in `fusedopt.transforms`."""

    groups: Any
    packing: Any
    backend: Any
    skip_nonfinite: Any
    master_weights: Any
    ema_decay: Any
    ema_debias: Any
    clip_norm: Any
    accumulate: Any


def build(
    rule: Rule,
    items: Sequence[Hyperparam],
    options: Options,
    *,
    weight_decay: Any,
    mask: Any,
    plain_rule: Rule | None = None,
    trust_mask: Any = None,
    bias_trust: bool = False,
    mask_argument: str = "mask",
    slot_dtypes: Mapping[str, tuple[str, Any]] | None = None,
    absent: Mapping[str, str] | None = None,
    keep_decay: bool = False,
) -> FusedTransformation:
    """An optimizer from its rule, its hyperparameters and the common options.

    Args:
      rule, plain_rule: for leaves with and without a trust ratio; one rule by default.
      items: the hyperparameters but for weight decay and those of options and groups.
      bias_trust: see `Optimizer`.
      keep_decay: weight_decay is an operand even if it is the Python number 0.
      absent: hyperparameters that this choice of static options has removed, and why.
      mask_argument: what the factory calls `mask`.
      slot_dtypes: slot -> (name of the argument, its value).
    """
    items, absent = list(items), dict(absent or {})
    decays = keep_decay or not is_python_zero(weight_decay)
    if decays:
        items.append(Hyperparam("weight_decay", weight_decay))
    else:
        absent["weight_decay"] = (
            "this optimizer was made with weight_decay=0, which removes decay from the program; "
            "make it with weight_decay=jnp.float32(0.0) to change it later"
        )
    for name in ("skip_nonfinite", "master_weights", "ema_debias"):
        check_static(name, getattr(options, name))
    _check_mask(mask_argument, mask)
    _check_mask("trust_ratio_mask", trust_mask)
    if options.packing is not None and not isinstance(options.packing, Packing):
        raise TypeError(f"`packing`: expected a Packing, got {type(options.packing).__name__}")
    if options.backend not in (None, "xla", "mosaic", "triton"):
        raise ValueError(f"`backend`: expected 'xla', 'mosaic', 'triton' or None, got {options.backend!r}")
    if options.ema_decay is not None:
        items.append(decay_rate("ema_decay", options.ema_decay))
    elif options.ema_debias:
        raise ValueError("`ema_debias`: expected an `ema_decay` with it, such as 0.999, got None")
    else:
        absent["ema_decay"] = "this optimizer was made without it and keeps no average; make it with `ema_decay`"
    if options.clip_norm is not None:
        items.append(Hyperparam("clip_norm", options.clip_norm))
    else:
        absent["clip_norm"] = (
            "this optimizer was made without it and takes no norm; clip_norm=jnp.float32(jnp.inf) clips nothing"
        )
    groups = _checked_groups(options.groups)
    for g in groups:
        if g.weight_decay is not None:
            items.append(Hyperparam(f"weight_decay/{g.name}", g.weight_decay))
        if not (isinstance(g.learning_rate_scale, (int, float)) and g.learning_rate_scale == 1):
            items.append(Hyperparam(f"learning_rate_scale/{g.name}", g.learning_rate_scale))
    return fused(
        Optimizer(
            rule=rule,
            plain_rule=plain_rule or rule,
            hyperparams=Hyperparams(tuple(items), absent),
            decays=decays,
            groups=groups,
            decay_mask=mask,
            trust_mask=trust_mask,
            bias_trust=bias_trust,
            mask_argument=mask_argument,
            packing=options.packing or Packing(),
            backend=options.backend,
            skip_nonfinite=bool(options.skip_nonfinite),
            masters=bool(options.master_weights),
            ema_debias=bool(options.ema_debias),
            accumulate=1 if options.accumulate is None else _positive_int("accumulate", options.accumulate),
            slot_dtypes={
                slot: _float_dtype(*given) for slot, given in (slot_dtypes or {}).items() if given[1] is not None
            },
        )
    )


def _positive_int(argument: str, value: Any) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(
            f"`{argument}` is static: expected a positive int, got {type_of(value)}; under "
            "optax.inject_hyperparams name it in `static_args`"
        )
    if value < 1:
        raise ValueError(f"`{argument}`: expected a positive int, got {value}")
    return int(value)


def _float_dtype(argument: str, value: Any) -> Any:
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"`{argument}`: expected a floating point dtype or None, got {value!r}")
    return dtype


def _checked_groups(groups: Any) -> tuple[Group, ...]:
    if isinstance(groups, (jax.Array, np.ndarray)):
        raise TypeError(
            "`groups` arrive as an array: they are static; under optax.inject_hyperparams name them in `static_args`"
        )
    if isinstance(groups, Group):
        raise TypeError("`groups`: expected a sequence of Group objects, got one Group: write [group]")
    if not isinstance(groups, Iterable):
        raise TypeError(f"`groups`: expected a sequence of Group objects, got {type(groups).__name__}")
    groups = tuple(groups)
    for g in groups:
        if not isinstance(g, Group):
            raise TypeError(f"`groups`: expected Group objects, got {type(g).__name__}")
    names = [g.name for g in groups]
    if len(set(names)) != len(names):
        raise ValueError(f"`groups`: names must differ, got {names}")
    return groups


def check_static(name: str, value: Any) -> None:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(
            f"`{name}` is static: expected True or False, got {type_of(value)}; under "
            "optax.inject_hyperparams name it in `static_args`"
        )


def _check_mask(name: str, mask: Any) -> None:
    if isinstance(mask, (jax.Array, np.ndarray)):
        raise TypeError(
            f"`{name}` arrives as an array: a mask is static (a tree of Python bools, or a "
            "function of the parameters that gives one); under optax.inject_hyperparams name it "
            "in `static_args`"
        )
    if is_callable_mask(mask) and not takes(mask, 1):
        raise TypeError(
            f"`{name}`: expected a function of the parameters, got one that does not take one argument; a function of "
            "(path, leaf) is what `Group.match` takes"
        )
