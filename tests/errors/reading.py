"""Mistakes in reading and setting what a state holds."""

import jax.numpy as jnp

import fusedopt
from tests.errors.steps import params
from tests.errors.table import Row


def set_hyperparams(tx, **values):
    return lambda: tx.set_hyperparams(tx.init(params()), **values)


def unseen():
    state = fusedopt.lars(0.1).init(params())
    return fusedopt.lars(0.1).trust_ratios(state)


ROWS = [
    Row(
        "set-unknown",
        set_hyperparams(fusedopt.adamw(0.1), lr=0.2),
        ValueError,
        "unknown hyperparameter `lr`: expected one of learning_rate, b1, b2, eps, eps_root, weight_decay",
    ),
    Row(
        "set-absent",
        set_hyperparams(fusedopt.lamb(0.1), max_trust_ratio=10),
        ValueError,
        "`max_trust_ratio` cannot be set: this optimizer was made without a limit; "
        "max_trust_ratio=jnp.float32(jnp.inf) is none",
    ),
    Row(
        "set-schedule",
        set_hyperparams(fusedopt.sgd(lambda t: 0.1), learning_rate=0.2),
        ValueError,
        "`learning_rate` was given to the factory as a schedule, which decides its value at every step: pass "
        "`learning_rate=` to update or apply instead",
    ),
    Row(
        "set-array",
        set_hyperparams(fusedopt.sgd(jnp.float32(0.1)), learning_rate=0.2),
        ValueError,
        "`learning_rate` was given to the factory as an array, which decides its value at every step: pass "
        "`learning_rate=` to update or apply instead",
    ),
    Row(
        "read-chain",
        lambda: fusedopt.sgd(0.1).hyperparams((1, 2)),
        ValueError,
        "`state`: expected the FusedState of this optimizer, got tuple; inside optax.chain pass the member of"
        " the tuple that is one, or use fusedopt.chain",
    ),
    Row(
        "ratios-of-adam",
        lambda: fusedopt.adam(0.1).trust_ratios(fusedopt.adam(0.1).init(params())),
        ValueError,
        "this optimizer has no trust ratios: `lars` and `lamb` have",
    ),
    Row(
        "ratios-unseen",
        unseen,
        ValueError,
        "`state`: this optimizer has not seen a state of this layout, and a state holds no paths: pass `params` too",
    ),
    Row(
        "no-average",
        lambda: fusedopt.sgd(0.1).ema_params(fusedopt.sgd(0.1).init(params()), params()),
        ValueError,
        "this optimizer keeps no average: make it with `ema_decay`",
    ),
]
