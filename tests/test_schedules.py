"""warmup_cosine by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusedopt

# cos and a product in float32, relative to the peak.
ROUNDING = 3e-7


def test_warmup_cosine_has_the_values_of_its_formula():
    schedule = fusedopt.warmup_cosine(2.0, 4, 12, end_value=0.4)
    # Warmup: peak*(t+1)/4. Cosine: .4 + .8*(1 + cos(pi*r)) at r = 0, 1/8, 1/4, 1/2, 3/4, 1.
    want = {
        0: 0.5,
        1: 1.0,
        2: 1.5,
        3: 2.0,
        4: 2.0,
        5: 1.9391036260090293,
        6: 1.7656854249492382,
        8: 1.2,
        10: 0.6343145750507620,
        12: 0.4,
        13: 0.4,
        10**9: 0.4,
    }
    for count, value in want.items():
        got = schedule(jnp.int32(count))
        assert (got.shape, got.dtype) == ((), jnp.float32)
        np.testing.assert_allclose(got, value, atol=2.0 * ROUNDING, rtol=0)


def test_no_warmup_starts_at_the_peak_and_ends_at_0():
    schedule = fusedopt.warmup_cosine(1.0, 0, 2)
    np.testing.assert_allclose([schedule(t) for t in range(4)], [1.0, 0.5, 0.0, 0.0], atol=ROUNDING)


def test_warmup_only_reaches_the_peak_and_then_the_end():
    schedule = fusedopt.warmup_cosine(1.0, 2, 2, 0.25)
    np.testing.assert_allclose([schedule(t) for t in range(4)], [0.5, 1.0, 0.25, 0.25], atol=ROUNDING)


def test_the_peak_may_be_traced_and_the_schedule_differentiated():
    def at(peak):
        return fusedopt.warmup_cosine(peak, 4, 12)(jnp.int32(8))

    np.testing.assert_allclose(jax.jit(at)(jnp.float32(3.0)), 1.5, rtol=ROUNDING)
    np.testing.assert_allclose(jax.grad(at)(3.0), 0.5, rtol=ROUNDING)


def test_steps_may_be_floats_and_arrays_that_are_known():
    want = fusedopt.warmup_cosine(1.0, 4, 12)(6)
    for warmup, total in ((4.0, 12.0), (np.int32(4), np.float32(12)), (np.array(4), jnp.int32(12))):
        np.testing.assert_array_equal(fusedopt.warmup_cosine(1.0, warmup, total)(6), want)


def test_it_drives_an_optimizer():
    tx = fusedopt.sgd(fusedopt.warmup_cosine(1.0, 2, 4))
    p = g = jnp.ones(2)
    state, update, rates = tx.init(p), jax.jit(tx.update), []
    for _ in range(5):
        u, state = update(g, state, p)
        rates.append(-float(u[0]))
    np.testing.assert_allclose(rates, [0.5, 1.0, 1.0, 0.5, 0.0], atol=ROUNDING)


@pytest.mark.parametrize(("warmup", "total"), [(-1, 10), (11, 10), (0, 0)])
def test_steps_out_of_order_are_refused(warmup, total):
    with pytest.raises(ValueError, match=f"warmup_steps={warmup}, total_steps={total}"):
        fusedopt.warmup_cosine(1.0, warmup, total)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_values_out_of_range_are_refused_by_name(value):
    with pytest.raises(ValueError, match=rf"`peak_value`: expected a finite number >= 0, got {value}"):
        fusedopt.warmup_cosine(value, 0, 10)
    with pytest.raises(ValueError, match=rf"`end_value`: expected a finite number >= 0, got {value}"):
        fusedopt.warmup_cosine(1.0, 0, 10, value)
