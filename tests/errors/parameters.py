"""Trees that cannot be laid out, masks and groups that do not fit them, and questions to a layout."""

import jax
import jax.numpy as jnp
import optax

import fusedopt
from fusedopt import Group
from tests.errors.table import Row

P = {"body": {"kernel": jnp.ones((8, 4)), "bias": jnp.zeros(4)}, "head": {"kernel": jnp.ones((4, 2))}}


def layout():
    return fusedopt.pack(P).layout


def nothing(path, leaf):
    return False


def split():
    """FlatParams of one bucket for two leaves that the optimizer treats differently."""
    mask = {"body": {"kernel": True, "bias": False}, "head": {"kernel": False}}
    return fusedopt.adamw(0.1, mask=mask).init(fusedopt.pack(P))


ROWS = [
    # Leaves.
    Row(
        "leaf-string",
        lambda: fusedopt.sgd(0.1).init({"net": {**P, "name": "mlp"}}),
        TypeError,
        "`params` leaf `net/name`: expected an array or a number, got str; keep what is not trained out of the tree",
    ),
    Row(
        "leaf-complex",
        lambda: fusedopt.pack({"fc": {"kernel": jnp.ones(2, jnp.complex64)}}),
        TypeError,
        "`params` leaf `fc/kernel` is complex64: complex parameters are not supported; keep real and "
        "imaginary parts as two leaves, or wrap with optax.contrib.split_real_and_imaginary",
    ),
    Row(
        "mask-of-string",
        lambda: fusedopt.weight_mask({"name": "mlp"}),
        TypeError,
        "`params` leaf `name`: expected an array or a number, got str; keep what is not trained out of the tree",
    ),
    Row(
        "abstract-average",
        lambda: fusedopt.sgd(0.1, ema_decay=0.9).init({"w": jax.ShapeDtypeStruct((2,), jnp.float32)}),
        TypeError,
        "`params` leaf `w`: expected an array, got an abstract value; `ema_decay` and `master_weights` copy "
        "parameters: use jax.eval_shape(tx.init, params) for an abstract state",
    ),
    # pack.
    Row(
        "pack-twice",
        lambda: fusedopt.pack(fusedopt.pack(P)),
        TypeError,
        "`params` is FlatParams already; to change its layout pack `params.tree`, or use fusedopt.repack",
    ),
    Row("pack-packing", lambda: fusedopt.pack(P, packing=512), TypeError, "`packing`: expected a Packing, got int"),
    Row(
        "pack-optax",
        lambda: fusedopt.pack(P, optax.sgd(0.1)),
        TypeError,
        "`tx`: expected an optimizer made by fusedopt, got GradientTransformationExtraArgs",
    ),
    Row(
        "pack-for-another-mask",
        split,
        ValueError,
        "bucket `weight.float32` of these FlatParams holds `body/kernel` (group weight, decay, no trust "
        "ratio) and `head/kernel` (group weight, no decay, no trust ratio), which this optimizer treats "
        "differently: pack with its groups and masks, fusedopt.pack(params, tx)",
    ),
    # Masks and groups.
    Row(
        "mask-traced",
        lambda: jax.eval_shape(lambda m: fusedopt.adamw(0.1, mask={"body": m, "head": True}).init(P), True),
        TypeError,
        "`mask` at `body`: expected Python bools (a mask is static), got a tracer; under "
        "optax.inject_hyperparams name this argument in `static_args`, under jax.jit build the mask outside",
    ),
    Row(
        "mask-number",
        lambda: fusedopt.adamw(0.1, mask=lambda tree: 1).init(P),
        TypeError,
        "`mask`: expected Python bools (a mask is static), got int; under optax.inject_hyperparams name this "
        "argument in `static_args`, under jax.jit build the mask outside",
    ),
    Row(
        "mask-incomplete",
        lambda: fusedopt.adamw(0.1, mask={"body": {"kernel": True}}).init(P),
        ValueError,
        "`mask` has no entry for leaf `body/bias`; it covers `body/kernel`: each leaf needs a bool of its "
        "own, or one at a prefix of its path",
    ),
    Row(
        "group-match-incomplete",
        lambda: fusedopt.sgd(0.1, groups=[Group("h", {"head": True})]).init(P),
        ValueError,
        "`Group.match of group 'h'` has no entry for leaf `body/bias`; it covers `head`: each leaf needs a "
        "bool of its own, or one at a prefix of its path",
    ),
    Row(
        "group-of-nothing",
        lambda: fusedopt.sgd(0.1, groups=[Group("h", nothing)]).init(P),
        ValueError,
        "`groups`: 'h' matches no leaf; a path is a tuple of key strings such as ('body', 'bias')",
    ),
    # Questions.
    Row(
        "segment",
        lambda: layout().segment(("head", "weight")),
        KeyError,
        "no trainable leaf at `head/weight`; there are ('body', 'bias'), ('body', 'kernel'), ('head', 'kernel')",
    ),
    Row(
        "region",
        lambda: layout().region_range("conv"),
        ValueError,
        "`first`: expected one of ('bn_bias', 'bn_weight', 'fc_bias', 'fc_weight', 'first_conv', "
        "'deep_conv'), got 'conv'",
    ),
    Row(
        "regions-order",
        lambda: layout().region_range("fc_weight", "bn_bias"),
        ValueError,
        "`last`='bn_bias' comes before `first`='fc_weight' in ('bn_bias', 'bn_weight', 'fc_bias', "
        "'fc_weight', 'first_conv', 'deep_conv')",
    ),
]
