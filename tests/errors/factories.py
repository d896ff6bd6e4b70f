"""Mistakes at the construction of an optimizer, of its groups, schedules and packing."""

import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fusedopt
from fusedopt import Group, Packing
from tests.errors.table import Row


def nothing(path, leaf):
    return False


def without_flax():
    with mock.patch.dict(sys.modules, {"flax": None}):
        return fusedopt.TrainState


ROWS = [
    # Names.
    Row("no-such-name", lambda: fusedopt.adamW, AttributeError, "module 'fusedopt' has no attribute 'adamW'"),
    Row(
        "no-flax",
        without_flax,
        ImportError,
        "fusedopt.TrainState needs Flax, which is not installed: install the extra, pip install 'fusedopt[flax]'",
    ),
    # Hyperparameters.
    Row(
        "hyperparameter-bool",
        lambda: fusedopt.adamw(True),
        TypeError,
        "`learning_rate`: expected a number, a 0-d array or a schedule, got True",
    ),
    Row(
        "hyperparameter-string",
        lambda: fusedopt.adamw("0.1"),
        TypeError,
        "`learning_rate`: expected a number, a 0-d array or a schedule, got str",
    ),
    Row(
        "hyperparameter-range",
        lambda: fusedopt.adamw(0.1, b2=1.0),
        ValueError,
        "`b2`: expected a number in [0, 1), got 1.0",
    ),
    Row(
        "hyperparameter-open-range",
        lambda: fusedopt.lars(0.1, max_trust_ratio=0),
        ValueError,
        "`max_trust_ratio`: expected a number in (0, inf), got 0",
    ),
    Row(
        "hyperparameter-shape",
        lambda: fusedopt.sgd(jnp.ones(2)),
        ValueError,
        "`learning_rate`: expected a 0-d array, got shape (2,)",
    ),
    Row(
        "hyperparameter-16-bits",
        lambda: fusedopt.adam(0.1, b1=jnp.bfloat16(0.9)),
        TypeError,
        "`b1` arrives as bfloat16, in which 0.999 is 1.0: pass it in float32, with optax.inject_hyperparams "
        "by `hyperparam_dtype=jnp.float32`",
    ),
    Row(
        "schedule-shape",
        lambda: fusedopt.sgd(lambda t: jnp.ones(1)).init({"w": jnp.ones(2)}),
        ValueError,
        "`learning_rate`: expected a 0-d array, got shape (1,)",
    ),
    Row(
        "eps-inside-nesterov",
        lambda: fusedopt.adamw(0.1, eps_inside=True, nesterov=True),
        ValueError,
        "`eps_inside`: expected False with `nesterov`=True, got True; there is no published form of both",
    ),
    Row(
        "eps-inside-eps-root",
        lambda: fusedopt.adamw(0.1, eps_inside=True, eps_root=1e-8),
        ValueError,
        "`eps_inside` has no `eps_root`: expected the Python number 0, got 1e-08; under "
        "optax.inject_hyperparams name `eps_root` in `static_args`",
    ),
    Row(
        "trust-ratio-form",
        lambda: fusedopt.lars(0.1, trust_ratio="apex"),
        ValueError,
        "`trust_ratio`: expected 'paper' or 'optax', got 'apex'",
    ),
    Row(
        "debias-without-average",
        lambda: fusedopt.sgd(0.1, ema_debias=True),
        ValueError,
        "`ema_debias`: expected an `ema_decay` with it, such as 0.999, got None",
    ),
    # What is static.
    Row(
        "static-flag",
        lambda: fusedopt.sgd(0.1, nesterov=jnp.bool_(True)),
        TypeError,
        "`nesterov` is static: expected True or False, got a jax.Array; under optax.inject_hyperparams name "
        "it in `static_args`",
    ),
    Row(
        "static-traced",
        lambda: jax.jit(lambda x: fusedopt.sgd(0.1, nesterov=x))(True),
        TypeError,
        "`nesterov` is static: expected True or False, got a tracer; under optax.inject_hyperparams name it "
        "in `static_args`",
    ),
    Row(
        "static-int",
        lambda: fusedopt.sgd(0.1, accumulate=2.0),
        TypeError,
        "`accumulate` is static: expected a positive int, got float; under optax.inject_hyperparams name it "
        "in `static_args`",
    ),
    Row(
        "static-int-range",
        lambda: fusedopt.sgd(0.1, accumulate=0),
        ValueError,
        "`accumulate`: expected a positive int, got 0",
    ),
    Row(
        "dtype",
        lambda: fusedopt.adam(0.1, mu_dtype="floot"),
        TypeError,
        "`mu_dtype`: expected a floating point dtype or None, got 'floot'",
    ),
    Row(
        "dtype-int",
        lambda: fusedopt.adam(0.1, nu_dtype=jnp.int32),
        TypeError,
        "`nu_dtype`: expected a floating point dtype or None, got …",
    ),
    Row("packing", lambda: fusedopt.sgd(0.1, packing=512), TypeError, "`packing`: expected a Packing, got int"),
    Row(
        "backend",
        lambda: fusedopt.sgd(0.1, backend="cuda"),
        ValueError,
        "`backend`: expected 'xla', 'mosaic', 'triton' or None, got 'cuda'",
    ),
    Row(
        "mask-array",
        lambda: fusedopt.adamw(0.1, mask=jnp.ones(2)),
        TypeError,
        "`mask` arrives as an array: a mask is static (a tree of Python bools, or a function of the "
        "parameters that gives one); under optax.inject_hyperparams name it in `static_args`",
    ),
    # Groups.
    Row(
        "groups-array",
        lambda: fusedopt.sgd(0.1, groups=jnp.ones(2)),
        TypeError,
        "`groups` arrive as an array: they are static; under optax.inject_hyperparams name them in `static_args`",
    ),
    Row(
        "groups-one",
        lambda: fusedopt.sgd(0.1, groups=Group("h", nothing)),
        TypeError,
        "`groups`: expected a sequence of Group objects, got one Group: write [group]",
    ),
    Row(
        "groups-none",
        lambda: fusedopt.sgd(0.1, groups=None),
        TypeError,
        "`groups`: expected a sequence of Group objects, got NoneType",
    ),
    Row(
        "groups-other",
        lambda: fusedopt.sgd(0.1, groups=[{"name": "h"}]),
        TypeError,
        "`groups`: expected Group objects, got dict",
    ),
    Row(
        "groups-twice",
        lambda: fusedopt.sgd(0.1, groups=[Group("h", nothing)] * 2),
        ValueError,
        "`groups`: names must differ, got ['h', 'h']",
    ),
    Row(
        "group-match-string",
        lambda: Group("h", "head"),
        TypeError,
        "`Group.match` of group 'h': expected a function of (path, leaf) or a tree of bools, got the string "
        "'head': write lambda path, leaf: 'head' in path",
    ),
    Row(
        "group-match-arguments",
        lambda: Group("h", lambda params: True),
        TypeError,
        "`Group.match` of group 'h': expected a function of (path, leaf), got one that does not take two arguments; a function "
        "of the parameters is what `mask` takes",
    ),
    Row(
        "mask-arguments",
        lambda: fusedopt.adamw(0.1, mask=lambda path, leaf: True),
        TypeError,
        "`mask`: expected a function of the parameters, got one that does not take one argument; a function of (path, leaf) is "
        "what `Group.match` takes",
    ),
    Row(
        "group-name",
        lambda: Group("bias", nothing),
        ValueError,
        "`Group.name`: expected a name other than '', 'bias' and 'weight', got 'bias'",
    ),
    Row(
        "group-flag",
        lambda: Group("h", nothing, frozen=1),
        TypeError,
        "`Group.frozen` of group 'h' is static: expected True or False, got int",
    ),
    Row(
        "group-decay",
        lambda: fusedopt.sgd(0.1, groups=[Group("h", nothing, weight_decay=-1)]),
        ValueError,
        "`weight_decay/h`: expected a number in [0, inf), got -1",
    ),
    # Packing.
    Row("solo-from", lambda: Packing(solo_from=0), ValueError, "`solo_from`: expected None or a positive int, got 0"),
    Row(
        "align",
        lambda: Packing(align=100),
        ValueError,
        "`align`: expected a multiple of 128 that divides 1024, got 100",
    ),
    Row("shards", lambda: Packing(shards=0), ValueError, "`shards`: expected a positive int, got 0"),
    # Around optimizers.
    Row(
        "chain-last",
        lambda: fusedopt.chain(fusedopt.sgd(0.1), optax.clip(1.0)),
        TypeError,
        "`chain`: the last transformation must be fusedopt's, got GradientTransformation; those of optax go "
        "in front of it",
    ),
    Row(
        "chain-empty",
        lambda: fusedopt.chain(),
        TypeError,
        "`chain`: the last transformation must be fusedopt's, got nothing; those of optax go in front of it",
    ),
    Row(
        "chain-two",
        lambda: fusedopt.chain(fusedopt.sgd(0.1), fusedopt.sgd(0.1)),
        TypeError,
        "`chain`: a fused optimizer computes final updates, nothing may follow it; only the last "
        "transformation may be fusedopt's",
    ),
    Row(
        "chain-other",
        lambda: fusedopt.chain("clip", fusedopt.sgd(0.1)),
        TypeError,
        "`chain`: expected optax transformations, got str",
    ),
    Row(
        "warmup-order",
        lambda: fusedopt.warmup_cosine(0.1, 100, 10),
        ValueError,
        "expected 0 <= `warmup_steps` <= `total_steps` and `total_steps` >= 1, got warmup_steps=100, total_steps=10",
    ),
    Row(
        "warmup-peak",
        lambda: fusedopt.warmup_cosine(-0.1, 1, 10),
        ValueError,
        "`peak_value`: expected a finite number >= 0, got -0.1",
    ),
    Row(
        "warmup-steps",
        lambda: fusedopt.warmup_cosine(0.1, "100", 1000),
        TypeError,
        "`warmup_steps`: expected a number that is known now, got str",
    ),
    Row(
        "warmup-total",
        lambda: jax.eval_shape(lambda n: fusedopt.warmup_cosine(0.1, 100, n)(0), 1000),
        TypeError,
        "`total_steps`: expected a number that is known now, got a tracer",
    ),
    Row(
        "warmup-schedule",
        lambda: fusedopt.warmup_cosine(optax.constant_schedule(0.1), 1, 10),
        TypeError,
        "`peak_value`: expected a number or a 0-d array, got function",
    ),
    Row(
        "warmup-shape",
        lambda: fusedopt.warmup_cosine(0.1, 1, 10, end_value=jnp.zeros(3)),
        ValueError,
        "`end_value`: expected a number or a 0-d array, got shape (3,)",
    ),
    Row(
        "warmup-end",
        lambda: fusedopt.warmup_cosine(0.1, 1, 10, end_value=np.float32("inf")),
        ValueError,
        "`end_value`: expected a finite number >= 0, got np.float32(inf)",
    ),
    Row(
        "loss-scale-numpy",
        lambda: fusedopt.DynamicLossScale(hysteresis=np.int32(0)),
        ValueError,
        "`hysteresis`: expected an int >= 1, got np.int32(0)",
    ),
    Row(
        "loss-scale-factor",
        lambda: fusedopt.DynamicLossScale(factor=1.0),
        ValueError,
        "`factor`: expected a finite number > 1, got 1.0",
    ),
]
