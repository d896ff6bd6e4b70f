"""FlatParams and TrainState in flax.serialization, and keywords of TrainState."""

import jax.numpy as jnp
import optax
from flax import serialization
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

import fusedopt
from tests.errors.table import Row

W = {"v": jnp.ones((2, 2)), "w": jnp.ones((2, 2))}
ADAM = fusedopt.adam(0.1)


def stored_flat(stored, like=W):
    return lambda: serialization.from_bytes(fusedopt.pack(like), serialization.to_bytes(stored))


def train_state(tx, params=W, flat=False):
    return fusedopt.TrainState.create(apply_fn=None, params=params, tx=tx, flat=flat)


def restored(stored, like):
    return lambda: serialization.from_bytes(like(), serialization.to_bytes(stored()))


def of_fields(*names):
    fields = serialization.to_state_dict(train_state(ADAM))
    return serialization.from_state_dict(train_state(ADAM), {name: fields[name] for name in names})


def with_mu(leaves):
    """A stored TrainState with other moments than those of its parameters."""
    fields = serialization.to_state_dict(train_state(ADAM))
    mu = {k: x for k, x in {**fields["opt_state"]["mu"], **leaves}.items() if x is not None}
    stored = {**fields, "opt_state": {**fields["opt_state"], "mu": mu}}
    return serialization.from_state_dict(train_state(ADAM), stored)


def keywords(tx, **extra):
    return lambda: train_state(tx).apply_gradients(grads=W, **extra)


ROWS = [
    # FlatParams in flax.serialization.
    Row(
        "flat-stored-unknown",
        stored_flat({**W, "x": jnp.ones(2)}),
        ValueError,
        "`FlatParams` leaf `x` is stored but not in the target: fusedopt.pack a tree of what is stored instead",
    ),
    Row(
        "flat-stored-missing",
        stored_flat({"w": W["w"]}),
        ValueError,
        "`FlatParams` leaf `v` is in the target but not stored: fusedopt.pack a tree of what is stored instead",
    ),
    Row(
        "flat-stored-none",
        stored_flat({**W, "w": None}),
        ValueError,
        "`FlatParams` leaf `w`: got None, expected an array of shape (2, 2)",
    ),
    Row(
        "flat-stored-shape",
        stored_flat({**W, "w": jnp.ones((3, 2))}),
        ValueError,
        "`FlatParams` leaf `w`: got shape (3, 2), expected (2, 2)",
    ),
    # TrainState.
    Row(
        "train-state-overwrite",
        lambda: train_state(ADAM, {"params": W, OVERWRITE_WITH_GRADIENT: {"scale": jnp.ones(1)}}, flat=True),
        ValueError,
        "`flat`: expected parameters without '_overwrite_with_gradient', got some, which stay a tree: leave `flat` out",
    ),
    Row(
        "train-state-average",
        lambda: train_state(optax.adam(0.1)).ema_params,
        ValueError,
        "`ema_params`: expected an optimizer of fusedopt made with `ema_decay`, got GradientTransformationExtraArgs",
    ),
    Row(
        "train-state-optax",
        keywords(optax.adam(0.1), has_nan=True),
        TypeError,
        "`has_nan`: expected an optimizer made by fusedopt as `tx` for it, got GradientTransformationExtraArgs",
    ),
    Row(
        "train-state-keyword",
        keywords(ADAM, batch_stat=1),
        TypeError,
        "`batch_stat` is neither a field of TrainState nor a hyperparameter (learning_rate, b1, b2, eps, eps_root)",
    ),
    Row(
        "train-state-fields",
        lambda: of_fields("step", "params"),
        ValueError,
        "`TrainState`: got the fields ['params', 'step'], expected ['opt_state', 'params', 'step']",
    ),
    Row(
        "train-state-average-not-stored",
        restored(lambda: train_state(ADAM), lambda: train_state(fusedopt.adam(0.1, ema_decay=0.5))),
        ValueError,
        "`opt_state` has no `ema`, which this optimizer keeps; it has count, skipped, total_skipped, mu, nu, "
        "hyperparams",
    ),
    Row(
        "train-state-moment",
        lambda: with_mu({"w": jnp.ones((3, 2))}),
        ValueError,
        "`opt_state`: `mu` of leaf `w`: got shape (3, 2), expected (2, 2); restore it for the parameters that"
        " it was stored with",
    ),
    Row(
        "train-state-no-moment",
        lambda: with_mu({"w": None}),
        ValueError,
        "`opt_state` has no `mu` for leaf `w` of `params`, only for 1 others (`v`); restore it for the "
        "parameters that it was stored with",
    ),
    Row(
        "train-state-unknown-moment",
        lambda: with_mu({"x": jnp.ones(1)}),
        ValueError,
        "`opt_state` has `mu` for leaf `x`, which is not in `params`; restore it for the parameters that it "
        "was stored with",
    ),
]
