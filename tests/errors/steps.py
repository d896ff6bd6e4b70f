"""Mistakes in a step: gradients, states and keywords that do not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fusedopt
from fusedopt import FlatParams, Packing
from tests.errors.table import Step


def params():
    return {"body": {"kernel": jnp.ones((8, 4)), "bias": jnp.zeros(4)}, "head": {"kernel": jnp.ones((4, 2))}}


def of(tx, grads=None, state=None, tree=None):
    """What a step takes, right but for what is given."""
    tree = params() if tree is None else tree
    grads = jax.tree.map(jnp.ones_like, tree) if grads is None else grads
    return tx, grads, tx.init(tree) if state is None else state, tree


def without_bias():
    return {"body": {"kernel": jnp.ones((8, 4))}, "head": {"kernel": jnp.ones((4, 2)), "bias": jnp.ones(2)}}


def with_head(head):
    return {**params(), "head": {"kernel": head}}


def flat_of(tx, packing=None):
    flat = fusedopt.pack(params())
    return of(tx, fusedopt.pack(params(), packing=packing), tree=flat)


def summed():
    flat = fusedopt.pack(params())
    grads = FlatParams([x[:8] for x in flat.buckets], (), flat.layout)
    return of(fusedopt.sgd(0.1), grads, tree=flat)


def short_of_average():
    return of(fusedopt.adamw(0.1, ema_decay=0.9), state=fusedopt.adamw(0.1).init(params()))


def one_ratio_too_few():
    tx = fusedopt.lars(0.1)
    state = tx.init(params())
    return of(tx, state=state._replace(trust_ratios=jnp.ones(1)))


def with_state_of(other, tx):
    return of(tx, state=other.init(params()))


def chained():
    tx = fusedopt.chain(optax.clip(1.0), fusedopt.sgd(0.1))
    return of(tx, state=fusedopt.sgd(0.1).init(params()))


STEPS = [
    # Gradients.
    Step(
        "grads-flat-params-tree",
        lambda: of(fusedopt.sgd(0.1), fusedopt.pack(params())),
        ValueError,
        "`grads` are FlatParams but `params` are dict: differentiate with respect to the FlatParams, or keep "
        "both as trees",
    ),
    Step(
        "grads-tree-params-flat",
        lambda: of(fusedopt.sgd(0.1), params(), tree=fusedopt.pack(params())),
        ValueError,
        "`grads` are dict but `params` are FlatParams: differentiate with respect to the FlatParams, or keep "
        "both as trees",
    ),
    Step(
        "grads-layout",
        lambda: flat_of(fusedopt.sgd(0.1), Packing(align=512)),
        ValueError,
        "`grads` have layout FlatLayout(3 leaves, 44 elements, 2 buckets, …), `params` FlatLayout(3 leaves, "
        "44 elements, 2 buckets, …): `head/kernel` begins at element 512 of `weight.float32` in the first, at"
        " 128 of `weight.float32` in the second (fusedopt.repack moves parameters and states to another "
        "layout)",
    ),
    Step(
        "grads-buffer-shape",
        summed,
        ValueError,
        "`grads` bucket `bias.float32`: got shape (8,), expected (1024,); what is mapped over FlatParams must"
        " be elementwise",
    ),
    Step(
        "grads-structure",
        lambda: of(fusedopt.sgd(0.1), without_bias()),
        ValueError,
        "`grads` and `params` have different structures: `head/bias` only in `grads`, `body/bias` only in `params`",
    ),
    Step(
        "grads-shape",
        lambda: of(fusedopt.sgd(0.1), with_head(jnp.ones((2, 4)))),
        ValueError,
        "`grads` leaf `head/kernel`: got shape (2, 4), expected (4, 2)",
    ),
    Step(
        "grads-broadcastable",
        lambda: of(fusedopt.sgd(0.1), with_head(jnp.ones(()))),
        ValueError,
        "`grads` leaf `head/kernel`: got shape (), expected (4, 2)",
    ),
    Step(
        "grads-int",
        lambda: of(fusedopt.sgd(0.1), with_head(jnp.ones((4, 2), jnp.int32))),
        TypeError,
        "`grads` leaf `head/kernel`: expected real floating point gradients for a float32 parameter, got int32",
    ),
    Step(
        "grads-complex",
        lambda: of(fusedopt.sgd(0.1), with_head(jnp.ones((4, 2), jnp.complex64))),
        TypeError,
        "`grads` leaf `head/kernel`: expected real floating point gradients for a float32 parameter, got complex64",
    ),
    Step(
        "params-missing",
        lambda: (*of(fusedopt.adamw(0.1))[:3], None),
        ValueError,
        "`params` are needed, got None: call update(grads, state, params); weight decay, trust ratios, "
        "averages and master weights are computed from them",
        method="update",
    ),
    Step(
        "params-missing-in-apply",
        lambda: (*of(fusedopt.sgd(0.1))[:3], None),
        ValueError,
        "`params` are needed, got None: call apply(grads, state, params); weight decay, trust ratios, "
        "averages and master weights are computed from them",
    ),
    # States.
    Step(
        "state-dict",
        lambda: of(fusedopt.sgd(0.1), state={"count": 0}),
        ValueError,
        "`state`: expected the FusedState of this optimizer's init, got dict (restore a checkpoint into the "
        "structure of `tx.init(params)`); a step takes (grads, state, params)",
    ),
    Step(
        "state-of-lists",
        lambda: of(fusedopt.adam(0.1), state=fusedopt.adam(0.1).init(params())._replace(mu=[jnp.zeros(1)])),
        ValueError,
        "`state.mu`: expected a tuple of buffers, got a list (restore a checkpoint into the structure of `tx.init(params)`, or "
        "make tuples of its lists)",
    ),
    Step(
        "state-and-params-swapped",
        lambda: (*of(fusedopt.sgd(0.1))[:2], *of(fusedopt.sgd(0.1))[:1:-1]),
        ValueError,
        "`state`: expected the FusedState of this optimizer's init, got dict (restore a checkpoint into the "
        "structure of `tx.init(params)`); a step takes (grads, state, params)",
    ),
    Step(
        "state-of-optax",
        lambda: of(fusedopt.adam(0.1), state=optax.adam(0.1).init(params())),
        ValueError,
        "`state`: expected the FusedState of this optimizer's init, got tuple (restore a checkpoint into the "
        "structure of `tx.init(params)`); a step takes (grads, state, params)",
    ),
    Step(
        "state-of-another-rule",
        lambda: with_state_of(fusedopt.lion(0.1), fusedopt.adam(0.1)),
        ValueError,
        "`state.nu` is of another layout: got 0 buffers, expected 2 for these parameters (bias.float32, "
        "weight.float32); a state of another optimizer does not go on here",
    ),
    Step(
        "state-of-other-hyperparameters",
        lambda: with_state_of(fusedopt.sgd(0.1), fusedopt.sgd(0.1, weight_decay=0.1)),
        ValueError,
        "`state.hyperparams` is of another optimizer: got shape (1,), expected (2,) for learning_rate, "
        "weight_decay; fusedopt.repack moves a state from one optimizer to another",
    ),
    Step(
        "state-of-another-packing",
        lambda: with_state_of(fusedopt.adam(0.1, packing=Packing(solo_from=8)), fusedopt.adam(0.1)),
        ValueError,
        "`state.mu` is of another layout: got 3 buffers, expected 2 for these parameters (bias.float32, "
        "weight.float32); fusedopt.repack moves a state to another layout",
    ),
    Step(
        "state-of-another-alignment",
        lambda: with_state_of(fusedopt.adam(0.1, packing=Packing(align=1024)), fusedopt.adam(0.1)),
        ValueError,
        "`state.mu` is of another layout: bucket `weight.float32` with leaf `body/kernel`: got shape (2048,),"
        " expected (1024,); fusedopt.repack moves a state to another layout",
    ),
    Step(
        "state-without-average",
        short_of_average,
        ValueError,
        "`state.ema` is of another layout: got 0 buffers, expected 2 for these parameters (bias.float32, "
        "weight.float32); a state of an optimizer without them gets them by "
        "state._replace(ema=tx.init(params).ema)",
    ),
    Step(
        "state-trust-ratios",
        one_ratio_too_few,
        ValueError,
        "`state.trust_ratios` is of another layout: got shape (1,), expected (2,); fusedopt.repack moves a "
        "state to another layout",
    ),
    Step(
        "state-of-a-chain",
        chained,
        ValueError,
        "`state`: expected a tuple of 2 states, one for each transformation, got FusedState",
    ),
    # Keywords.
    Step(
        "loss-scale-shape",
        lambda: of(fusedopt.sgd(0.1)),
        ValueError,
        "`loss_scale`: expected a 0-d number or array, got shape (2,)",
        {"loss_scale": np.ones(2, np.float32)},
    ),
    Step(
        "loss-scale-string",
        lambda: of(fusedopt.sgd(0.1)),
        TypeError,
        "`loss_scale`: expected a 0-d number or array, got str",
        {"loss_scale": "1024"},
    ),
    Step(
        "has-nan-shape",
        lambda: of(fusedopt.sgd(0.1)),
        ValueError,
        "`has_nan`: expected a 0-d number or array, got shape (3,)",
        {"has_nan": np.zeros(3, bool)},
    ),
    Step(
        "keyword-range",
        lambda: of(fusedopt.sgd(0.1)),
        ValueError,
        "`learning_rate`: expected a number in [0, inf), got -1.0",
        {"learning_rate": -1.0},
    ),
    Step(
        "keyword-schedule",
        lambda: of(fusedopt.sgd(0.1)),
        TypeError,
        "`learning_rate`: a keyword of one step is a number or a 0-d array, got a function: give schedules to"
        " the factory",
        {"learning_rate": lambda t: 0.1},
    ),
    Step(
        "keyword-absent",
        lambda: of(fusedopt.sgd(0.1)),
        ValueError,
        "`momentum` cannot be set: this optimizer was made without momentum and holds no velocity; "
        "momentum=0.0 holds one",
        {"momentum": 0.9},
    ),
    Step(
        "keyword-absent-decay",
        lambda: of(fusedopt.sgd(0.1)),
        ValueError,
        "`weight_decay` cannot be set: this optimizer was made with weight_decay=0, which removes decay from "
        "the program; make it with weight_decay=jnp.float32(0.0) to change it later",
        {"weight_decay": 0.1},
    ),
]

ROWS = [step.row for step in STEPS]
