"""Hyperparameters are operands: no retrace, one program for all values, and a stated order of precedence."""

from __future__ import annotations

import decimal
import functools
import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fusedopt
from fusedopt.hyperparams import Decay, bias_correction, decay_rate
from tests.helpers import OPTIMIZERS, assert_equal, avals, case, counted, normal, standard_promotion

# Two or three roundings of float32, relative.
ULPS = 2.5e-7

PARAMS = {"w": jnp.asarray(normal((3, 5))), "b": jnp.asarray(normal((5,), 1))}
GRADS = {"w": jnp.asarray(normal((3, 5), 2)), "b": jnp.asarray(normal((5,), 3))}


def row(*values, dtype=jnp.float32):
    return jnp.asarray([values], dtype)


# ------------------------------------------------------------------------------- one program


def test_R01_changing_the_learning_rate_does_not_retrace():
    g, p = jnp.array([2.0]), jnp.array([1.0])
    tx = fusedopt.adam(1.0)
    state = tx.init(p)

    def by_keyword(rate):
        return tx.update(g, state, p, learning_rate=rate)[0]

    def by_state(rate):
        return tx.update(g, tx.set_hyperparams(state, learning_rate=rate), p)[0]

    def by_factory(rate):
        return fusedopt.adam(rate).update(g, state, p)[0]

    for way in (by_keyword, by_state, by_factory):
        step, traces = counted(way)
        step = jax.jit(step)
        updates = [step(jnp.float32(rate)) for rate in (0.1, 0.2, 0.3)]
        np.testing.assert_allclose(np.ravel(updates), [-0.1, -0.2, -0.3], rtol=ULPS)
        assert len(traces) == 1


@pytest.mark.parametrize(
    ("factory", "first", "second"),
    [
        (fusedopt.adamw, {"learning_rate": 1e-3}, {"learning_rate": 0.0}),
        (fusedopt.adamw, {"learning_rate": 1e-3, "weight_decay": 0.0}, {"learning_rate": 1e-3, "weight_decay": 0.1}),
        (
            fusedopt.adamw,
            {"learning_rate": 1, "b1": 0, "b2": 0.5, "eps": 0, "eps_root": 0},
            {"learning_rate": 0.1, "b1": 0.9, "b2": 0.999, "eps": 1e-8, "eps_root": 1e-8},
        ),
        (fusedopt.sgd, {"learning_rate": 1e-3, "momentum": 0.0}, {"learning_rate": 1.0, "momentum": 1.0}),
        (
            fusedopt.lars,
            {"learning_rate": 1.0, "weight_decay": 0.0, "eps": 0.0, "max_trust_ratio": 1},
            {"learning_rate": 2.0, "weight_decay": 0.1, "eps": 1e-3, "max_trust_ratio": 50.0},
        ),
    ],
    ids=["learning rate", "weight decay of 0", "adamw", "sgd", "lars"],
)
def test_R02_two_constants_give_the_same_program(factory, first, second):
    def text(options):
        tx = factory(**options)
        return jax.jit(tx.update).lower(GRADS, tx.init(PARAMS), PARAMS).as_text()

    assert text(first) == text(second)


def test_R02_a_group_hyperparameter_is_an_operand_too():
    def text(decay, scale):
        group = fusedopt.Group("g", {"w": True, "b": False}, weight_decay=decay, learning_rate_scale=scale)
        tx = fusedopt.adamw(1e-3, groups=[group])
        return jax.jit(tx.update).lower(GRADS, tx.init(PARAMS), PARAMS).as_text()

    assert text(0.1, 0.5) == text(0.2, 2.0)


@pytest.mark.parametrize("name", [c.name for c in OPTIMIZERS])
def test_R03_a_state_keeps_its_avals(name):
    tx = case(name).make(1e-2)
    state = tx.init(PARAMS)
    assert not any(x.weak_type for x in jax.tree.leaves(state))
    for step, name in ((tx.update, "updates"), (tx.apply, "params")):
        out, new = jax.eval_shape(step, GRADS, state, PARAMS)
        assert avals(new) == avals(state)
        assert avals(out) == avals(PARAMS), name
    assert avals(jax.eval_shape(tx.init, PARAMS)) == avals(state)


