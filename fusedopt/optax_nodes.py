"""The parts of optax states that mean something to us: how they are told, read and filled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from fusedopt.by_path import Leaves, leaves_by_path
from fusedopt.grouping import weight_mask
from fusedopt.optimizer import Optimizer
from fusedopt.paths import show
from fusedopt.rules import Adam, Lamb, Lars, Lion, Sgd
from fusedopt.state import FusedState

# Kind of an optax state -> its field -> our slot.
MOMENTS = {
    "ScaleByAdamState": {"mu": "mu", "nu": "nu"},
    "ScaleByLionState": {"mu": "mu"},
    "TraceState": {"trace": "mu"},
}
SCHEDULES = ("ScaleByScheduleState", "WrappedScheduleState", "WeightDecaySchedule")
INJECT = ("InjectHyperparamsState", "InjectStatefulHyperparamsState")
WRAPPERS = {"MultiStepsState": "inner_opt_state", **dict.fromkeys(INJECT, "inner_state")}

# The fields by which a state is told that was restored without its type, as dicts.
_FIELDS = {
    frozenset({"count", "mu", "nu"}): "ScaleByAdamState",
    frozenset({"count", "mu"}): "ScaleByLionState",
    frozenset({"trace"}): "TraceState",
    frozenset({"count"}): "ScaleByScheduleState",
    frozenset({"count", "hyperparams", "hyperparams_states", "inner_state"}): "InjectStatefulHyperparamsState",
    frozenset(optax.MultiStepsState._fields): "MultiStepsState",
}


def kind_of(node: Any) -> str | None:
    """The kind of an optax state that we read, by the name of its class or, in a dict, by its keys; else None."""
    if isinstance(node, Mapping):
        return _FIELDS.get(frozenset(node)) if all(isinstance(k, str) for k in node) else None
    name = type(node).__name__
    if isinstance(node, FusedState):
        return "FusedState"
    return name if name in MOMENTS or name in SCHEDULES or name in WRAPPERS else None


def field(node: Any, name: str) -> Any:
    return node[name] if isinstance(node, Mapping) else getattr(node, name)


def scalar(x: Any) -> Any:
    """A 0-d array, out of the variable in which Flax NNX may hold it."""
    return jax.tree.leaves(x)[0]


def nodes(state: Any) -> Iterator[tuple[str, Any]]:
    """(kind, node) of all the parts of a state that we read, outer ones first."""
    for node in jax.tree.leaves(state, is_leaf=lambda x: kind_of(x) is not None):
        kind = kind_of(node)
        if kind is not None:
            yield kind, node
            if kind in WRAPPERS:
                yield from nodes(field(node, WRAPPERS[kind]))


def wanted(opt: Optimizer) -> str | None:
    """The kind of optax state that holds this optimizer's moments; None without moments."""
    if isinstance(opt.rule, Adam):
        return "ScaleByAdamState"
    if isinstance(opt.rule, Lion):
        return "ScaleByLionState"
    return "TraceState" if opt.rule.slots else None


def namesake(opt: Optimizer) -> optax.GradientTransformation:
    """The optax chain that stands for this optimizer; only its ``init`` means anything."""
    rule, mask = opt.rule, opt.decay_mask if opt.decay_mask is not None else weight_mask
    given = {h.name: h.value for h in opt.hyperparams.items}
    lr: Any = given["learning_rate"] if callable(given["learning_rate"]) else 1.0
    decay = optax.add_decayed_weights(1.0, mask)
    if isinstance(rule, Lars):
        trust = weight_mask if opt.trust_mask is None else opt.trust_mask
        return optax.lars(lr, 1.0, mask, trust_ratio_mask=trust)
    if isinstance(rule, Lamb):
        if opt.trust_mask is None:
            return optax.lamb(lr, mask=mask)
        ratio = optax.masked(optax.scale_by_trust_ratio(), opt.trust_mask)
        return optax.chain(optax.scale_by_adam(), decay, ratio, optax.scale_by_learning_rate(lr))
    if isinstance(rule, Lion):
        return optax.lion(lr, mask=mask)
    if isinstance(rule, Adam):
        if rule.decoupled:
            return optax.adamw(lr, mask=mask)
        return optax.chain(decay, optax.adam(lr)) if opt.decays else optax.adam(lr)
    assert isinstance(rule, Sgd)
    if not opt.decays:
        return optax.sgd(lr, 0.0 if rule.momentum else None)
    trace = optax.trace(0.0) if rule.momentum else optax.identity()
    return optax.chain(trace, decay, optax.scale_by_learning_rate(lr))


