"""States to and from optax, to another packing, and as raw buffers out of a checkpoint."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax

import fusedopt
from fusedopt import Packing
from tests.errors.table import Row

W = {"v": jnp.ones((2, 2)), "w": jnp.ones((2, 2))}
HEAD = {"body": jnp.ones((2, 2)), "head": jnp.ones((2, 3))}
ADAM = fusedopt.adam(0.1)


def given(tx, optax_state, params=W, **options):
    return lambda: fusedopt.from_optax_state(tx, optax_state, params, **options)


def gathered():
    """The state of `optax.MultiSteps` in the middle of a step."""
    return optax.MultiSteps(optax.adam(0.1), 4).init(W)._replace(mini_step=jnp.int32(2))


def to_optax(tx, state, params=W, like=None):
    return lambda: fusedopt.to_optax_state(tx, state, params, like)


def masked():
    return optax.masked(optax.adam(0.1), {"v": False, "w": True})


@functools.partial(jax.tree_util.register_dataclass, data_fields=["value", "rest"], meta_fields=[])
@dataclasses.dataclass
class Named:
    """A container whose field ``value`` Flax's variables have too: its path is that of the container."""

    value: object
    rest: object


class Backwards(Named):
    """The same with its fields the other way round."""


jax.tree_util.register_pytree_with_keys(
    Backwards,
    lambda x: (((jax.tree_util.GetAttrKey("rest"), x.rest), (jax.tree_util.GetAttrKey("value"), x.value)), None),
    lambda _, children: Backwards(children[1], children[0]),
)


def by_path(kind):
    def call():
        params = {"a": kind(jnp.ones(2), jnp.ones(2))}
        tx = fusedopt.sgd(0.1, ema_decay=0.5)
        return fusedopt.to_optax_state(tx, tx.init(params), params)

    return call


def dirty():
    """A state with a number where the padding of its layout is."""
    state = ADAM.init(W)
    return fusedopt.check_restored(ADAM, state._replace(mu=(state.mu[0].at[5].set(1),)), W)


def cut():
    flat = fusedopt.pack(W)
    short = fusedopt.FlatParams([x[:128] for x in flat.buckets], (), flat.layout)
    return fusedopt.check_restored(ADAM, ADAM.init(flat), short)