@pytest.mark.parametrize("name", ["adamw", "lars"])
def test_R03_the_step_is_compiled_once(name):
    tx = case(name).make(1e-2)
    state, update = tx.init(PARAMS), jax.jit(tx.update)
    for _ in range(3):
        _, state = update(GRADS, state, PARAMS)
    assert update._cache_size() == 1


@pytest.mark.parametrize(
    "wrap",
    [
        lambda: fusedopt.chain(optax.clip_by_global_norm(1.0), fusedopt.adamw(1e-2)),
        lambda: optax.chain(optax.clip_by_global_norm(1.0), fusedopt.adamw(1e-2)),
        lambda: optax.inject_hyperparams(fusedopt.lars)(1e-2),
        lambda: optax.inject_hyperparams(fusedopt.adamw)(optax.linear_schedule(1.0, 0.0, 9)),
        lambda: fusedopt.adamw(optax.linear_schedule(1.0, 0.0, 9), weight_decay=jnp.float32(0.1)),
    ],
    ids=["chain", "optax.chain", "inject_hyperparams", "injected schedule", "schedule and array"],
)
def test_R03_a_wrapped_state_keeps_its_avals_too(wrap):
    with standard_promotion():
        tx = wrap()
        state = jax.tree.map(jnp.asarray, tx.init(PARAMS))
        _, new = jax.eval_shape(tx.update, GRADS, state, PARAMS)
        assert avals(new) == avals(state)


def test_R05_a_decay_may_change_every_step_without_a_retrace():
    tx = fusedopt.adam(0.1, eps=0.0)
    p = row(1.0)
    step, traces = counted(lambda g, state, b1: tx.update(g, state, p, b1=b1))
    step = jax.jit(step)
    state, m, v = tx.init(p), 0.0, 0.0
    for t, (b1, g) in enumerate([(0.9, 1.0), (0.95, -2.0), (0.9, 0.5)], 1):
        u, state = step(row(g), state, jnp.float32(b1))
        # This step's b1, in m and in 1 - b1^t alike.
        m, v = b1 * m + (1 - b1) * g, 0.999 * v + 0.001 * g * g
        want = -0.1 * (m / (1 - b1**t)) / np.sqrt(v / (1 - 0.999**t))
        # 1 - b1 of a b1 that arrives in float32 has the rounding of b1, 6e-8/2, divided by 1 - b1.
        np.testing.assert_allclose(u[0, 0], want, rtol=2e-6)
    assert len(traces) == 1
    np.testing.assert_allclose(tx.hyperparams(state)["b1"], 0.9, rtol=ULPS)


def test_R09_each_member_of_an_ensemble_has_its_own_learning_rate():
    g = p = jnp.ones((2, 3))
    rates = jnp.array([0.1, 0.2])
    tx = fusedopt.adam(1.0)
    state = jax.vmap(tx.init)(p)
    updates, _ = jax.jit(jax.vmap(lambda g, s, p, rate: tx.update(g, s, p, learning_rate=rate)))(g, state, p, rates)
    np.testing.assert_allclose(updates, [[-0.1] * 3, [-0.2] * 3], rtol=ULPS)
    state = jax.vmap(lambda s, rate: tx.set_hyperparams(s, learning_rate=rate))(state, rates)
    updates, _ = jax.jit(jax.vmap(tx.update))(g, state, p)
    np.testing.assert_allclose(updates, [[-0.1] * 3, [-0.2] * 3], rtol=ULPS)


# --------------------------------------------------------------------------------- schedules


