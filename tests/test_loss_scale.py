"""The loss scale's rule, step by step, and a run that begins with a scale far too high."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusedopt
from fusedopt import DynamicLossScale


def run(scale, flags):
    """The scale after each step."""
    values = []
    for bad in flags:
        scale = scale.update(bad)
        values.append(float(scale.loss_scale))
    return values


def test_r50_it_grows_on_the_last_step_of_the_period_and_counts_anew():
    assert run(DynamicLossScale(8.0, period=2), [False] * 5) == [8, 16, 16, 32, 32]  # flax's would grow on the third


def test_an_overflow_halves_it_and_restarts_the_count():
    assert run(DynamicLossScale(8.0, period=2), [False, True, False, False, True]) == [8, 4, 4, 8, 4]


def test_r52_it_stays_between_its_limits():
    scale = DynamicLossScale(4.0, period=1, min_loss_scale=2.0, max_loss_scale=8.0)
    assert run(scale, [True, True, True, False, False, False]) == [2, 2, 2, 4, 8, 8]
    # A scale that begins outside moves only towards the limits.
    assert run(DynamicLossScale(64.0, period=1, max_loss_scale=8.0), [False, True, True]) == [64, 32, 16]
    assert run(DynamicLossScale(0.5, period=1, min_loss_scale=2.0), [True, False, False]) == [0.5, 1, 2]


def test_r52_hysteresis_forgives_the_first_overflow_until_the_scale_has_grown():
    scale = DynamicLossScale(8.0, period=2, hysteresis=2)
    assert run(scale, [True, False, True, True]) == [8, 8, 4, 2]
    assert run(scale, [True, False, False, True, True]) == [8, 8, 16, 16, 8]


@pytest.mark.parametrize("flag", [1, 2.0, True, jnp.float16(0.5), jnp.array(True)], ids=str)
def test_any_nonzero_flag_is_an_overflow(flag):
    assert run(DynamicLossScale(8.0), [flag]) == [4]


def test_every_field_survives_tree_map_jit_scan_and_vmap_with_stable_types():
    scale = DynamicLossScale(8.0, period=2, min_loss_scale=4.0, hysteresis=2)
    doubled = jax.tree.map(lambda x: x + x, scale)
    assert isinstance(doubled, DynamicLossScale)
    assert float(doubled.min_loss_scale) == 8  # a well-known one loses it here
    flags = jnp.array([True, True, False, False])
    end, values = jax.jit(lambda s: jax.lax.scan(lambda s, bad: (s.update(bad), s.loss_scale), s, flags))(scale)
    assert values.tolist() == [8, 8, 4, 4]
    assert float(end.loss_scale) == 8
    assert jax.tree.map(jnp.result_type, end) == jax.tree.map(jnp.result_type, scale)
    batch = jax.vmap(lambda bad: scale._replace(left=jnp.int32(1)).update(bad).loss_scale)(jnp.array([True, False]))
    assert batch.tolist() == [4, 8]
    assert jax.eval_shape(lambda: scale).loss_scale.shape == ()
    traces = []
    step = jax.jit(lambda s: (traces.append(0), s.update(False))[1])
    step(step(scale))
    assert len(traces) == 1


def test_scale_widens_a_16_bit_loss():
    scale = DynamicLossScale(2.0**17)
    assert scale.scale(jnp.float16(2)).dtype == jnp.float32
    assert float(scale.scale(jnp.float16(2))) == 2.0**18
    assert scale.scale(3).dtype == jnp.float32


def test_value_and_grad_scales_the_gradients_and_not_the_loss():
    scale = DynamicLossScale(4.0)

    def loss(w, x):
        return jnp.sum(w * x)

    w, x = jnp.arange(3.0), jnp.ones(3)
    value, grads = scale.value_and_grad(loss)(w, x)
    assert float(value) == 3
    np.testing.assert_array_equal(grads, 4 * x)
    (value, aux), (gw, gx) = scale.value_and_grad(lambda w, x: (loss(w, x), "aux"[:0] or w), (0, 1), has_aux=True)(w, x)
    np.testing.assert_array_equal(aux, w)
    np.testing.assert_array_equal(gx, 4 * w)
    np.testing.assert_array_equal(gw, 4 * x)


@pytest.mark.parametrize(
    ("name", "value"),
    [("loss_scale", 0.0), ("loss_scale", float("inf")), ("period", 0), ("factor", 1.0), ("hysteresis", 0)]
    + [("min_loss_scale", -1.0), ("max_loss_scale", float("nan"))],
)
def test_numbers_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"`{name}`: expected .*, got"):
        DynamicLossScale(**{name: value})


def test_float16_gradients_with_a_scale_far_too_high_recover():
    """Gradients of 2**-3 times a scale of 2**24 overflow float16: halvings come first, then steps as without a scale."""
    tx = fusedopt.sgd(0.5)
    w = jnp.ones((4, 4))

    def loss(w):
        return jnp.mean((w.astype(jnp.float16) - jnp.float16(0.5)) ** 2).astype(jnp.float32)

    @jax.jit
    def step(w, state, scale):
        value, grads = scale.value_and_grad(loss)(w)
        w, state = tx.apply(grads, state, w, loss_scale=scale.loss_scale)
        return w, state, scale.update(state.skipped), value

    state, scale = tx.init(w), DynamicLossScale(2.0**24)
    losses = []
    for _ in range(60):
        w, state, scale, value = step(w, state, scale)
        losses.append(float(value))
    skipped = int(state.total_skipped)
    assert 5 <= skipped <= 12
    assert float(scale.loss_scale) == 2.0 ** (24 - skipped)
    assert int(state.count) == 60 - skipped
    assert losses[-1] < 0.05 < losses[0]
