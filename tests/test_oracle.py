"""Every optimizer against the float64 oracle, and its modes and packings against each other."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import fusedopt
from tests.helpers import (
    MODES,
    OPTIMIZER_NAMES,
    assert_close,
    case,
    each_once,
    filled,
    final_params,
    flat_runs,
    gradients,
    problem,
)

# 100 float32 steps of a few roundings each; measured 3e-7 to 8e-7 of the largest parameter.
TOLERANCE = 1e-6

SLOW = ("lars_no_decay", "lars_optax")  # two others differ from them in one hyperparameter and in one flag


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in OPTIMIZER_NAMES]
)
def test_100_steps_stay_within_a_millionth_of_the_float64_oracle_at_any_learning_rate(name):
    params, grads = problem()
    for learning_rate, (flat, state) in flat_runs(name).items():
        want = case(name).oracle(params, learning_rate).run(grads)
        assert_close(flat.tree, want, TOLERANCE)
        assert state.count == 100
        # The steps did move every leaf, so the oracle was not met by standing still.
        for before, after in zip(jax.tree.leaves(params), jax.tree.leaves(want), strict=True):
            assert not np.size(before) or np.max(np.abs(after - before)) > 1e-3


# One rule, a packed and a solo bucket in each group; the others with `-m slow`.
FAST = (("adamw", "solo"),)
PACKINGS = {"solo": fusedopt.Packing(), "packed": fusedopt.Packing(solo_from=None)}
SMALL = {"conv": {"kernel": (3, 1, 2, 5), "bias": (129,)}, "big": (130, 130)}


@pytest.mark.parametrize(
    ("name", "packing"),
    [pytest.param(n, p, marks=() if (n, p) in FAST else pytest.mark.slow) for n, p in each_once(list(PACKINGS))],
)
def test_all_three_modes_give_the_same_numbers(name, packing):
    params = filled(SMALL)
    grads = gradients(params, 5)
    tx = case(name).make(1e-2, packing=PACKINGS[packing])
    results = {mode: final_params(tx, mode, params, grads) for mode in MODES}
    results["packed for tx"] = final_params(tx, "flat_apply", params, grads, pack_with=tx)
    # The same formula on other buffers: XLA may contract a product and a sum into an fma in one program and not in
    # another, half an ulp of the larger parameters in each of the 5 steps.
    for got in results.values():
        assert_close(got, results["update"], 5 * 6e-8)
    assert_close(results["update"], case(name).oracle(params, 1e-2).run(grads), TOLERANCE)


@pytest.mark.slow
def test_the_packing_does_not_change_the_numbers():
    params = filled(SMALL)
    grads = gradients(params, 5)
    packings = [fusedopt.Packing(solo_from=n, align=a) for n, a in ((1, 128), (100, 256), (None, 1024))]
    for name in ("adamw", "lars"):
        results = [final_params(case(name).make(1e-2, packing=p), "apply", params, grads) for p in packings]
        for got in results[1:]:
            assert_close(got, results[0], 5 * 6e-8)  # see above