def test_R10_a_schedule_sees_the_counts_from_0():
    g, p = jnp.ones(2), jnp.ones(2)
    identity = lambda count: 1.0 * count.astype(jnp.float32)  # noqa: E731
    for tx in (fusedopt.sgd(identity), optax.inject_hyperparams(fusedopt.sgd)(identity)):
        state, update, updates = tx.init(p), jax.jit(tx.update), []
        for _ in range(3):
            u, state = update(g, state, p)
            updates.append(float(u[0]))
        assert updates == [0.0, -1.0, -2.0]


def test_R13_weight_decay_may_be_a_schedule():
    p = row(1.0, 1.0)
    g = jnp.zeros_like(p)
    tx = fusedopt.adamw(1.0, weight_decay=lambda count: 0.1 * (count.astype(jnp.float32) + 1))
    state, update = tx.init(p), jax.jit(tx.update)
    for want in (-0.1, -0.2):
        u, state = update(g, state, p)
        np.testing.assert_allclose(u, [[want, want]], rtol=ULPS)


def test_R14_the_learning_rate_last_used_and_the_count_are_read_from_the_state():
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    tx = fusedopt.sgd(schedule)
    p = jnp.ones(2)

    @jax.jit
    def step(state):
        _, state = tx.update(p, state, p)
        return state, tx.hyperparams(state)["learning_rate"], optax.tree.get(state, "count")

    state = tx.init(p)
    np.testing.assert_allclose(tx.hyperparams(state)["learning_rate"], 1.0)
    for n in range(1, 4):
        state, rate, count = step(state)
        np.testing.assert_allclose(rate, schedule(n - 1), rtol=ULPS)
        assert count == n


def test_a_schedule_in_the_factory_is_checked_when_it_is_called():
    p = jnp.ones(2)
    with pytest.raises(ValueError, match="`learning_rate`: expected a 0-d array, got shape \\(2,\\)"):
        fusedopt.sgd(lambda count: jnp.ones(2)).init(p)
    with pytest.raises(TypeError, match="`b1` arrives as bfloat16"):
        fusedopt.adam(0.1, b1=lambda count: jnp.bfloat16(0.9)).init(p)
    with pytest.raises(ValueError, match=r"`learning_rate`: expected a number.*got -1.0"):
        fusedopt.sgd(lambda count: -1.0).init(p)


# -------------------------------------------------------------------------------- precedence

FORMS = ("float", "np.float64", "array", "tracer", "schedule", "keyword", "state")
NUMBERS = {
    "sgd": {"learning_rate": 0.1, "momentum": 0.75, "weight_decay": 0.5},
    "adam": {"learning_rate": 0.1, "b1": 0.75, "b2": 0.875, "eps": 0.5, "eps_root": 0.25, "weight_decay": 0.5},
    "adamw": {"learning_rate": 0.1, "b1": 0.75, "b2": 0.875, "eps": 0.5, "eps_root": 0.25, "weight_decay": 0.5},
    "lion": {"learning_rate": 0.1, "b1": 0.75, "b2": 0.875, "weight_decay": 0.5},
    "lamb": {"learning_rate": 0.1, "b1": 0.75, "b2": 0.875, "eps": 0.5, "eps_root": 0.25, "weight_decay": 0.5},
    "lars": {
        "learning_rate": 0.1,
        "weight_decay": 0.5,
        "trust_coefficient": 0.3,
        "eps": 0.25,
        "momentum": 0.75,
        "max_trust_ratio": 0.2,
    },
}


