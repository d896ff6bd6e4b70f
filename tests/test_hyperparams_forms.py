"""Hyperparameters in every form, the stated order of precedence, and how their values are stored, read and set."""

from __future__ import annotations

import decimal
import functools
import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusedopt
from fusedopt.hyperparams import Decay, bias_correction, decay_rate
from tests.helpers import assert_equal, counted, normal

# Two or three roundings of float32, relative.
ULPS = 2.5e-7
PARAMS = {"w": jnp.asarray(normal((3, 5))), "b": jnp.asarray(normal((5,), 1))}
GRADS = {"w": jnp.asarray(normal((3, 5), 2)), "b": jnp.asarray(normal((5,), 3))}


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


# ------------------------------------------------------------------------------------- completeness

FACTORIES = ("sgd", "adam", "adamw", "lion", "lars", "lamb")


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


# ----------------------------------------------------------------------------------- what is stored

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
