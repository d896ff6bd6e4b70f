"""Inside optax's combinators, and our own chain: the same numbers as optax's own optimizer in the same place."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fusedopt
from tests.helpers import assert_close, assert_equal, avals, case, normal, one_of_each, standard_promotion

STEPS = 5

# Five Adam steps of 0.1 in float32, in two orders of operations.
TOLERANCE = 2e-6


LR = 0.1


def params():
    return {
        "dense": {"kernel": jnp.asarray(normal((3, 5), 1)), "bias": jnp.asarray(normal((5,), 2))},
        "out": {"kernel": jnp.asarray(normal((5, 2), 3))},
    }


def gradient(t):
    return jax.tree.map(lambda x: jnp.cos(3.0 * x + t), params())


def run(tx, steps=STEPS, gradient=gradient, **extra):
    """Parameters and state after some steps in the optax protocol, in one compiled scan."""

    def body(carry, g):
        p, s = carry
        updates, s = tx.update(g, s, p, **extra)
        return (optax.apply_updates(p, updates), s), None

    grads = jax.tree.map(lambda *xs: jnp.stack(xs), *(gradient(float(t)) for t in range(steps)))
    with standard_promotion():  # optax's parts promote
        start = params(), tx.init(params())
        return jax.jit(lambda c, g: jax.lax.scan(body, c, g)[0])(start, grads)


def adamw():
    return fusedopt.adamw(LR, weight_decay=0.1)


def twin():
    return optax.adamw(LR, weight_decay=0.1, mask=fusedopt.weight_mask)


COMBINATORS = {
    "chain with clipping": lambda tx: optax.chain(optax.clip_by_global_norm(0.5), tx),
    "named chain": lambda tx: optax.named_chain(("clip", optax.clip(0.3)), ("opt", tx)),
    "ema behind": lambda tx: optax.chain(tx, optax.ema(0.9)),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "apply_every": lambda tx: optax.chain(tx, optax.apply_every(2)),
    "conditionally_transform": lambda tx: optax.conditionally_transform(tx, lambda count: count % 2 == 0),
    "conditionally_mask": lambda tx: optax.conditionally_mask(tx, lambda count: count > 1),
    "with_extra_args_support": optax.with_extra_args_support,
    "masked": lambda tx: optax.masked(tx, {"dense": {"kernel": True, "bias": True}, "out": False}),
    "masked by a function": lambda tx: optax.masked(tx, fusedopt.weight_mask),
    "partition": lambda tx: optax.partition({"a": tx, "b": optax.sgd(0.01)}, {"dense": "a", "out": "b"}),
    "multi_transform": lambda tx: optax.multi_transform(
        {"a": tx, "b": optax.set_to_zero()}, lambda p: jax.tree.map(lambda x: "a" if x.ndim == 2 else "b", p)
    ),
    "centralize": lambda tx: optax.chain(optax.centralize(), tx),
    "scale behind": lambda tx: optax.chain(tx, optax.scale(0.5)),
}


OFTEN = ("chain with clipping", "MultiSteps", "apply_if_finite", "conditionally_transform", "masked", "partition")


@pytest.mark.parametrize(
    "combinator", [pytest.param(c, marks=[] if c in OFTEN else [pytest.mark.slow]) for c in COMBINATORS]
)
def test_a_combinator_around_ours_is_that_around_optaxs(combinator):
    wrap = COMBINATORS[combinator]
    got, _ = run(wrap(adamw()))
    want, _ = run(wrap(twin()))
    assert_close(got, want, TOLERANCE)


@pytest.mark.parametrize("name", ["adamw", pytest.param("momentum", marks=pytest.mark.slow)])
def test_schedule_free(name):
    inner, other = {
        "adamw": (fusedopt.adamw(LR, b1=0.0), optax.adamw(LR, b1=0.0, mask=fusedopt.weight_mask)),
        "momentum": (fusedopt.sgd(LR), optax.sgd(LR)),
    }[name]
    got, got_state = run(optax.contrib.schedule_free(inner, LR, b1=0.9))
    want, want_state = run(optax.contrib.schedule_free(other, LR, b1=0.9))
    assert_close(got, want, TOLERANCE)
    with standard_promotion():
        evaluated = optax.contrib.schedule_free_eval_params
        assert_close(evaluated(got_state, got), evaluated(want_state, want), TOLERANCE)


@pytest.mark.parametrize(
    "combinator", [pytest.param(c, marks=[] if c in ("MultiSteps", "partition") else [pytest.mark.slow]) for c in OFTEN]
)
def test_r03_states_of_wrappers_keep_their_types(combinator):
    """Shape, dtype and weak type of every leaf are those of init after a step, so nothing is compiled twice."""
    tx = COMBINATORS[combinator](adamw())
    with standard_promotion():
        state = tx.init(params())
        step, traces = jax.jit(tx.update), []
        for t in range(3):
            _, new = step(gradient(float(t)), state, params())
            traces.append(step._cache_size())
            if combinator != "conditionally_transform":  # optax 0.2.8 makes a weak counter of its own here
                assert avals(new) == avals(state)
            state = new
    assert traces[-1] == traces[1]


def test_r55_multi_steps_with_skip_not_finite():
    """A NaN among the micro-steps is passed over; without the skip function optax keeps NaN for ever, and so our guard
    skips for ever: documented."""
    values = [np.nan, 1.0, 1.0, 1.0, 1.0]

    def grad(t):
        return {"w": jnp.full((1, 2), values[int(t)])}

    def run_multi(skip):
        tx = optax.MultiSteps(fusedopt.sgd(1.0), 2, should_skip_update_fn=skip)
        p = {"w": jnp.ones((1, 2))}
        state = tx.init(p)
        with standard_promotion():
            step = jax.jit(tx.update)
            for t in range(5):
                updates, state = step(grad(t), state, p)
                p = optax.apply_updates(p, updates)
        return p, state

    p, _ = run_multi(optax.skip_not_finite)
    np.testing.assert_array_equal(p["w"], -1.0)  # two full steps of the mean gradient 1
    p, state = run_multi(None)
    np.testing.assert_array_equal(p["w"], 1.0)  # not NaN, as with optax.sgd: the steps were skipped
    assert int(state.inner_opt_state.total_skipped) > 0


def test_r42_apply_if_finite_around_ours():
    """optax counts, gives up after two bad steps and lets the third through; our own guard still skips it."""
    tx = optax.apply_if_finite(fusedopt.adam(LR), 2)
    p, step = {"w": jnp.ones((1, 1))}, jax.jit(tx.update)
    state, consecutive, totals, moved = tx.init(p), [], [], []
    for g in (1.0, np.nan, np.inf, np.nan, 1.0):
        updates, state = step({"w": jnp.full((1, 1), g)}, state, p)
        consecutive.append(int(state.notfinite_count))
        totals.append(int(state.total_notfinite))
        moved.append(bool(updates["w"][0, 0] != 0))
    assert consecutive == [0, 1, 2, 3, 0]
    assert totals == [0, 1, 2, 3, 3]
    assert moved == [True, False, False, False, True]
    assert int(state.inner_state.count) == 2
    assert int(state.inner_state.total_skipped) == 1  # the one that optax let through


def test_r88_r91_masked_around_a_masked_optimizer():
    """Nested masks are one combined mask, and the MaskedNodes that optax leaves keep the structure."""
    decays = {"dense": {"kernel": True, "bias": False}, "out": {"kernel": False}}
    outer = {"dense": True, "out": False}

    def factory(module):
        return module.adamw(LR, weight_decay=0.5, mask=lambda p: jax.tree.map(lambda x: x.ndim == 2, p))

    got, state = run(optax.masked(factory(fusedopt), outer))
    want, _ = run(optax.masked(factory(optax), outer))
    assert_close(got, want, TOLERANCE)
    assert [b.shape for b in state.inner_state.mu] == [(1024,), (1024,)]  # `out` has no slots
    single, _ = run(fusedopt.adamw(LR, weight_decay=0.5, mask=decays))
    assert_close(single["dense"], got["dense"], TOLERANCE)


INJECTED = ("sgd", "momentum", "adam", "adamw", "lars")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "adamw" else [pytest.mark.slow]) for n in INJECTED])
def test_inject_hyperparams(name):
    """Every number becomes state of optax; ours uses what it is given at each step."""
    factory = {"momentum": functools.partial(fusedopt.sgd, momentum=0.9)}.get(name) or getattr(fusedopt, name)
    injected = optax.inject_hyperparams(factory, hyperparam_dtype=jnp.float32)
    tx = injected(learning_rate=LR)
    got, state = run(tx)
    want, _ = run(factory(LR))
    assert_close(got, want, TOLERANCE)
    assert avals(state.inner_state) == avals(tx.init(params()).inner_state)
    state.hyperparams["learning_rate"] = jnp.float32(0.0)
    with standard_promotion():
        updates, _ = jax.jit(tx.update)(gradient(0.0), state, params())
    if name != "lars":  # the velocity of LARS goes on: the rate is inside it
        assert_close(updates, jax.tree.map(jnp.zeros_like, params()), 0.0)


def test_r10_an_injected_schedule_starts_at_zero():
    p = {"w": jnp.ones((1, 2))}

    def schedule(count):
        return count.astype(jnp.float32)

    for tx in (fusedopt.sgd(schedule), optax.inject_hyperparams(fusedopt.sgd)(schedule)):
        state, seen = tx.init(p), []
        for _ in range(3):
            updates, state = tx.update(p, state, p)
            seen.append(float(updates["w"][0, 0]))
        assert seen == [0.0, -1.0, -2.0]


def test_r06_injected_hyperparameters_with_bfloat16_parameters():
    """In bfloat16, 0.999 is 1: optax divides by 1 - 1. Ours refuses and says how to inject float32."""
    p = {"w": jnp.ones((1, 2), jnp.bfloat16)}
    with pytest.raises(TypeError, match=r"hyperparam_dtype=jnp\.float32"):
        optax.inject_hyperparams(fusedopt.adamw)(1e-3).init(p)
    with standard_promotion():
        tx = optax.inject_hyperparams(fusedopt.adamw, hyperparam_dtype=jnp.float32)(1e-3, weight_decay=0.0)
        state = tx.init(p)
        updates, after = tx.update(p, state, p)
        theirs = optax.inject_hyperparams(optax.adamw)(1e-3)
        assert bool(jnp.all(jnp.isnan(theirs.update(p, theirs.init(p), p)[0]["w"])))
    np.testing.assert_allclose(np.asarray(updates["w"], np.float32), -1e-3, rtol=4e-3)  # one rounding of bfloat16
    assert avals(after.inner_state) == avals(state.inner_state)


CORE = ("sgd", "adamw")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in CORE else [pytest.mark.slow]) for n in one_of_each(CORE)]
)
def test_unknown_extra_arguments_are_ignored(name):
    tx, p = case(name).make(LR), params()
    state = tx.init(p)
    want = tx.update(gradient(0.0), state, p)
    assert_equal(tx.update(gradient(0.0), state, p, value=3.0, grad_fn=lambda x: x, anything="text"), want)


def test_extra_arguments_reach_it_through_a_chain():
    tx = optax.chain(optax.clip_by_global_norm(1e9), fusedopt.sgd(1.0))
    p = {"w": jnp.ones((1, 2))}
    with standard_promotion():
        updates, state = tx.update(p, tx.init(p), p, loss_scale=4.0, value=1.0)
        np.testing.assert_array_equal(updates["w"], -0.25)
        _, state = tx.update(p, state, p, has_nan=True)
    assert int(state[1].total_skipped) == 1


# -------------------------------------------------------------------------------- chain of our own


@pytest.mark.parametrize("flat", [False, True], ids=["tree", "flat"])
def test_our_chain_keeps_apply(flat):
    tx = fusedopt.chain(optax.clip_by_global_norm(0.5), adamw())
    p, g = params(), gradient(0.0)
    if flat:
        p, g = fusedopt.pack(p, tx), fusedopt.pack(g, tx)
    with standard_promotion():
        state = tx.init(p)
        updates, one = jax.jit(tx.update)(g, state, p)
        out, two = jax.jit(tx.apply)(g, state, p)
        assert_close(out, optax.apply_updates(p, updates), 1e-6)
        assert_close(one, two, 1e-6)
        want, _ = run(optax.chain(optax.clip_by_global_norm(0.5), twin()), steps=1)
    assert_close(out.tree if flat else out, want, TOLERANCE)
    assert float(tx.hyperparams(one)["learning_rate"]) == np.float32(LR)
    assert float(tx.hyperparams(tx.set_hyperparams(one, learning_rate=0.5))["learning_rate"]) == 0.5


def test_our_chain_nests():
    inner = fusedopt.chain(optax.clip(1.0), fusedopt.lars(LR))
    tx = fusedopt.chain(optax.scale(2.0), inner)
    p = params()
    state = tx.init(p)
    _, state = jax.jit(tx.update)(gradient(0.0), state, p)
    assert set(tx.trust_ratios(state)) == {("dense", "kernel"), ("out", "kernel")}
    assert float(tx.hyperparams(tx.set_hyperparams(state, momentum=0.5))["momentum"]) == 0.5


def test_our_chain_unscales_before_the_transformations_in_front():
    p = {"w": jnp.zeros((1, 2)), "none": None}
    g = {"w": jnp.full((1, 2), 300.0, jnp.float16), "none": None}
    tx = fusedopt.chain(optax.clip(1.0), fusedopt.sgd(1.0))
    u, state = jax.jit(tx.update)(g, tx.init(p), p, loss_scale=jnp.float32(1000.0))
    np.testing.assert_allclose(u["w"], -0.3, rtol=2.5e-7)
    for scale in (jnp.inf, jnp.nan):
        new, state = jax.jit(tx.apply)(g, state, p, loss_scale=jnp.float32(scale))
        assert state[1].skipped
        np.testing.assert_array_equal(new["w"], 0.0)


def test_R64_a_skipped_step_keeps_the_states_of_transformations_in_front():
    p = {"w": jnp.zeros((1, 2))}
    tx = fusedopt.chain(optax.trace(0.5), optax.add_noise(0.1, 0.5, 3), fusedopt.sgd(1.0))
    step, state = jax.jit(tx.apply), tx.init(p)
    with standard_promotion():
        p, state = step({"w": jnp.ones((1, 2))}, state, p)
    for g, extra in ((jnp.nan, {}), (1.0, {"has_nan": jnp.array(1)})):
        with standard_promotion():
            new, after = step({"w": jnp.full((1, 2), g)}, state, p, **extra)
        assert after[-1].skipped
        assert_equal(new, p)
        assert_equal(jax.tree.map(_data, after[:-1]), jax.tree.map(_data, state[:-1]))


def _data(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


# ----------------------------------------------------------------------------- optax's state helpers


def test_r102_tree_get_and_tree_set():
    tx = optax.chain(optax.clip(1.0), adamw())
    state = tx.init(params())
    with standard_promotion():
        for _ in range(3):
            _, state = tx.update(gradient(0.0), state, params())
    assert int(optax.tree.get(state, "count")) == 3
    assert_equal(optax.tree.get(state, "mu"), state[1].mu)
    assert_equal(optax.tree.get(state, "nu"), state[1].nu)
    changed = optax.tree.set(state, count=jnp.int32(7))
    assert int(changed[1].count) == 7
    assert_equal(changed[1].mu, state[1].mu)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adamw", "lars"])
def test_r102_tree_map_params(name):
    tx = optax.chain(optax.clip(1.0), case(name).make(LR))
    state = tx.init(params())
    doubled = optax.tree_map_params(tx, lambda x: x + 1, state)
    assert jax.tree.structure(doubled) == jax.tree.structure(state)
    assert int(doubled[1].count) == 0
    assert_equal(doubled[1].hyperparams, state[1].hyperparams)
    for slot in ("mu", "nu"):
        assert_equal(getattr(doubled[1], slot), jax.tree.map(lambda x: x + 1, getattr(state[1], slot)))
    marks = optax.tree_map_params(tx, lambda _: 1, state, transform_non_params=lambda _: 0)
    assert sum(jax.tree.leaves(marks)) == len(jax.tree.leaves((state[1].mu, state[1].nu)))


def test_r102_equal_trees_have_states_of_equal_structure():
    tx = adamw()
    assert jax.tree.structure(tx.init(params())) == jax.tree.structure(tx.init(gradient(1.0)))
    assert jax.tree.structure(adamw().init(params())) == jax.tree.structure(tx.init(params()))