@functools.cache
def one_step(name, form):
    """Updates, and the hyperparameters read afterwards, with all numbers given in one form; the number of traces."""
    numbers = NUMBERS[name]
    factory = getattr(fusedopt, name)
    arrays = {k: jnp.float32(v) for k, v in numbers.items()}
    fixed = dict.fromkeys(numbers, 0.125)  # what the form under test has to override
    given = {
        "float": numbers,
        "np.float64": {k: np.float64(v) for k, v in numbers.items()},
        "array": arrays,
        "schedule": {k: lambda count, v=v: v + 0 * count.astype(jnp.float32) for k, v in arrays.items()},
    }.get(form, fixed)

    def step(values, state):
        tx = factory(**(values if form == "tracer" else given))
        if form == "state":
            state = tx.set_hyperparams(state, **values)
        updates, state = tx.update(GRADS["w"], state, PARAMS["w"], **(values if form == "keyword" else {}))
        return updates, tx.hyperparams(state)

    step, traces = counted(step)
    step = jax.jit(step)
    state = factory(**given).init(PARAMS["w"])
    out = step(arrays, state)
    step({k: v + 0.01 for k, v in arrays.items()}, state)
    return out, len(traces)


@pytest.mark.parametrize(
    ("name", "form"),
    [pytest.param(n, f, marks=() if n == "adamw" else pytest.mark.slow) for n in NUMBERS for f in FORMS[1:]],
)
def test_every_hyperparameter_may_come_in_every_form_with_one_trace(name, form):
    want, _ = one_step(name, "float")
    got, traces = one_step(name, form)
    assert traces == 1
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=5e-7, atol=1e-8), got[0], want[0])
    assert set(got[1]) == set(NUMBERS[name])
    for key, value in NUMBERS[name].items():
        # A keyword is of one step and not stored; the factory's own number stays.
        np.testing.assert_allclose(got[1][key], 0.125 if form == "keyword" else value, rtol=ULPS)


def test_the_keyword_wins_over_the_schedule_over_the_array_over_the_state():
    p = g = jnp.ones(2)
    constant, array, schedule = fusedopt.sgd(1.0), fusedopt.sgd(jnp.float32(2.0)), fusedopt.sgd(lambda count: 3.0)

    def rate(tx, state, **keywords):
        return -float(jax.jit(tx.update)(g, state, p, **keywords)[0][0])

    state = constant.set_hyperparams(constant.init(p), learning_rate=4.0)
    assert rate(constant, state) == 4.0
    assert rate(array, state) == 2.0
    assert rate(schedule, state) == 3.0
    for tx in (constant, array, schedule):
        assert rate(tx, state, learning_rate=5.0) == 5.0
        assert rate(tx, state, learning_rate=None) != 5.0  # None: no keyword
    # The keyword is for one step: the next one is back.
    _, state = jax.jit(constant.update)(g, state, p, learning_rate=5.0)
    assert rate(constant, state) == 4.0


def test_a_keyword_is_not_stored_beside_a_schedule_either():
    p = g = jnp.ones(2)
    tx = fusedopt.sgd(lambda count: 0.5, momentum=0.25)
    u, state = jax.jit(tx.update)(g, tx.init(p), p, learning_rate=2.0, momentum=0.75)
    np.testing.assert_array_equal(u, -2.0)
    assert {k: float(v) for k, v in tx.hyperparams(state).items()} == {"learning_rate": 0.5, "momentum": 0.25}


def test_a_restored_state_brings_its_own_learning_rate():
    p = g = jnp.ones(2)
    saved = pickle.dumps(jax.device_get(fusedopt.sgd(0.25).init(p)))
    tx = fusedopt.sgd(1.0)
    updates, _ = jax.jit(tx.update)(g, pickle.loads(saved), p)
    np.testing.assert_array_equal(updates, -0.25)


def test_set_hyperparams_names_what_it_does_not_know_and_what_would_be_overwritten():
    p = jnp.ones(2)
    tx = fusedopt.adamw(lambda count: 0.1, weight_decay=jnp.float32(0.1))
    state = tx.init(p)
    with pytest.raises(ValueError, match="unknown hyperparameter `lr`: expected one of learning_rate, b1, b2, eps"):
        tx.set_hyperparams(state, lr=1.0)
    with pytest.raises(ValueError, match="`learning_rate` was given to the factory as a schedule"):
        tx.set_hyperparams(state, learning_rate=1.0)
    with pytest.raises(ValueError, match="`weight_decay` was given to the factory as an array"):
        tx.set_hyperparams(state, weight_decay=1.0)
    with pytest.raises(ValueError, match=r"`b1`: expected a number in \[0, 1\), got 1.5"):
        tx.set_hyperparams(state, b1=1.5)
    assert tx.hyperparams(tx.set_hyperparams(state, b2=0.5))["b2"] == 0.5
    np.testing.assert_allclose(tx.hyperparams(state)["b2"], 0.999, rtol=ULPS)  # the old state is untouched


