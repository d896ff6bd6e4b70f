"""Random trees, optimizers, options, gradients and wrappers against a float64 reference of one leaf at a time.

`make test` draws 20 of them, `make test-all` 150, and with FUSEDOPT_EXAMPLES=1000 as many as that.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fusedopt
from tests.helpers import (
    adam_formula,
    assert_equal,
    avals,
    is_weight,
    lamb_formula,
    lars_formula,
    lion_formula,
    paths_of,
    sgd_formula,
    standard_promotion,
)

STEPS = 20


class Pair(NamedTuple):
    kernel: Any
    bias: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: Any
    bias: Any


# ------------------------------------------------------------------------------------------- what is drawn

DTYPES = (np.float32, np.float32, jnp.bfloat16, np.float16)
SHAPES = ((), (1,), (3,), (130,), (0,), (2, 3), (7, 1), (0, 4), (1, 129), (2, 1, 3), (2, 3, 1, 2))


@dataclasses.dataclass(frozen=True)
class Leaf:
    shape: tuple[int, ...]
    dtype: Any  # np.int32 for a leaf that is carried along


leaves = st.one_of(
    st.builds(Leaf, st.sampled_from(SHAPES), st.sampled_from(DTYPES)),
    st.builds(Leaf, st.sampled_from(((), (3,))), st.just(np.int32)),
    st.none(),
)
KEYS = st.sampled_from(("kernel", "bias", "scale", "embedding", "beta"))


def nested(children):
    return st.one_of(
        st.dictionaries(KEYS, children, max_size=3),
        st.lists(children, max_size=2),
        st.lists(children, max_size=2).map(tuple),
        st.builds(Pair, children, children),
        st.builds(Layer, children, children),
        st.dictionaries(KEYS, children, max_size=2).map(flax.core.freeze),
    )


trees = st.recursive(leaves, nested, max_leaves=6).filter(lambda tree: tree is not None)

# The optimizers, each with the formula of `helpers` and what it reads.
ADAM = {"b1": 0.85, "b2": 0.95, "eps": 1e-4}
OPTIMIZERS = {
    "sgd": (lambda **o: fusedopt.sgd(0.05, weight_decay=0.1, **o), sgd_formula, {"lr": 0.05, "wd": 0.1}),
    "nesterov": (
        lambda **o: fusedopt.sgd(0.05, 0.8, True, weight_decay=0.1, **o),
        sgd_formula,
        {"lr": 0.05, "wd": 0.1, "momentum": 0.8, "nesterov": True},
    ),
    "adam": (lambda **o: fusedopt.adam(0.02, **ADAM, **o), adam_formula, {"lr": 0.02, **ADAM, "wd": 0.0}),
    "adamw": (
        lambda **o: fusedopt.adamw(0.02, weight_decay=0.1, **ADAM, **o),
        adam_formula,
        {"lr": 0.02, **ADAM, "wd": 0.1},
    ),
    "lamb": (
        lambda **o: fusedopt.lamb(0.02, weight_decay=0.1, **ADAM, **o),
        lamb_formula,
        {"lr": 0.02, **ADAM, "wd": 0.1},
    ),
    "lars": (
        lambda **o: fusedopt.lars(0.5, 0.1, trust_coefficient=0.05, eps=1e-3, **o),
        lars_formula,
        {"lr": 0.5, "wd": 0.1, "tc": 0.05, "eps": 1e-3, "momentum": 0.9},
    ),
    "lion": (
        lambda **o: fusedopt.lion(0.01, weight_decay=0.1, **o),
        lion_formula,
        {"lr": 0.01, "wd": 0.1, "b1": 0.9, "b2": 0.99},
    ),
}
WRAPPERS = ("none", "chain", "MultiSteps", "masked", "inject")


@dataclasses.dataclass(frozen=True)
class Problem:
    tree: Any
    optimizer: str
    mode: str  # update, apply, flat
    wrapper: str
    driver: str  # jit, scan, eager
    solo_from: int | None
    masters: bool
    ema: bool
    clip: float | None
    accumulate: int
    loss_scale: float | None
    bad: dict[int, tuple[int, float]]  # step -> (position, value)
    seed: int


@st.composite
def problems(draw):
    wrapper = draw(st.sampled_from(WRAPPERS))
    # What wraps an optimizer in optax speaks its protocol only, and loss scales or accumulation of our own pass it by.
    alone = wrapper in ("none", "chain")
    mode = draw(st.sampled_from(("update", "apply", "flat"))) if alone else "update"
    tree = draw(trees)
    if wrapper == "MultiSteps":  # it adds gradients up in their own dtype
        tree = jax.tree.map(lambda x: Leaf(x.shape, np.float32) if is_float(x) else x, tree, is_leaf=is_leaf)
    return Problem(
        tree=tree,
        optimizer=draw(st.sampled_from(tuple(OPTIMIZERS))),
        mode=mode,
        wrapper=wrapper,
        driver=draw(st.sampled_from(("jit", "jit", "jit", "scan", "scan", "eager"))),
        solo_from=draw(st.sampled_from((None, 3, 16384))),
        masters=draw(st.booleans()),
        ema=draw(st.booleans()),
        clip=draw(st.sampled_from((None, None, 0.5, 4.0))),
        accumulate=draw(st.sampled_from((1, 1, 3))) if alone else 1,
        loss_scale=draw(st.sampled_from((None, 1.0, 64.0, 0.25))),
        bad={}
        if wrapper == "MultiSteps"
        else draw(
            st.dictionaries(
                st.integers(0, STEPS - 1),
                st.tuples(st.integers(0, 400), st.sampled_from((np.nan, np.inf, -np.inf))),
                max_size=4,
            )
        ),
        seed=draw(st.integers(0, 99)),
    )


# --------------------------------------------------------------------------------------------- what happens


def is_leaf(x):
    return x is None or isinstance(x, Leaf)


def is_float(leaf):
    return leaf is not None and leaf.dtype != np.int32


def numbers(problem):
    """Parameters, and gradients with a leading axis, in which the bad values are."""
    rng = np.random.default_rng(problem.seed)
    described, treedef = jax.tree.flatten(problem.tree, is_leaf=is_leaf)
    params, grads = [], []
    for leaf in described:
        if leaf is None:
            params.append(None)
            grads.append(None)
        elif not is_float(leaf):
            params.append(jnp.arange(int(np.prod(leaf.shape)), dtype=jnp.int32).reshape(leaf.shape))
            grads.append(np.zeros((STEPS, *leaf.shape), np.int32))
        else:
            params.append(jnp.asarray(0.5 * rng.standard_normal(leaf.shape) + 1, leaf.dtype))
            grads.append(np.array(0.5 + rng.standard_normal((STEPS, *leaf.shape)), leaf.dtype))
    scale = problem.loss_scale or 1.0
    grads = [
        g if g is None or g.dtype == np.int32 else np.asarray(g.astype(np.float32) * scale, g.dtype) for g in grads
    ]
    places = [(i, j) for i, x in enumerate(described) if is_float(x) for j in range(int(np.prod(x.shape)))]
    skipped = set()
    for step, (position, value) in problem.bad.items():
        value = np.nan if problem.wrapper == "chain" else value  # optax.clip mends an infinity
        if places:
            i, j = places[position % len(places)]
            grads[i][step].reshape(-1)[j : j + 1] = value
            skipped.add(step)
    return described, treedef, params, grads, skipped


def reference(problem, described, treedef, params, grads, skipped):
    """Parameters and averages after all steps, in float64 but for what rounds parameters that have no master."""
    _, formula, h = OPTIMIZERS[problem.optimizer]
    named = treedef.unflatten([np.zeros(()) if x is None else np.zeros(x.shape) for x in described])
    weights = [is_weight(p, x) for p, x in zip(paths_of(named), jax.tree.leaves(named), strict=True)]
    live = [i for i, x in enumerate(described) if is_float(x)]
    if problem.wrapper == "masked":
        live = [i for i in live if weights[i]]
    w = {i: np.asarray(params[i], np.float64) for i in live}
    ema, slots, t = dict(w), {i: {} for i in live}, 0
    k = 2 if problem.wrapper == "MultiSteps" else problem.accumulate
    waiting = []
    for step in range(STEPS):
        if step in skipped and any(
            np.size(g[step]) and not np.isfinite(g[step].astype(np.float64)).all()
            for i, g in enumerate(grads)
            if i in live
        ):
            continue
        g = {i: grads[i][step].astype(np.float64) / (problem.loss_scale or 1.0) for i in live}
        if problem.wrapper == "chain":
            g = {i: np.clip(x, -0.75, 0.75) for i, x in g.items()}
        waiting.append(g)
        if len(waiting) < k:
            continue
        g = {i: np.mean([x[i] for x in waiting], axis=0) for i in live}
        waiting, t = [], t + 1
        if problem.clip is not None:
            norm = np.sqrt(sum(np.sum(x * x) for x in g.values()))
            g = {i: x * (problem.clip / norm) if norm > problem.clip else x for i, x in g.items()}
        for i in live:
            own = {**h, "wd": h["wd"] if weights[i] else 0.0}
            u, slots[i] = formula(w[i], g[i], slots[i], own, t, weights[i])
            w[i] = w[i] + u
            if described[i].dtype != np.float32 and not problem.masters:
                u = u if problem.mode != "update" else u.astype(described[i].dtype).astype(np.float64)
                w[i] = w[i].astype(described[i].dtype).astype(np.float64)
            ema[i] = 0.8 * ema[i] + 0.2 * w[i]
    return w, ema, t


def optimizer(problem):
    make = OPTIMIZERS[problem.optimizer][0]
    options = {
        "packing": fusedopt.Packing(solo_from=problem.solo_from),
        "master_weights": problem.masters,
        "ema_decay": 0.8 if problem.ema else None,
        "clip_norm": problem.clip,
        "accumulate": problem.accumulate if problem.accumulate > 1 else None,
    }
    if problem.wrapper == "inject":
        inject = optax.inject_hyperparams(
            lambda clip_norm: make(**{**options, "clip_norm": clip_norm}), hyperparam_dtype=jnp.float32
        )
        return inject(clip_norm=1e18 if problem.clip is None else problem.clip)
    tx = make(**options)
    if problem.wrapper == "chain":
        return fusedopt.chain(optax.clip(0.75), tx)
    if problem.wrapper == "MultiSteps":
        return optax.MultiSteps(tx, 2).gradient_transformation()
    if problem.wrapper == "masked":
        return optax.masked(tx, fusedopt.weight_mask)
    return tx


def run(problem, tx, treedef, params, grads):
    """Parameters and state before the first step and after each."""

    def step(held, state, g):
        g = treedef.unflatten(g)
        if problem.mode == "flat":
            g = fusedopt.pack(g, tx)
        if problem.mode == "update":
            updates, state = tx.update(g, state, held, **extra)
            return optax.apply_updates(held, updates), state
        return tx.apply(g, state, held, **extra)

    def scanned(held, state, stacked):
        # What a step begins with is handed out: XLA may compute twice what it ends with, with other roundings.
        return jax.lax.scan(lambda carry, g: (step(*carry, g), carry), (held, state), stacked, length=STEPS)

    extra = {} if problem.loss_scale is None else {"loss_scale": jnp.float32(problem.loss_scale)}
    held = treedef.unflatten(params)
    held = fusedopt.pack(held, tx) if problem.mode == "flat" else held
    trail = [(held, tx.init(held))]
    stacked = [None if g is None else jnp.asarray(g) for g in grads]
    if problem.driver == "scan":
        last, before = jax.jit(scanned)(*trail[0], stacked)
        return [*(jax.tree.map(lambda x, n=n: x[n], before) for n in range(STEPS)), last]
    taken = jax.jit(step) if problem.driver == "jit" else step
    for n in range(STEPS):
        trail.append(taken(*trail[-1], [None if g is None else g[n] for g in stacked]))
    return trail


def find_state(problem, state):
    if problem.wrapper == "chain":
        return state[-1]
    if problem.wrapper in ("masked", "inject", "MultiSteps"):
        state = state.inner_opt_state if problem.wrapper == "MultiSteps" else state.inner_state
    return state


def types(tree):
    return jax.tree.structure(tree), avals(jax.tree.leaves(tree))


def check(problem):
    described, treedef, params, grads, skipped = numbers(problem)
    tx = optimizer(problem)
    with standard_promotion(), jax.numpy_rank_promotion("allow"):
        trail = run(problem, tx, treedef, params, grads)
    want, want_ema, count = reference(problem, described, treedef, params, grads, skipped)

    # Structures and types never change.
    assert all(types(x) == types(trail[0]) for x in trail)
    last = trail[-1][0].tree if problem.mode == "flat" else trail[-1][0]
    assert jax.tree.structure(last, is_leaf=lambda x: x is None) == treedef

    # A skipped step leaves every bit as it was.
    bad = {n for n in skipped if any(not np.isfinite(grads[i][n].astype(np.float64)).all() for i in want)}
    for n in bad:
        (held, state), (new, after) = trail[n], trail[n + 1]
        old, after = find_state(problem, state), find_state(problem, after)
        assert after.skipped
        assert_equal(after._replace(skipped=old.skipped, total_skipped=old.total_skipped), old)
        if problem.wrapper != "masked":  # which hands on what is not its own
            assert_equal(new, held)
    state = find_state(problem, trail[-1][1])
    assert (state.total_skipped, state.count) == (len(bad), count)

    # The numbers.
    got = jax.tree.leaves(last, is_leaf=lambda x: x is None)
    compare(problem, described, want, got)
    for i, leaf in enumerate(described):
        if not is_float(leaf):
            assert_equal(got[i], params[i])
    if problem.ema and problem.wrapper in ("none", "chain"):
        average = tx.ema_params(trail[-1][1], trail[-1][0])
        average = average.tree if problem.mode == "flat" else average
        compare(problem, described, want_ema, jax.tree.leaves(average, is_leaf=lambda x: x is None))


def compare(problem, described, want, got):
    for i, w in want.items():
        # float32: roundings of 20 steps. 16 bits: the last rounding, and without a master one of each step that falls
        # the other way.
        low = described[i].dtype != np.float32
        tolerance = (6 if not problem.masters else 1) * float(jnp.finfo(described[i].dtype).eps) if low else 4e-6
        scale = max(1.0, np.max(np.abs(w), initial=0.0))
        np.testing.assert_allclose(np.asarray(got[i], np.float64), w, rtol=0, atol=tolerance * scale)


HOSTILE = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=50, **HOSTILE)
@given(problems())
def test_a_few_random_problems(problem):
    check(problem)


@pytest.mark.slow
@settings(max_examples=int(os.environ.get("FUSEDOPT_EXAMPLES", "100")), **HOSTILE)
@given(problems())
def test_many_random_problems(problem):
    check(problem)
