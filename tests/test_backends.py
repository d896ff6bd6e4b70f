"""The kernels compute what the definition computes: every optimizer, in interpret mode, on a ragged tree."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusedopt
import pallas_kernels
from pallas_kernels import compat
from tests.helpers import assert_close, assert_equal, case, each_once, filled, gradients

KERNELS = [b for b in ("mosaic", "triton") if b != "mosaic" or compat.HAS_MOSAIC]
# Each mode and each kind of kernel once; the other pairs are marked slow.
DEFAULT = [("adamw", "apply"), ("lars", "flat"), ("sgd", "update")]

# Ragged: odd sizes and a 0-d leaf in packed buckets, whole and broken blocks in solo ones.
SHAPES = {
    "a": {"kernel": (3, 5), "bias": (5,)},
    "b": {"kernel": (1, 129), "bias": (128,)},
    "scalar": (),
    "solo": (33, 65),
    "block": (32, 32),
    "empty": (0, 3),
}


def packing(backend):
    """Norms by Mosaic kernels need leaves on whole blocks; the default alignment is tested by Triton."""
    return fusedopt.Packing(solo_from=1024, align=1024 if backend == "mosaic" else 128)


STEPS = 5
# The same formula on the same float32 numbers: contraction and division may round differently in each step.
TOLERANCE = 2e-6


def program(name, backend, mode, packing):
    """Five steps as a function of which of them the caller wants skipped; one step is one compiled program."""
    tx = case(name).make(0.1, packing=packing, backend=backend)
    params = jax.tree.map(jnp.asarray, filled(SHAPES))
    stacked = gradients(params, STEPS)

    def step(p, s, g, bad):
        g = fusedopt.pack(g, tx) if mode == "flat" else g
        if mode == "update":
            updates, s = tx.update(g, s, p, has_nan=bad)
            return updates, jax.tree.map(jnp.add, p, updates), s
        p, s = tx.apply(g, s, p, has_nan=bad)
        return p, p, s

    start = fusedopt.pack(params, tx) if mode == "flat" else params
    first = jax.tree.map(lambda x: x[0], stacked)
    step = jax.jit(step).lower(start, tx.init(start), first, jnp.bool_(False)).compile()

    def run(skipped):
        p, s, history = start, tx.init(start), []
        for t in range(STEPS):
            out, p, s = step(p, s, jax.tree.map(lambda x, t=t: x[t], stacked), jnp.bool_(t in skipped))
            history.append((out, s))
        return p.tree if mode == "flat" else p, s, history

    return run


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(n, m, marks=[] if (n, m) in DEFAULT else [pytest.mark.slow])
        for n, m in dict.fromkeys([*DEFAULT, *each_once(("update", "apply", "flat"))])
    ],
)
def test_kernels_agree_with_the_definition(name, mode, backend):
    definition = program(name, "xla", mode, packing(backend))
    with pallas_kernels.interpret():
        kernels = program(name, backend, mode, packing(backend))
    for skipped in ([], [2]):
        want, want_state, _ = definition(skipped)
        got, state, history = kernels(skipped)
        assert_close(got, want, TOLERANCE)
        for slot in ("mu", "nu", "trust_ratios"):
            assert_close(getattr(state, slot), getattr(want_state, slot), 2 * TOLERANCE)
        assert (int(state.count), int(state.total_skipped)) == (STEPS - len(skipped), len(skipped))
        for t in skipped:
            (before, state), (after, new) = history[t - 1 : t + 1]
            assert_equal(new._replace(skipped=state.skipped, total_skipped=state.total_skipped), state)
            assert_equal(after, jax.tree.map(jnp.zeros_like, after) if mode == "update" else before)


@pytest.mark.parametrize("backend", KERNELS)
def test_16_bit_parameters(backend):
    params = jax.tree.map(lambda x: jnp.asarray(x).astype(jnp.bfloat16), filled(SHAPES))
    grads = jax.tree.map(lambda x: jnp.cos(x), params)

    def step(backend):
        tx = case("adamw").make(0.1, packing=packing("triton"), backend=backend)
        return jax.jit(tx.update)(grads, tx.init(params), params)

    want, want_state = step("xla")
    with pallas_kernels.interpret():
        got, state = step(backend)
    assert_close(got, want, 8e-3)  # at most one rounding of bfloat16 apart, where float32 falls on a tie
    assert_close((state.mu, state.nu), (want_state.mu, want_state.nu), TOLERANCE)


@pytest.mark.parametrize("backend", KERNELS)
def test_gradients_through_a_kernel_are_those_of_the_definition(backend):
    params = {"w": jnp.ones((3, 5)), "b": jnp.ones(5)}
    grads = jax.tree.map(lambda x: 0.5 * x, params)

    def slopes(backend):
        tx = fusedopt.adamw(0.1, backend=backend)
        state = tx.init(params)
        return jax.jit(jax.grad(lambda lr: jnp.sum(tx.apply(grads, state, params, learning_rate=lr)[0]["w"])))(0.1)

    want = slopes("xla")
    with pallas_kernels.interpret():
        np.testing.assert_allclose(slopes(backend), want, rtol=TOLERANCE)


def test_an_unknown_backend_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="`backend`: expected 'xla', 'mosaic', 'triton' or None, got 'nonsense'"):
        fusedopt.adamw(0.1, backend="nonsense")


@pytest.mark.parametrize("backend", ["mosaic", "triton"])
def test_a_kernel_backend_on_a_cpu_is_an_error_with_every_reason(backend):
    tx, params = fusedopt.adamw(0.1, backend=backend), {"w": jnp.ones((2, 3))}
    for step in (tx.update, jax.jit(tx.update)):
        with pytest.raises(ValueError, match=f"`backend`='{backend}' cannot run here") as info:
            step(params, tx.init(params), params)
        for name in ("mosaic: no", "triton: no", "xla: yes"):
            assert name in str(info.value)
        assert "GPU" in str(info.value)


def test_r138_the_default_on_a_cpu_is_the_definition():
    params = {"w": jnp.ones((2, 3))}
    default, xla = (fusedopt.adamw(0.1, backend=b) for b in (None, "xla"))
    for tx in (default, xla):
        assert "pallas" not in str(jax.make_jaxpr(tx.update)(params, tx.init(params), params))
    assert_equal(default.update(params, default.init(params), params), xla.update(params, xla.init(params), params))