def test_a_schedule_as_a_keyword_is_refused():
    tx = fusedopt.sgd(0.1)
    p = jnp.ones(2)
    with pytest.raises(TypeError, match="`learning_rate`: a keyword of one step is a number or a 0-d array"):
        tx.update(p, tx.init(p), p, learning_rate=lambda count: 0.1)


def test_unknown_keywords_are_ignored_as_optax_asks():
    tx = fusedopt.sgd(0.1)
    p = jnp.ones(2)
    update = jax.jit(tx.update)
    assert_equal(update(p, tx.init(p), p, value=jnp.float32(3.0)), update(p, tx.init(p), p))


# ----------------------------------------------------------------------- inject_hyperparams

FACTORIES = ("sgd", "adam", "adamw", "lion", "lars", "lamb")


@pytest.mark.parametrize(
    "name", ["sgd", "lars", *(pytest.param(n, marks=pytest.mark.slow) for n in ("adam", "adamw", "lion", "lamb"))]
)
def test_R12_every_factory_works_in_inject_hyperparams_without_static_args(name):
    factory = getattr(fusedopt, name)
    plain = factory(0.1)
    tx = optax.inject_hyperparams(factory)(0.1)
    with standard_promotion():
        state = jax.jit(tx.init)(PARAMS)
        assert isinstance(state.hyperparams["learning_rate"], jax.Array)
        # One program for both; the arrays of one are the constants of the other.
        updates, want = jax.jit(lambda s, t: (tx.update(GRADS, s, PARAMS)[0], plain.update(GRADS, t, PARAMS)[0]))(
            state, plain.init(PARAMS)
        )
    # b1 arrives in float32 there, and 1 - b1 has its rounding.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-9), updates, want)


def test_R12_static_arguments_stay_static_in_inject_hyperparams():
    group = fusedopt.Group("g", lambda path, leaf: path == ("b",), learning_rate_scale=0.5)
    options = {
        "mask": lambda tree: {"w": False, "b": True},
        "mu_dtype": jnp.bfloat16,
        "nesterov": True,
        "groups": (group,),
        "packing": fusedopt.Packing(solo_from=None),
        "backend": "xla",
        "skip_nonfinite": False,
    }
    tx = optax.inject_hyperparams(fusedopt.adamw, static_args=("mask", "mu_dtype"))(0.1, **options)
    plain = fusedopt.adamw(0.1, **options)
    with standard_promotion():
        state = jax.jit(tx.init)(PARAMS)
        updates, state = jax.jit(tx.update)(GRADS, state, PARAMS)
    want, _ = jax.jit(plain.update)(GRADS, plain.init(PARAMS), PARAMS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-9), updates, want)
    assert {x.dtype for x in state.inner_state.mu} == {jnp.dtype(jnp.bfloat16)}


