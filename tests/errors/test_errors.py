"""Every error that a user can cause, with its whole text: what was got, what was expected, what to do.

A `raise` that no row of the table reaches is a failure, unless `INTERNAL` says why nobody can, or which other test
does.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusedopt
from tests.errors import (
    checkpoints,
    devices,
    devices_zero1,
    factories,
    flax_states,
    kernels,
    parameters,
    reading,
    reports,
    steps,
)
from tests.errors.table import Row, Step, caught, matches, site_of, sites

TABLE: list[Row] = [
    row
    for topic in (
        factories,
        parameters,
        steps,
        reading,
        checkpoints,
        flax_states,
        devices,
        devices_zero1,
        kernels,
        reports,
    )
    for row in topic.ROWS
]

INTERNAL = {
    "fusedopt.rules.base.Rule.measured": "abstract: rules with a trust ratio have it, and no other one is asked for it",
    "fusedopt.shard_checks._refuse_own": "takes two processes: test_multiprocess.py holds its texts to the letter",
    "fusedopt.rules.base.Rule.trust_ratio": "as `measured`",
}

# A sentence about two arguments at once, or about a module, begins with neither of them.
UNNAMED = {"no-such-name", "no-flax"}


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.id)
def test_an_error_says_what_is_wrong(row):
    error = caught(row)
    assert error is not None, "no error"
    assert type(error) is row.error, repr(error)
    message = error.args[0] if isinstance(error, KeyError) else str(error)
    assert matches(row.text, message), message
    assert "`" in message or row.id in UNNAMED, "names no argument and no leaf"
    assert site_of(error) is not None, "raised by the code of another library"


def test_every_raise_has_a_row():
    reached = {site_of(error) for row in TABLE if (error := caught(row)) is not None}
    missing = [s for s in sites() if s not in reached and s.function not in INTERNAL]
    assert not missing, "\n".join(f"{s.file}:{s.first} in {s.function}" for s in missing)
    assert set(INTERNAL) == {s.function for s in sites() if s not in reached}


def test_ids_are_unique():
    assert len({row.id for row in TABLE}) == len(TABLE)


# ---------------------------------------------------- what an error leaves alone: donated arrays


def arrays_of(tree):
    return [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]


def assert_left_alone(arrays, before):
    for x, old in zip(arrays, before, strict=True):
        assert not x.is_deleted()
        np.testing.assert_array_equal(x, old)


@pytest.mark.parametrize("step", steps.STEPS, ids=lambda step: step.id)
def test_a_refused_step_leaves_what_was_donated(step: Step):
    tx, grads, state, params = step.make()
    arrays = arrays_of((params, state, grads))
    before = [np.array(x) for x in arrays]

    def run(params, state, grads):
        return getattr(tx, step.method)(grads, state, params, **step.extra)

    with pytest.raises(step.error) as refused:
        jax.jit(run, donate_argnums=(0, 1, 2))(params, state, grads)
    assert matches(step.text, str(refused.value)), refused.value
    assert_left_alone(arrays, before)


def test_a_step_that_is_not_refused_takes_what_is_donated():
    """So the test above can fail."""
    tx, grads, state, params = steps.of(fusedopt.adamw(0.1))
    jax.jit(lambda params, state: tx.apply(grads, state, params), donate_argnums=(0, 1))(params, state)
    assert all(x.is_deleted() for x in (*arrays_of(params), *state.mu, *state.nu))


def test_a_refused_eager_step_leaves_numpy_arrays():
    tx, params = fusedopt.adamw(0.1), {"w": np.ones((2, 2), np.float32)}
    state = tx.init(params)
    with pytest.raises(ValueError, match="`grads` leaf `w`"):
        tx.apply({"w": np.ones(2, np.float32)}, state, params)
    np.testing.assert_array_equal(params["w"], 1)
    assert_left_alone(arrays_of(state), [np.array(x) for x in arrays_of(tx.init(params))])


def test_a_refused_train_step_of_zero1_leaves_what_it_would_have_taken():
    tx, (flat, state) = devices.tx(), devices.start()
    arrays = arrays_of((flat, state))
    before = [np.array(x) for x in arrays]
    train_step = tx.train_step(lambda tree, x: jnp.mean(tree["a"]["kernel"]) * jnp.mean(x))
    for extra, text in (({"learning_rate": -1.0}, "`learning_rate`"), ({"loss_scale": np.ones(2)}, "`loss_scale`")):
        with pytest.raises(ValueError, match=text):
            train_step(flat, state, jnp.ones(8), **extra)
        assert_left_alone(arrays, before)
    with pytest.raises(ValueError, match="`state`"):
        train_step(flat, state.mu, jnp.ones(8))
    assert_left_alone(arrays, before)


def test_a_refused_train_state_is_left():
    params = {"w": jnp.ones((2, 2))}
    state = fusedopt.TrainState.create(apply_fn=None, params=params, tx=fusedopt.adam(0.1))
    arrays = arrays_of(state)
    before = [np.array(x) for x in arrays]
    run = jax.jit(lambda state, grads: state.apply_gradients(grads=grads), donate_argnums=0)
    with pytest.raises(ValueError, match="`grads` leaf `w`"):
        run(state, {"w": jnp.ones(2)})
    assert_left_alone(arrays, before)
