"""Flax: our TrainState beside Flax's own."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import serialization
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training import train_state

import fusedopt
from tests.helpers import assert_close, assert_equal, counted, filled, standard_promotion

X = jnp.asarray(filled((16, 4), seed=5))
Y = jnp.asarray(filled((16, 3), seed=6))
MODES = pytest.mark.parametrize("flat", [False, True], ids=["tree", "flat"])

# Where what is tested does not depend on how parameters are held, one mode will do by default.
FLAT_FIRST = pytest.mark.parametrize("flat", [pytest.param(False, marks=pytest.mark.slow), True], ids=["tree", "flat"])
SHAPES = {"hidden": {"kernel": (4, 8), "bias": (1, 8)}, "out": {"kernel": (8, 3), "bias": (1, 3)}}
TWIN = optax.adamw(1e-2, mask=fusedopt.weight_mask)


def model(variables, x):
    p = variables["params"]
    hidden = jnp.tanh(x @ p["hidden"]["kernel"] + jnp.broadcast_to(p["hidden"]["bias"], (len(x), 8)))
    return hidden @ p["out"]["kernel"] + jnp.broadcast_to(p["out"]["bias"], (len(x), 3))


def some_params():
    return jax.tree.map(jnp.asarray, filled(SHAPES, scale=0.5))


def create(cls=fusedopt.TrainState, tx=None, **kwargs):
    return cls.create(apply_fn=model, params=some_params(), tx=tx or fusedopt.adamw(1e-2), **kwargs)


def gradients_of(state, x=X):
    return jax.grad(lambda p: jnp.square(state.apply_fn({"params": p}, x) - Y).mean())(state.params)


def step(state, x=X, **extra):
    return state.apply_gradients(grads=gradients_of(state, x), **extra)


# ---------------------------------------------------------------------------------- as Flax's own


@MODES
def test_a_run_is_that_of_flax_with_one_import_changed(flat):
    ours, theirs = create(flat=flat), create(train_state.TrainState, tx=TWIN)
    assert isinstance(ours, train_state.TrainState)
    run, traces = counted(step)
    run, other = jax.jit(run), jax.jit(step)
    with standard_promotion():
        for _ in range(10):
            ours, theirs = run(ours), other(theirs)
    assert len(traces) == 1
    assert_close(ours.params_tree, theirs.params, 1e-6)
    assert int(ours.step) == int(theirs.step) == int(ours.opt_state.count) == 10
    assert ours.step.dtype == jnp.int32
    assert isinstance(ours.params, fusedopt.FlatParams) == flat
    assert_equal(ours.params["out"]["kernel"], ours.params_tree["out"]["kernel"])
    assert float(jnp.sum(ours.apply_fn({"params": ours.params}, X))) == pytest.approx(
        float(jnp.sum(model({"params": ours.params_tree}, X))), rel=1e-6
    )


@pytest.mark.parametrize(
    ("tx", "flat"),
    [
        (TWIN, False),
        (fusedopt.chain(optax.clip_by_global_norm(1.0), fusedopt.adamw(1e-2)), False),
        pytest.param(
            fusedopt.chain(optax.clip_by_global_norm(1.0), fusedopt.adamw(1e-2)), True, marks=pytest.mark.slow
        ),
        pytest.param(optax.chain(optax.clip_by_global_norm(1.0), fusedopt.adamw(1e-2)), False, marks=pytest.mark.slow),
        pytest.param(optax.chain(optax.clip_by_global_norm(1.0), fusedopt.adamw(1e-2)), True, marks=pytest.mark.slow),
        pytest.param(TWIN, True, marks=pytest.mark.slow),
    ],
    ids=["optax", "fusedopt.chain", "fusedopt.chain-flat", "optax.chain", "optax.chain-flat", "optax-flat"],
)
def test_any_optimizer_will_do(tx, flat):
    clip = optax.identity() if tx is TWIN else optax.clip_by_global_norm(1.0)
    if flat and tx is TWIN:
        tx = optax.adamw(1e-2, weight_decay=0.0)  # of buffers it knows no biases
        twin = tx
    else:
        twin = optax.chain(clip, TWIN)
    with standard_promotion():
        ours, theirs = create(tx=tx, flat=flat), create(train_state.TrainState, tx=twin)
        for _ in range(3):
            ours, theirs = jax.jit(step)(ours), jax.jit(step)(theirs)
    assert_close(ours.params_tree, theirs.params, 1e-6)
    assert int(ours.step) == 3


class WithStats(fusedopt.TrainState):
    """A TrainState with batch statistics and a key."""

    batch_stats: Any
    key: jax.Array


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, momentum=0.9)(nn.Dense(8)(x))
        return nn.Dense(3)(nn.relu(x))


@FLAT_FIRST
def test_batch_statistics_and_other_fields_by_subclassing(flat):
    with standard_promotion():
        variables = Net().init(jax.random.key(0), X)

        def made(cls, tx, **more):
            stats = {"batch_stats": variables["batch_stats"], "key": jax.random.key(1), **more}
            return cls.create(apply_fn=Net().apply, params=variables["params"], tx=tx, **stats)

        class Theirs(train_state.TrainState):
            batch_stats: Any
            key: jax.Array

        def train(state):
            def loss(p):
                both = {"params": p, "batch_stats": state.batch_stats}
                out, new = state.apply_fn(both, X, mutable=["batch_stats"])
                return jnp.square(out - Y).mean(), new

            (_, new), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
            return state.apply_gradients(grads=grads, batch_stats=new["batch_stats"])

        ours, theirs = made(WithStats, fusedopt.adamw(1e-2), flat=flat), made(Theirs, TWIN)
        for _ in range(2):
            ours, theirs = jax.jit(train)(ours), jax.jit(train)(theirs)
    assert_close(ours.batch_stats, theirs.batch_stats, 1e-6)
    # A bias before a BatchNorm has a gradient of rounding errors, of which Adam makes whole steps.
    assert_close(ours.params_tree["Dense_1"], theirs.params["Dense_1"], 1e-6)
    assert jax.random.key_data(ours.key).tolist() == jax.random.key_data(jax.random.key(1)).tolist()
    stored = ours.replace(key=jax.random.key_data(ours.key))
    for mode in (False, True):
        like = made(WithStats, fusedopt.adamw(1e-2), flat=mode).replace(key=jnp.zeros(2, jnp.uint32))
        got = serialization.from_bytes(like, serialization.to_bytes(stored))
        assert_equal(jax.tree.map(jnp.asarray, got.params_tree), ours.params_tree)
        assert_equal(jax.tree.map(jnp.asarray, got.batch_stats), ours.batch_stats)


def test_parameters_that_flax_overwrites_by_their_gradients():
    params = {"params": {"w": jnp.ones((2, 2))}, OVERWRITE_WITH_GRADIENT: {"scale": jnp.ones(1)}}
    grads = {"params": {"w": jnp.ones((2, 2))}, OVERWRITE_WITH_GRADIENT: {"scale": jnp.full(1, 7.0)}}
    state = fusedopt.TrainState.create(apply_fn=None, params=params, tx=fusedopt.sgd(0.5))
    state = state.apply_gradients(grads=grads)
    assert_equal(
        state.params, {"params": {"w": jnp.full((2, 2), 0.5)}, OVERWRITE_WITH_GRADIENT: {"scale": jnp.full(1, 7.0)}}
    )
    got = serialization.from_bytes(state, serialization.to_bytes(state))
    assert_equal(jax.tree.map(jnp.asarray, got), state)
    with pytest.raises(ValueError, match="`flat`: expected parameters without '_overwrite_with_gradient'"):
        fusedopt.TrainState.create(apply_fn=None, params=params, tx=fusedopt.sgd(0.5), flat=True)


# --------------------------------------------------------------------------------- skipped steps


@FLAT_FIRST
def test_a_skipped_step_counts_nowhere(flat):
    run = jax.jit(step)
    state = run(create(tx=fusedopt.adamw(fusedopt.warmup_cosine(1e-2, 2, 9)), flat=flat))
    for skipped in (run(state, x=X.at[3, 1].set(jnp.nan)), run(state, has_nan=True), run(state, loss_scale=jnp.inf)):
        assert_equal(skipped.params, state.params)
        assert (int(skipped.step), int(skipped.opt_state.count)) == (1, 1)
        assert bool(skipped.opt_state.skipped)
        assert int(skipped.opt_state.total_skipped) == 1
        again = run(skipped)
        assert (int(again.step), int(again.opt_state.count), int(again.opt_state.total_skipped)) == (2, 2, 1)
        assert_equal(again.params, run(state).params)


def test_flax_and_optax_count_a_step_that_apply_if_finite_has_skipped():
    """What ours does better, measured."""
    state = create(train_state.TrainState, tx=optax.apply_if_finite(optax.adamw(1e-2), 5))
    with standard_promotion():
        state = step(state, x=X.at[0, 0].set(jnp.nan))
    assert int(state.step) == 1
    assert int(optax.tree.get(state.opt_state, "count")) == 0


def test_the_step_of_a_wrapped_optimizer_does_not_count_skipped_ones_either():
    state = create(tx=optax.chain(optax.clip(1.0), fusedopt.adamw(1e-2)))
    state = jax.jit(lambda s: step(step(s), has_nan=True))(state)
    assert (int(state.step), int(state.opt_state[1].count)) == (1, 1)


def test_accumulated_gradients_count_like_those_of_multi_steps():
    ours = create(tx=fusedopt.adamw(1e-2, accumulate=2))
    theirs = create(train_state.TrainState, tx=optax.MultiSteps(TWIN, 2))
    with standard_promotion():
        for _ in range(4):
            ours, theirs = jax.jit(step)(ours), jax.jit(step)(theirs)
    assert_close(ours.params, theirs.params, 1e-6)
    assert (int(ours.step), int(theirs.step), int(ours.opt_state.count)) == (4, 4, 2)


# --------------------------------------------------------------------------------------- keywords


@FLAT_FIRST
def test_keywords_of_a_step(flat):
    state = create(flat=flat)
    grads = gradients_of(state)
    scaled = state.apply_gradients(grads=jax.tree.map(lambda g: 1024 * g, grads), loss_scale=1024.0, learning_rate=0.5)
    params, _ = state.tx.apply(grads, state.opt_state, state.params, learning_rate=0.5)
    assert_equal(scaled.params, params)
    assert int(state.apply_gradients(grads=grads, step=jnp.int32(7)).step) == 7
    assert state.replace(step=3).step == 3
    with pytest.raises(
        TypeError, match=r"`batch_stat` is neither a field of TrainState nor a hyperparameter \(learning_rate, "
    ):
        state.apply_gradients(grads=grads, batch_stat=1)
    with pytest.raises(ValueError, match="`clip_norm` cannot be set"):
        state.apply_gradients(grads=grads, clip_norm=1.0)


def test_keywords_that_optax_does_not_know():
    state = create(tx=TWIN)
    grads = gradients_of(state)
    for extra in ({"has_nan": True}, {"loss_scale": 2.0}, {"batch_stat": 1}):
        with pytest.raises(TypeError, match=f"`{next(iter(extra))}`: expected an optimizer made by fusedopt as `tx`"):
            state.apply_gradients(grads=grads, **extra)
    with pytest.raises(ValueError, match="`ema_params`: expected an optimizer of fusedopt"):
        state.ema_params


@FLAT_FIRST
def test_averages_are_parameters(flat):
    state = create(tx=fusedopt.chain(optax.clip(1.0), fusedopt.adamw(1e-2, ema_decay=0.5)), flat=flat)
    new = jax.jit(step)(state)
    average = new.ema_params.tree if flat else new.ema_params
    want = jax.tree.map(lambda a, b: (a + b) / 2, state.params_tree, new.params_tree)
    assert_close(average, want, 1e-6)
    assert state.apply_fn({"params": new.ema_params}, X).shape == (16, 3)


# ----------------------------------------------------------------------------------------- memory


@MODES
def test_a_donated_state_is_written_in_place(flat):
    shapes = {"kernel": (512, 512), "out": {"kernel": (512, 8), "bias": (8,)}}
    params = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )
    state = jax.eval_shape(
        lambda p: fusedopt.TrainState.create(apply_fn=model, params=p, tx=fusedopt.adamw(1e-2), flat=flat), params
    )
    run = jax.jit(lambda state, grads: state.apply_gradients(grads=grads), donate_argnums=0)
    memory = run.lower(state, state.params).compile().memory_analysis()
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert 0 <= held - memory.alias_size_in_bytes <= 1  # `skipped` is written, not read
    assert memory.temp_size_in_bytes < 512 * 512 * 4 / 2


# ------------------------------------------------------------------------------------ checkpoints


@FLAT_FIRST
def test_the_whole_state_is_stored(flat):
    tx = fusedopt.chain(optax.trace(0.5), fusedopt.adamw(0.1, ema_decay=0.9, accumulate=2))
    state = jax.jit(step)(create(tx=tx, flat=flat))
    got = serialization.from_bytes(create(tx=tx, flat=flat), serialization.to_bytes(state))
    assert_equal(jax.tree.map(jnp.asarray, got), state)


@FLAT_FIRST
def test_what_is_stored_goes_on_in_the_other_mode_and_another_packing(flat):
    tx, other_tx = (fusedopt.lars(0.1, ema_decay=0.9, packing=p) for p in (None, fusedopt.Packing(solo_from=1)))
    state = jax.jit(step)(create(tx=tx, flat=flat))
    other = serialization.from_bytes(create(tx=other_tx, flat=not flat), serialization.to_bytes(state))
    assert_close(jax.jit(step)(other).params_tree, jax.jit(step)(state).params_tree, 1e-6)
    assert_equal(serialization.to_state_dict(other), jax.tree.map(np.asarray, serialization.to_state_dict(state)))


def test_what_flax_has_stored_of_an_optax_run_goes_on_here():
    theirs = create(train_state.TrainState, tx=TWIN)
    with standard_promotion():
        run = jax.jit(step)
        theirs = run(run(theirs))
        ours = serialization.from_bytes(create(flat=True), serialization.to_bytes(theirs))
        assert int(ours.step) == int(ours.opt_state.count) == 2
        assert_close(run(ours).params_tree, run(theirs).params, 1e-6)


def test_R127_a_stored_state_of_other_leaves_is_refused_by_name():
    def made(**shapes):
        params = {k: jnp.ones(s) for k, s in shapes.items()}
        return fusedopt.TrainState.create(apply_fn=model, params=params, tx=fusedopt.adamw(1e-2), flat=True)

    data = serialization.to_bytes(made(a=(2, 3), c=(1, 3)))
    with pytest.raises(ValueError, match="`FlatParams` leaf `c` is stored but not in the target"):
        serialization.from_bytes(made(a=(3, 3)), data)
    with pytest.raises(ValueError, match=r"`FlatParams` leaf `a`: got shape \(2, 3\), expected \(1, 3\)"):
        serialization.from_bytes(made(a=(1, 3), c=(2, 3)), data)
    kept = create(tx=fusedopt.adamw(1e-2, ema_decay=0.5))
    with pytest.raises(ValueError, match="`opt_state` has no `ema`, which this optimizer keeps; it has count, "):
        serialization.from_bytes(kept, serialization.to_bytes(create()))
    fields = serialization.to_state_dict(create())
    with pytest.raises(ValueError, match=r"`TrainState`: got the fields \['params', 'step'\], expected"):
        serialization.from_state_dict(create(), {k: fields[k] for k in ("step", "params")})


# ----------------------------------------------------------------------------------------- import


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_without_flax_the_error_names_the_extra():
    out = run_python(
        "import sys; sys.modules['flax'] = None; import fusedopt\n"
        "try: fusedopt.TrainState\nexcept ImportError as error: print(error)\n"
        "assert not hasattr(fusedopt, 'nothing'); fusedopt.pack({'w': 1.0})"
    )
    assert re.search(r"needs Flax.*'fusedopt\[flax\]'", out)


def test_flax_may_be_imported_later():
    code = "import fusedopt; flat = fusedopt.pack({'w': 1.0})\nfrom flax import serialization\n"
    code += "flat = fusedopt.pack({'w': 1.0}); print(serialization.to_bytes(flat).hex())"
    assert run_python(code).strip() == serialization.to_bytes(fusedopt.pack({"w": 1.0})).hex()