ROWS = [
    # From optax.
    Row(
        "from-optax-tx",
        given(optax.adam(0.1), ()),
        TypeError,
        "`tx`: expected an optimizer made by fusedopt, got GradientTransformationExtraArgs; of an optax "
        "wrapper around one pass that one",
    ),
    Row(
        "from-optax-other-moments",
        given(ADAM, optax.sgd(0.1, 0.9).init(W)),
        ValueError,
        "`optax_state`: expected ScaleByAdamState for this optimizer, found TraceState",
    ),
    Row(
        "from-optax-no-moments",
        given(ADAM, optax.sgd(0.1).init(W)),
        ValueError,
        "`optax_state`: expected ScaleByAdamState with mu and nu, found only tuple",
    ),
    Row(
        "from-optax-unwanted-moments",
        given(fusedopt.sgd(0.1), optax.adam(0.1).init(W)),
        ValueError,
        "`optax_state`: expected no moments for this optimizer, found ScaleByAdamState",
    ),
    Row(
        "from-optax-ours",
        given(ADAM, ADAM.init(W)),
        ValueError,
        "`optax_state` holds a FusedState, which is this library's own: it needs no conversion",
    ),
    Row(
        "from-optax-twice",
        given(ADAM, (optax.adam(0.1).init(W),) * 2),
        ValueError,
        "`optax_state`: expected one ScaleByAdamState with `mu` of leaf `v`, got two: pass the part of it that goes on",
    ),
    Row(
        "from-optax-no-count",
        given(fusedopt.sgd(lambda t: 0.1), optax.sgd(0.1).init(W)),
        ValueError,
        "`optax_state` has no count, which this optimizer's step depends on, and `extras` has none: expected "
        "one of them, extras={'count': steps}",
    ),
    Row(
        "from-optax-counts",
        given(ADAM, (optax.adam(0.1).init(W), optax.ScaleByScheduleState(jnp.int32(3)))),
        ValueError,
        "`optax_state`: expected one count, got {'ScaleByAdamState.count': 0, 'ScaleByScheduleState.count': "
        "3}: pass the part of it that belongs to `tx`",
    ),
    Row(
        "from-optax-missing-leaf",
        given(ADAM, optax.adam(0.1).init({"w": W["w"]})),
        ValueError,
        "`optax_state` has no `mu` for leaf `v` of `params`, only for 1 others (`w`); fresh=[('v',)] lets it "
        "begin anew",
    ),
    Row(
        "from-optax-unknown-leaf",
        given(ADAM, optax.adam(0.1).init(HEAD), {"body": W["w"]}),
        ValueError,
        "`optax_state` has `mu` for leaf `head`, which is not in `params`; fresh=[('head',)] leaves it out",
    ),
    Row(
        "from-optax-shape",
        given(ADAM, optax.adam(0.1).init({**W, "w": jnp.ones((3, 2))})),
        ValueError,
        "`optax_state`: `mu` of leaf `w`: got shape (3, 2), expected (2, 2); fresh=[('w',)] lets it begin anew",
    ),
    Row(
        "from-optax-fresh",
        given(ADAM, optax.adam(0.1).init(W), fresh=[("x",)]),
        ValueError,
        "`fresh`: ('x',) is the path of no leaf, neither of `params` nor of `optax_state`; expected paths "
        "such as ('v',), or beginnings of them",
    ),
    Row(
        "from-optax-fresh-string",
        given(ADAM, optax.adam(0.1).init(W), fresh="w"),
        TypeError,
        "`fresh`: expected a sequence of paths such as [('head',)], got 'w'",
    ),
    Row(
        "from-optax-fresh-path",
        given(ADAM, optax.adam(0.1).init(W), fresh=("head", "kernel")),
        TypeError,
        "`fresh`: expected paths, tuples of strings such as ('head', 'kernel'), got 'head'",
    ),
    Row(
        "from-optax-fresh-strings",
        given(ADAM, optax.adam(0.1).init(W), fresh=["w"]),
        TypeError,
        "`fresh`: expected paths, tuples of strings such as ('head', 'kernel'), got 'w'",
    ),
    Row(
        "from-optax-extras",
        given(fusedopt.adam(0.1, ema_decay=0.5), optax.adam(0.1).init(W), extras={"count": 1}),
        ValueError,
        "`extras` has no `ema`, which this optimizer keeps; it has count. Without `extras` what optax does "
        "not keep begins anew",
    ),
    Row(
        "from-optax-gathered",
        given(ADAM, gathered()),
        ValueError,
        "`optax_state`: MultiSteps has gathered 2 gradients of a step, for which this optimizer, made without"
        " `accumulate`, has no place: make it with accumulate=k, or convert at the end of a step",
    ),
    Row(
        "from-optax-chain",
        given(fusedopt.chain(optax.trace(0.5), fusedopt.sgd(0.1)), optax.sgd(0.1).init(W)),
        ValueError,
        "`optax_state`: found no state of transformation 0 of the chain, a TraceState with `trace/v`, "
        "`trace/w`; expected a tuple of 2 states",
    ),
    # To optax.
    Row(
        "to-optax-no-state",
        to_optax(ADAM, optax.adam(0.1).init(W)),
        ValueError,
        "`state`: expected one FusedState in it, got 0 in a tuple: pass the state of `tx`, alone or in a tree",
    ),
    Row(
        "to-optax-params",
        to_optax(ADAM, ADAM.init(W), {"w": W["w"], "bias": jnp.ones(2)}),
        ValueError,
        "`state.mu` is of another layout: got 1 buffers, expected 2 for these parameters (bias.float32, "
        "weight.float32); fusedopt.repack moves a state to another layout",
    ),
    Row(
        "to-optax-like-kind",
        to_optax(ADAM, ADAM.init(W), like=optax.sgd(0.1, 0.9)),
        ValueError,
        "`like`: expected ScaleByAdamState for this optimizer, got TraceState",
    ),
    Row(
        "to-optax-like-place",
        to_optax(ADAM, ADAM.init(W), like=masked()),
        ValueError,
        "`like` has no place for `mu` of leaf `v`: expected one in its ScaleByAdamState",
    ),
    Row(
        "to-optax-like-shape",
        to_optax(ADAM, ADAM.init(W), like=optax.adam(0.1).init({**W, "w": jnp.ones((3, 2))})),
        ValueError,
        "`like`: `mu` of leaf `w` has shape (3, 2), expected (2, 2)",
    ),
    Row(
        "to-optax-like-wrapped",
        to_optax(ADAM, optax.MultiSteps(ADAM, 2).init(W), like=optax.adam(0.1)),
        ValueError,
        "`state`: with `like` expected the FusedState of `tx`, or the tuple of a chain around it, got MultiStepsState",
    ),
    Row(
        "path-above",
        by_path(Backwards),
        ValueError,
        "`params` leaf `a` lies above another leaf, and what is stored by path cannot hold both: rename one of them",
    ),
    Row(
        "path-below",
        by_path(Named),
        ValueError,
        "`params` leaf `a/rest` lies below another leaf, and what is stored by path cannot hold both: rename "
        "one of them",
    ),
    # repack, check_restored.
    Row(
        "repack-tx",
        lambda: fusedopt.repack(W, ADAM.init(W), ADAM, optax.adam(0.1)),
        TypeError,
        "`new_tx`: expected an optimizer made by fusedopt, got GradientTransformationExtraArgs",
    ),
    Row(
        "repack-packing",
        lambda: fusedopt.repack(W, ADAM.init(W), ADAM, packing=Packing(None)),
        ValueError,
        "`packing` is for FlatParams; the state of a tree is laid out by the `packing` of `new_tx`",
    ),
    Row(
        "repack-moments",
        lambda: fusedopt.repack(W, fusedopt.lion(0.1).init(W), fusedopt.lion(0.1), ADAM),
        ValueError,
        "`state` has no `nu`, which `new_tx` needs; `tx` keeps ('mu',)",
    ),
    Row(
        "repack-chain",
        lambda: fusedopt.repack(W, ADAM.init(W), ADAM, fusedopt.chain(ADAM)),
        ValueError,
        "`state`: got a FusedState, expected the tuple of a chain of 1 as that of `new_tx`: fusedopt.chain "
        "both optimizers, or none",
    ),
    Row(
        "repack-chain-length",
        lambda: fusedopt.repack(W, (ADAM.init(W),), fusedopt.chain(ADAM), fusedopt.chain(optax.clip(1.0), ADAM)),
        ValueError,
        "`state`: got the tuple of a chain of 1, expected the tuple of a chain of 2 as that of `new_tx`",
    ),
    Row(
        "check-tx",
        lambda: fusedopt.check_restored(optax.adam(0.1), None, W),
        TypeError,
        "`tx`: expected an optimizer made by fusedopt, got GradientTransformationExtraArgs",
    ),
    Row(
        "check-padding",
        dirty,
        ValueError,
        "`state.mu` is of another layout: bucket `weight.float32` has 1 at element 5, in the padding behind "
        "leaf `v` (2, 2), expected zeros",
    ),
    Row("check-params", cut, ValueError, "`params` bucket `weight.float32`: got shape (128,), expected (1024,)"),
]