def test_R06_injected_numbers_in_float32_are_right_for_bfloat16_parameters():
    p = g = jnp.ones((2, 2), jnp.bfloat16)
    tx = optax.inject_hyperparams(fusedopt.adamw, hyperparam_dtype=jnp.float32)(1e-3)
    with standard_promotion():
        state = tx.init(p)
        updates, new = jax.jit(tx.update)(g, state, p)
    assert updates.dtype == jnp.bfloat16
    # -lr*(1 + 1e-4): one rounding to bfloat16.
    np.testing.assert_allclose(updates.astype(jnp.float32), -1.0e-3, rtol=4e-3)
    assert avals(new) == avals(jax.tree.map(jnp.asarray, state))
    # optax's own: NaN without hyperparam_dtype, and mu changes its dtype with it.
    with standard_promotion():
        theirs = optax.inject_hyperparams(optax.adamw)(1e-3)
        assert np.isnan(jax.jit(theirs.update)(g, theirs.init(p), p)[0].astype(jnp.float32)).all()
        theirs = optax.inject_hyperparams(optax.adamw, hyperparam_dtype=jnp.float32)(1e-3)
        before = theirs.init(p)
        after = jax.jit(theirs.update)(g, before, p)[1]
    mu = [optax.tree.get(s, "mu").dtype for s in (before, after)]
    assert mu == [jnp.bfloat16, jnp.float32]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", ["b1", "b2"])
def test_R06_a_decay_in_16_bits_is_refused(name, dtype):
    message = f"`{name}` arrives as {jnp.dtype(dtype)}.*hyperparam_dtype=jnp.float32"
    with pytest.raises(TypeError, match=message):
        fusedopt.adamw(0.1, **{name: jnp.asarray(0.9, dtype)})
    tx = fusedopt.adamw(0.1)
    p = jnp.ones(2)
    with pytest.raises(TypeError, match=message):
        tx.update(p, tx.init(p), p, **{name: jnp.asarray(0.9, dtype)})
    with pytest.raises(TypeError, match=message):
        tx.set_hyperparams(tx.init(p), **{name: jnp.asarray(0.9, dtype)})


def test_R06_injection_at_the_precision_of_bfloat16_parameters_is_refused():
    p = jnp.ones((2, 2), jnp.bfloat16)
    with standard_promotion(), pytest.raises(TypeError, match=r"hyperparam_dtype=jnp.float32"):
        optax.inject_hyperparams(fusedopt.adamw)(1e-3).init(p)


@pytest.mark.parametrize("as_array", [jnp.array, np.array])
def test_a_mask_that_arrives_as_an_array_says_static_args(as_array):
    flag = as_array(True)
    for make in (
        lambda: fusedopt.adamw(0.1, mask=flag),
        lambda: fusedopt.lars(0.1, weight_decay_mask=flag),
        lambda: fusedopt.lars(0.1, trust_ratio_mask=flag),
        lambda: fusedopt.adamw(0.1, groups=flag),
    ):
        with pytest.raises(TypeError, match="static_args"):
            make()
    with pytest.raises(TypeError, match=r"`mask` at `w`.*static_args"):
        fusedopt.adamw(0.1, mask={"w": flag, "b": True}).init(PARAMS)


@pytest.mark.parametrize("name", ["nesterov", "skip_nonfinite", "eps_inside", "master_weights", "accumulate"])
def test_a_static_flag_that_arrives_as_an_array_says_static_args(name):
    with pytest.raises(TypeError, match=f"`{name}` is static.*static_args"):
        fusedopt.adamw(0.1, **{name: jnp.array(True)})


# ------------------------------------------------------------------------------------ ranges

RANGES = [
    ("sgd", "learning_rate", [-1e-3, np.nan, np.inf]),
    ("sgd", "momentum", [-0.1, 1.1, np.nan]),
    ("sgd", "weight_decay", [-1e-3, np.nan, np.inf]),
    ("adam", "learning_rate", [-1e-3, np.nan, np.inf]),
    ("adam", "b1", [-0.1, 1, 1.0, np.nan]),
    ("adam", "b2", [-0.1, 1.0, np.float64(1.0)]),
    ("adam", "eps", [-1e-8, np.nan]),
    ("adam", "eps_root", [-1e-8, np.inf]),
    ("adam", "weight_decay", [-1e-3]),
    ("adamw", "weight_decay", [-1e-3, np.nan]),
    ("lion", "b1", [-0.1, 1.0]),
    ("lion", "b2", [-0.1, 1.0, np.nan]),
    ("lion", "weight_decay", [-1e-3]),
    ("lamb", "b2", [-0.1, 1.0, np.nan]),
    ("lamb", "eps", [-1e-8, np.nan]),
    ("lamb", "max_trust_ratio", [-1.0, 0.0, np.nan]),
    ("sgd", "clip_norm", [-1.0, np.nan]),
    ("lion", "ema_decay", [-0.1, 1.0, np.nan]),
    ("lars", "learning_rate", [-1.0]),
    ("lars", "weight_decay", [-1.0]),
    ("lars", "trust_coefficient", [-1.0, np.nan]),
    ("lars", "eps", [-1.0]),
    ("lars", "momentum", [-0.1, 1.1]),
    ("lars", "max_trust_ratio", [-1.0, 0.0, np.nan]),
]


