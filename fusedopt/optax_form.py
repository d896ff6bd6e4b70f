"""States to and from optax: the form of a checkpoint that depends on no layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from fusedopt import optax_nodes as _nodes
from fusedopt.by_path import Leaves, exported, installed, leaves_by_path, nested, tree_of, unwrapped, vector_of
from fusedopt.optimizer import Optimizer
from fusedopt.packing import FlatParams, slot_dtype
from fusedopt.paths import Path, show
from fusedopt.rules import Adam, Lars, Lion
from fusedopt.state import FusedState, live_buckets
from fusedopt.transformation import FusedTransformation
from fusedopt.typing import PyTree, State

# Fields of the second result of `to_optax_state` that are trees by path.
TREES = ("ema", "master", "accumulated", "trust_ratios", "mu")


def to_optax_state(
    tx: FusedTransformation[Any], state: Any, params: PyTree, like: Any = None
) -> tuple[Any, dict[str, Any]]:
    """The state that the namesake in optax would have, and what optax has no place for.

    ```python
    optax_state, extras = fusedopt.to_optax_state(tx, state, params)
    state = fusedopt.from_optax_state(tx, optax_state, params, extras)  # the same bits
    ```

    Both are trees by path, whatever the packing: this is the form for checkpoints that outlive a layout.

    Args:
      tx: the optimizer, or a `fusedopt.chain` that ends in it.
      state: its state, or any pytree with one such state in it, as `optax.chain` or `optax.MultiSteps` around `tx` have.
      params: what the state belongs to: a tree of arrays or abstract values, or FlatParams.
      like: an optax transformation or one of its states, to be filled instead of the namesake's: moments, counts,
        injected hyperparameters and the sums of MultiSteps are put wherever they sit in it.

    Returns:
      ``(optax_state, extras)``. `optax_state` is shaped like ``optax.X(...).init(params)`` with the masks of this
      optimizer, where X is adam, adamw, lion, lamb, lars, or sgd (with ``add_decayed_weights`` behind it where there is
      decay, in front of Adam's L2); a chain gives the tuple of a chain. Moments have their own dtypes, float32 for
      16-bit parameters. Integers and frozen leaves have moments of zeros. The velocities of ``optax.lars`` are what is
      added to the parameters, the negative of ours; in the paper form those of leaves without a trust ratio are
      multiplied by the learning rate too, which ours do not hold.
      `extras` is a dict of arrays, in dicts of dicts by path where they belong to leaves: ``count``, ``skipped``,
      ``total_skipped`` (0-d), ``hyperparams`` by name (float32 [], decays b as 1 - b), and as far as the optimizer has
      them ``ema``, ``master``, ``accumulated``, ``micro_step``, ``grad_norm``, ``trust_ratios``, and ``mu``, the
      velocities of paper-form LARS before that product. All arrays are new and may be donated.

    Raises:
      TypeError: `tx` is not of fusedopt.
      ValueError: no state of this optimizer in `state`, or one of other parameters; a place that `like` lacks.
    """
    opt = _optimizer(tx)
    found = [s for s in jax.tree.leaves(state, is_leaf=_is_fused) if _is_fused(s)]
    if len(found) != 1:
        raise ValueError(
            f"`state`: expected one FusedState in it, got {len(found)} in a {type(state).__name__}: pass the state of `tx`, "
            "alone or in a tree"
        )
    layout, tree = opt.layout_of_params(params), tree_of(params)
    values = exported(opt, found[0], layout)
    hyperparams = opt.hyperparams.read(unwrapped(found[0]).hyperparams)
    extras = {k: v for k, v in values.items() if k not in ("mu", "nu")}
    if isinstance(opt.rule, Lars):
        rates, ours = _rates_outside(opt, layout, hyperparams), values["mu"]
        extras["mu"] = {p: ours[p] for p in rates}
        values = {**values, "mu": {p: -(x * rates[p].astype(x.dtype)) if p in rates else -x for p, x in ours.items()}}
    for name in TREES:
        if name in extras:
            extras[name] = nested(extras[name])
    extras = {
        k: v for k, v in extras.items() if not (isinstance(v, dict) and not v)
    }  # some libraries refuse empty ones
    if like is None:
        own = jax.eval_shape(_nodes.namesake(opt).init, tree)
        own = _nodes.filled(opt, own, values, hyperparams, "like")
        return jax.tree.map(lambda s: own if _is_fused(s) else jnp.array(s), state, is_leaf=_is_fused), extras
    like = like.init(tree) if hasattr(like, "init") else like
    return _into(like, state, lambda x: _nodes.filled(opt, x, values, hyperparams, "like")), extras


def from_optax_state(
    tx: FusedTransformation[State],
    optax_state: Any,
    params: PyTree,
    extras: Mapping[str, Any] | None = None,
    *,
    fresh: Sequence[Path] = (),
) -> State:
    """The state of `tx` that goes on where an optax run, or `to_optax_state`, stopped.

    Moments and count are found wherever they sit in `optax_state` (chains, masks, partitions, MultiSteps,
    inject_hyperparams) and matched with `params` by path; the hyperparameters that inject_hyperparams holds are taken
    over. A state that was restored without its types, as dicts, will do. Without `extras` everything that optax does not
    keep begins as ``tx.init(params)`` does: averages and master weights from the parameters, counters of skipped steps
    from 0; so does the count of an optax run that keeps none (SGD and LARS without a schedule).

    Args:
      tx: the optimizer, or a `fusedopt.chain` that ends in it: the states of the transformations in front are taken over.
      optax_state: the state of an optax optimizer, alone or in a chain.
      params: the parameters, a tree of arrays or FlatParams.
      extras: the second result of `to_optax_state`; with it the way there and back keeps every bit. Steps that optax has
        taken in between count: a master weight that no longer rounds to its parameter is made anew from it.
      fresh: paths such as ``[("head",)]``: leaves at and below them begin as at init, and what `optax_state` has for
        them is not read. For a new head on old layers.

    Returns:
      A state as ``tx.init(params)`` makes it, same shapes and dtypes; it shares no memory with the arguments.

    Raises:
      TypeError: `tx` is not of fusedopt.
      ValueError: what was not found (moments, a leaf by its path, the count where the step depends on it, a field of
        `extras`, the states in front), what there is twice, or what has another shape.
    """
    opt = _optimizer(tx)
    return _out_of(optax_state, jax.eval_shape(tx.init, params), lambda x: _state(opt, x, params, extras, fresh))


def _state(opt: Optimizer, optax_state: Any, params: Any, extras: Any, fresh: Sequence[Path]) -> FusedState:
    moments, counts, injected, multi = _nodes.read(opt, optax_state)
    given: dict[str, Any] = dict(moments)
    layout = opt.layout_of_params(params)
    if extras is not None:
        given |= {k: leaves_by_path(v) if k in TREES else v for k, v in extras.items() if k != "mu"}
        needs = {"ema": opt.averages, "accumulated": opt.accumulate > 1, "micro_step": opt.accumulate > 1}
        needs["master"] = any("master" in opt.kept(b) for b in live_buckets(layout))
        for name in (k for k, needed in needs.items() if needed and k not in given):
            raise ValueError(
                f"`extras` has no `{name}`, which this optimizer keeps; it has {', '.join(extras)}. Without `extras` what optax "
                "does not keep begins anew"
            )
    if counts:
        given["count"] = next(iter(counts.values()))
    elif "count" not in given and _counts(opt):
        raise ValueError(
            "`optax_state` has no count, which this optimizer's step depends on, and `extras` has none: expected one of them, "
            "extras={'count': steps}"
        )
    if multi is not None:
        given |= _pending(opt, multi)
    if "master" in given:
        given["master"] = _fitting(given["master"], params)
    wide = any(slot_dtype(b.dtype) == jnp.float64 for b in layout.buckets)
    vector = opt.hyperparams.init(jnp.float64 if wide else jnp.float32)
    stored = dict(given.get("hyperparams", {}))
    for h, own in zip(opt.hyperparams.items, vector, strict=True):
        if h.is_constant and h.name in injected:
            value, one = jnp.asarray(injected[h.name]), jnp.ones((), vector.dtype)
            new = one - value.astype(vector.dtype) if h.decay else value.astype(vector.dtype)
            for kept in (
                own,
                jnp.asarray(stored.get(h.name, own), vector.dtype),
            ):  # if it is one of them, with its digits
                public = one - kept if h.decay else kept
                new = jnp.where(public.astype(value.dtype) == value, kept, new)
            stored[h.name] = new
    given["hyperparams"] = stored
    if opt.hyperparams.items and "learning_rate" not in stored:
        before = jnp.maximum(jnp.asarray(given.get("count", 0), jnp.int32) - 1, 0)
        vector = opt.hyperparams.resolve(vector, before, {})[1]
    rates = _rates_outside(opt, layout, opt.hyperparams.read(vector_of(opt, vector, stored)))
    exact: Leaves = leaves_by_path((extras or {}).get("mu", {}))
    if isinstance(opt.rule, Lars):
        live = {s.path for b in live_buckets(layout) for s in layout.segments_of(b)}
        given["mu"] = {p: -jnp.asarray(x) if p in live else x for p, x in given["mu"].items()}
        for path in (p for p in rates if p in given["mu"]):
            given["mu"][path] = _without(rates[path], given["mu"][path], exact.get(path))
    return installed(opt, params, given, fresh, "optax_state")


def _rates_outside(opt: Optimizer, layout: Any, hyperparams: Mapping[str, Any]) -> dict[Path, Any]:
    """Learning rates of the leaves whose velocity does not hold it, where that of optax does."""
    if not (isinstance(opt.rule, Lars) and opt.rule.form == "paper"):
        return {}
    out = {}
    for b in live_buckets(layout):
        if not b.trust:
            scale = hyperparams.get(f"learning_rate_scale/{b.group}")
            rate = hyperparams["learning_rate"] if scale is None else hyperparams["learning_rate"] * scale
            out |= dict.fromkeys((s.path for s in layout.segments_of(b)), rate)
    return out


def _without(rate: Any, velocity: Any, exact: Any) -> Any:
    """A velocity without its learning rate; `exact` where it is still the same one. 0 for a learning rate of 0."""
    velocity = jnp.asarray(velocity)
    rate = rate.astype(velocity.dtype)
    quotient = jnp.where(
        rate == 0, jnp.zeros_like(velocity), velocity / jnp.where(rate == 0, jnp.ones_like(rate), rate)
    )
    if exact is None or jnp.shape(exact) != velocity.shape:
        return quotient
    exact = jnp.asarray(exact, velocity.dtype)
    return jnp.where(exact * rate == velocity, exact, quotient)


def _fitting(master: Leaves, params: Any) -> Leaves:
    """Master weights, made anew wherever they do not round to the parameters."""
    tree = params.tree if isinstance(params, FlatParams) else params
    out = {}
    for path, p in leaves_by_path(tree).items():
        if path in master and jnp.shape(p) == jnp.shape(master[path]):
            m, p = jnp.asarray(master[path]), jnp.asarray(p)
            out[path] = jnp.where(m.astype(p.dtype) == p, m, p.astype(m.dtype))
    return {**master, **out}


def _pending(opt: Optimizer, multi: Any) -> dict[str, Any]:
    """The gradients that MultiSteps has gathered, as ours: its mean of m is our sum of m shares of k."""
    steps = _nodes.scalar(_nodes.field(multi, "mini_step"))
    if opt.accumulate == 1:
        if not isinstance(steps, Tracer) and int(np.asarray(steps)):
            raise ValueError(
                f"`optax_state`: MultiSteps has gathered {int(np.asarray(steps))} gradients of a step, for which this "
                "optimizer, made without `accumulate`, has no place: make it with accumulate=k, or convert at the end of a step"
            )
        return {}
    sums = {p: jnp.asarray(x) for p, x in leaves_by_path(_nodes.field(multi, "acc_grads")).items()}
    sums = {p: x * (jnp.asarray(steps, x.dtype) / opt.accumulate) for p, x in sums.items()}
    return {"accumulated": sums, "micro_step": steps}


def _counts(opt: Optimizer) -> bool:
    """Whether a step depends on how many there were."""
    return isinstance(opt.rule, (Adam, Lion)) or opt.ema_debias or any(h.is_schedule for h in opt.hyperparams.items)


def _into(like: Any, state: Any, fill: Any) -> Any:
    """`like` filled, its transformations in front with the states of ours."""
    if _is_fused(state):
        return fill(like)
    if type(state) is not tuple:
        raise ValueError(
            f"`state`: with `like` expected the FusedState of `tx`, or the tuple of a chain around it, got {type(state).__name__}"
        )
    *front, last = state
    if type(like) is tuple and len(like) == len(state) and _alike(like[:-1], tuple(front)):
        return (*jax.tree.map(jnp.array, tuple(front)), _into(like[-1], last, fill))
    _no_arrays(front, "like")
    return _into(like, last, fill)


def _out_of(optax_state: Any, template: Any, convert: Any) -> Any:
    """A state shaped like `template`, its fused part converted, its transformations in front as they are."""
    if _is_fused(template):
        return convert(optax_state)
    *front, last = template
    if type(optax_state) in (tuple, list) and len(optax_state) == len(template):
        before = tuple(optax_state[:-1])
        if _alike(before, tuple(front)):
            return (*jax.tree.map(jnp.array, before), _out_of(optax_state[-1], last, convert))
    _no_arrays(front, "optax_state")
    return (*front, _out_of(optax_state, last, convert))


def _alike(got: Any, want: Any) -> bool:
    same = jax.tree.structure(got) == jax.tree.structure(want)
    return same and all(jnp.shape(a) == b.shape for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)))


def _no_arrays(front: Sequence[Any], name: str) -> None:
    for i, s in enumerate(front):
        if jax.tree.leaves(s):
            raise ValueError(
                f"`{name}`: found no state of transformation {i} of the chain, a {type(s).__name__} with "
                f"{', '.join(f'`{show(p)}`' for p in leaves_by_path(s))}; expected a tuple of {len(front) + 1} states"
            )


def _is_fused(x: Any) -> bool:
    return isinstance(x, FusedState)


def _optimizer(tx: Any) -> Optimizer:
    if not isinstance(tx, FusedTransformation):
        raise TypeError(
            f"`tx`: expected an optimizer made by fusedopt, got {type(tx).__name__}; of an optax wrapper around one "
            "pass that one"
        )
    return tx.optimizer