def filled(opt: Optimizer, like: Any, values: Mapping[str, Any], hyperparams: Mapping[str, Any], name: str) -> Any:
    """The optax state `like` with our moments, counts and hyperparameters in the places of its own.

    Args:
      values: as from `exported`.
      hyperparams: values by name, decays as b.
      name: what errors call `like`.

    Raises:
      ValueError: no place for the moments, or for those of a leaf, named by path; a leaf of another shape.
    """

    def put(old: Any, x: Any) -> Any:
        """A scalar in the variable in which Flax NNX may hold it; an array of its own, so that all may be donated."""
        return jax.tree.unflatten(jax.tree.structure(old), [jnp.array(x, copy=True)])

    def count(node: Any, name: str = "count") -> dict[str, Any]:
        return {name: put(getattr(node, name), values["count"])} if name in node._fields else {}

    placed: dict[str, set] = {slot: set() for slot in opt.rule.slots}

    def tree(old: Any, slot: str) -> Any:
        ours: Leaves = values[slot]
        new = []
        for path, x in leaves_by_path(old).items():
            if path in ours and jnp.shape(x) != jnp.shape(ours[path]):
                raise ValueError(
                    f"`{name}`: `{slot}` of leaf `{show(path)}` has shape {jnp.shape(x)}, expected "
                    f"{jnp.shape(ours[path])}"
                )
            placed[slot].add(path)
            # What we keep no moments of (integers, frozen leaves) has not moved since init.
            new.append(ours[path] if path in ours else jnp.zeros(jnp.shape(x), x.dtype))
        return jax.tree.unflatten(jax.tree.structure(old), new)

    def one(node: Any) -> Any:
        kind = kind_of(node)
        if kind is None:
            return node
        if kind == wanted(opt):
            new = {f: tree(getattr(node, f), slot) for f, slot in MOMENTS[kind].items()}
            return node._replace(**new, **count(node))
        if kind in MOMENTS:
            raise ValueError(f"`{name}`: expected {wanted(opt) or 'no moments'} for this optimizer, got {kind}")
        if kind in SCHEDULES:
            return node._replace(**count(node))
        inner = {WRAPPERS[kind]: every(getattr(node, WRAPPERS[kind]))}
        if kind in INJECT:
            old = node.hyperparams
            ours = {
                k: (v, hyperparams[k].astype(jnp.result_type(scalar(v)))) for k, v in old.items() if k in hyperparams
            }
            known = {k: put(*pair) for k, pair in ours.items()}
            inner |= {"hyperparams": {**old, **known}, **count(node)}
            if hasattr(node, "hyperparams_states"):
                inner["hyperparams_states"] = every(node.hyperparams_states)
            return node._replace(**inner)
        steps = values.get("micro_step", jnp.zeros((), jnp.int32))
        # Our sum of m shares of k is k/m of them in their mean; nothing gathered is a sum of zeros.
        sums = {p: x * _ratio(opt.accumulate, steps, x.dtype) for p, x in values.get("accumulated", {}).items()}
        acc = leaves_by_path(node.acc_grads)
        acc = [sums.get(p, jnp.zeros(jnp.shape(x), x.dtype)) for p, x in acc.items()]
        return node._replace(
            **inner,
            **count(node, "gradient_step"),
            mini_step=put(node.mini_step, steps),
            acc_grads=jax.tree.unflatten(jax.tree.structure(node.acc_grads), acc),
        )

    def every(state: Any) -> Any:
        return jax.tree.map(one, state, is_leaf=lambda x: kind_of(x) is not None)

    out = every(like)
    for slot, paths in placed.items():
        left = [p for p in values[slot] if p not in paths]
        if left:
            raise ValueError(
                f"`{name}` has no place for `{slot}` of leaf `{show(left[0])}`: expected one in its {wanted(opt)}"
            )
    return out


def _ratio(k: int, steps: Any, dtype: Any) -> Any:
    """k/steps, 0 for no steps."""
    return jnp.where(steps > 0, jnp.asarray(k, dtype) / jnp.maximum(steps, 1).astype(dtype), jnp.zeros((), dtype))


def read(opt: Optimizer, state: Any) -> tuple[dict[str, Leaves], dict[str, Any], dict[str, Any], Any]:
    """Moments by slot and path, counts by where they were, injected hyperparameters, and the MultiStepsState if any.

    Raises:
      ValueError: moments that are not there, of another optimizer, or twice for one leaf.
    """
    moments: dict[str, Leaves] = {}
    counts: dict[str, Any] = {}
    hyperparams: dict[str, Any] = {}
    multi, seen, want = None, [], wanted(opt)
    for kind, node in nodes(state):
        seen.append(kind)
        if kind == "FusedState":
            raise ValueError("`optax_state` holds a FusedState, which is this library's own: it needs no conversion")
        if kind == want:
            for f, slot in MOMENTS[kind].items():
                new, old = leaves_by_path(field(node, f)), moments.setdefault(slot, {})
                twice = [p for p in new if p in old]
                if twice:
                    raise ValueError(
                        f"`optax_state`: expected one {kind} with `{f}` of leaf `{show(twice[0])}`, got two: pass the part of it "
                        "that goes on"
                    )
                old |= new
        if kind == "MultiStepsState":
            multi = node
        elif kind in INJECT:
            hyperparams |= {k: scalar(v) for k, v in field(node, "hyperparams").items()}
        elif kind in MOMENTS and kind != want:
            raise ValueError(f"`optax_state`: expected {want or 'no moments'} for this optimizer, found {kind}")
        for f in ("count", "gradient_step"):
            if f in (node if isinstance(node, Mapping) else node._fields):
                counts[f"{kind}.{f}"] = scalar(field(node, f))
    if want is not None and not moments:
        found = ", ".join(dict.fromkeys(seen)) or type(state).__name__
        raise ValueError(f"`optax_state`: expected {want} with {' and '.join(MOMENTS[want])}, found only {found}")
    concrete = {k: int(np.asarray(v)) for k, v in counts.items() if not isinstance(v, Tracer)}
    if len(set(concrete.values())) > 1:
        raise ValueError(f"`optax_state`: expected one count, got {concrete}: pass the part of it that belongs to `tx`")
    return moments, counts, hyperparams, multi