@pytest.mark.parametrize(("name", "argument", "values"), RANGES)
def test_R136_constants_out_of_range_are_refused_by_name_and_value(name, argument, values):
    factory = getattr(fusedopt, name)
    for value in values:
        with pytest.raises(ValueError, match=rf"`{argument}`: expected a number.*got.*{value}"):
            factory(**{"learning_rate": 0.1, argument: value})


def test_R136_traced_values_pass():
    p = jnp.ones((1, 2))

    @jax.jit
    def step(bad):
        tx = fusedopt.adamw(bad, eps=bad, weight_decay=bad)
        return tx.update(p, tx.init(p), p)[0]

    assert step(jnp.float32(-0.5)).shape == p.shape


def test_every_factory_argument_that_is_a_number_is_in_the_table_of_ranges():
    for name in FACTORIES:
        numbers = {
            k
            for k, v in inspect.signature(getattr(fusedopt, name)).parameters.items()
            if isinstance(v.default, float) or k in ("learning_rate", "momentum")
        }
        assert numbers == set(NUMBERS[name])


@pytest.mark.parametrize("value", ["0.1", None, [0.1], object()])
def test_what_is_no_number_is_a_type_error(value):
    with pytest.raises(TypeError, match="`learning_rate`: expected a number, a 0-d array or a schedule"):
        fusedopt.sgd(value)


def test_an_array_hyperparameter_must_be_0d():
    with pytest.raises(ValueError, match=r"`learning_rate`: expected a 0-d array, got shape \(1,\)"):
        fusedopt.sgd(jnp.ones(1))


def test_eps_inside_has_no_nesterov_and_no_eps_root():
    with pytest.raises(ValueError, match=r"`eps_inside`.*`nesterov`"):
        fusedopt.adam(0.1, eps_inside=True, nesterov=True)
    with pytest.raises(ValueError, match="`eps_inside` has no `eps_root`"):
        fusedopt.adamw(0.1, eps_inside=True, eps_root=1e-8)


# --------------------------------------------------------------------------- bias corrections


BS = [0.0, 0.3, 0.5, 0.8, 0.87, 0.9, 0.95, 0.98, 0.99, 0.999, 0.9999, 0.999988, 0.999997, 0.99999999]


def test_bias_corrections_are_exact_to_2e_7_up_to_a_billion_steps():
    steps = np.unique(np.concatenate([np.arange(1, 60), np.geomspace(60, 1e9, 150).astype(int)]))
    complements = [1.0 - b for b in BS]  # in float64, as the factory takes them

    @jax.jit
    def corrections(complements, steps):
        one = lambda c, t: bias_correction(Decay(1 - c, c), t)  # noqa: E731
        return jax.vmap(jax.vmap(one, (None, 0)), (0, None))(complements, steps)

    got = corrections(jnp.asarray(complements, jnp.float32), jnp.asarray(steps, jnp.int32))
    with decimal.localcontext(decimal.Context(prec=40)):
        exact = [[float(1 - (1 - decimal.Decimal(c)) ** int(t)) for t in steps] for c in complements]
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=2e-7)


def test_a_python_decay_keeps_the_digits_of_its_complement():
    items = fusedopt.adam(0.1, b1=0.9, b2=0.999).optimizer.hyperparams
    vector = items.init(jnp.float32)
    for name, want in (("b1", 0.1), ("b2", 0.001)):
        stored = vector[items.names().index(name)]
        assert stored == np.float32(want)  # 1 - float32(0.999) would be 1.3e-5 off
    assert decay_rate("b", 0.999).decay


def test_R14_hyperparams_are_in_float64_for_float64_parameters():
    with jax.enable_x64(True):
        tx = fusedopt.adam(0.1)
        state = tx.init(jnp.ones(2, jnp.float64))
        assert state.hyperparams.dtype == jnp.float64
        np.testing.assert_allclose(tx.hyperparams(state)["learning_rate"], 0.1, rtol=5e-16)
        assert tx.init(jnp.ones(2, jnp.float32)).hyperparams.dtype == jnp.float32


@pytest.mark.parametrize(
    ("tx", "name"),
    [
        (fusedopt.sgd(0.1), "weight_decay"),
        (fusedopt.sgd(0.1), "momentum"),
        (fusedopt.adam(0.1), "weight_decay"),
        (fusedopt.adamw(0.1, eps_inside=True), "eps_root"),
        (fusedopt.lars(0.1, trust_ratio="optax"), "max_trust_ratio"),
    ],
)
def test_a_hyperparameter_that_the_optimizer_was_made_without_is_not_ignored(tx, name):
    params = {"w": jnp.ones((1, 2))}
    state = tx.init(params)
    with pytest.raises(ValueError, match=f"`{name}` cannot be set: "):
        tx.apply(params, state, params, **{name: 0.5})
    with pytest.raises(ValueError, match=f"`{name}` cannot be set: "):
        tx.set_hyperparams(state, **{name: 0.5})
    tx.apply(params, state, params, **{name: None})  # None means nothing, as for any other keyword


def test_eps_inside_under_injection_says_how():
    with pytest.raises(ValueError, match="name `eps_root` in `static_args`"):
        optax.inject_hyperparams(fusedopt.adamw)(1e-3, eps_inside=True).init({"w": jnp.ones((1, 2))})
    tx = optax.inject_hyperparams(fusedopt.adamw, static_args="eps_root")(1e-3, eps_inside=True)
    params = {"w": jnp.ones((1, 2))}
    updates, _ = tx.update(params, tx.init(params), params)
    # eps 1e-8 under the root of v = 1e-3: u = -lr*sqrt(1e-3)/0.1 * 0.1/sqrt(1e-3 + 1e-8), and the decay lr*1e-4
    np.testing.assert_allclose(updates["w"], -1e-3 * (np.sqrt(1e-3 / (1e-3 + 1e-8)) + 1e-4), rtol=2e-6)


def test_hyperparams_of_an_ensemble_keep_its_axis():
    """A state made under vmap is read and set outside of it: for all members, or one value for each."""
    tx = fusedopt.adamw(1e-2)
    state = jax.vmap(tx.init)(jax.tree.map(lambda x: jnp.stack([x] * 3), {"kernel": jnp.ones((8, 4))}))
    np.testing.assert_array_equal(tx.hyperparams(state)["learning_rate"], np.full(3, 1e-2, np.float32))
    same = tx.hyperparams(tx.set_hyperparams(state, learning_rate=0.5))
    np.testing.assert_array_equal(same["learning_rate"], np.full(3, 0.5, np.float32))
    np.testing.assert_array_equal(same["eps"], np.full(3, 1e-8, np.float32))
    each = tx.hyperparams(tx.set_hyperparams(state, b1=jnp.array([0.5, 0.75, 0.25])))
    np.testing.assert_array_equal(each["b1"], np.array([0.5, 0.75, 0.25], np.float32))
    with pytest.raises(ValueError, match=r"`b1`: expected a 0-d array, got shape \(2,\)"):
        tx.set_hyperparams(state, b1=jnp.array([0.5, 0.75]))
