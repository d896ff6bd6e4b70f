"""The functions that the tests run through every backend, each beside its formula in NumPy float64."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat

needs_mosaic = pytest.mark.skipif(
    not compat.HAS_MOSAIC, reason=f"Mosaic kernels need jax >= 0.11, this is {jax.__version__}"
)
KERNELS = [pytest.param("mosaic", marks=needs_mosaic), "triton"]
BACKENDS = ["xla", *KERNELS]

f32 = jnp.float32


@dataclasses.dataclass(frozen=True)
class Case:
    """One function: `fn` as the launchers take it, `oracle` in float64 on the same arguments."""

    fn: Callable
    oracle: Callable
    updated: int
    read: int
    emit: tuple = ()
    rates: int = 0


def sgd(s, w, g):
    return (w.astype(f32) - s[1] * g.astype(f32),)


def sgd_oracle(s, w, g):
    return (w - s[1] * g,)


def momentum(s, w, m, g):
    m = s[2] * m.astype(f32) + g.astype(f32)
    return w.astype(f32) - s[1] * m, m


def momentum_oracle(s, w, m, g):
    m = s[2] * m + g
    return w - s[1] * m, m


def adam(s, w, m, v, g):
    """Emits the update and a copy of the new weights."""
    w, g = w.astype(f32), g.astype(f32)
    m = s[2] * m + (1 - s[2]) * g
    v = s[3] * v + (1 - s[3]) * g * g
    u = -s[1] * m / (jnp.sqrt(v) + s[4])
    return w + u, m, v, u, w + u


def adam_oracle(s, w, m, v, g):
    m = s[2] * m + (1 - s[2]) * g
    v = s[3] * v + (1 - s[3]) * g * g
    u = -s[1] * m / (np.sqrt(v) + s[4])
    return w + u, m, v, u, w + u


def lars(s, w, m, g):
    m = s[2] * m + s[-1] * (g.astype(f32) + s[4] * w)
    return w - m, m


def lars_oracle(s, w, m, g):
    m = s[2] * m + s[-1] * (g + s[4] * w)
    return w - m, m


CASES = {
    "sgd": Case(sgd, sgd_oracle, 1, 1),
    "momentum": Case(momentum, momentum_oracle, 2, 1),
    "adam": Case(adam, adam_oracle, 3, 1, (jnp.float32, jnp.bfloat16)),
    "lars": Case(lars, lars_oracle, 2, 1, rates=1),
}

SCALARS = np.array([0.0, 0.1, 0.9, 0.99, 1e-3], np.float32)


def normal(seed, shape, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def buffers(case, shape, dtype=np.float32):
    """(updated, read): random, second moments positive."""
    updated = [normal(i, shape, dtype if i == 0 else np.float32) for i in range(case.updated)]
    if case.updated == 3:
        updated[2] = jnp.abs(updated[2])
    return updated, [normal(10 + i, shape, dtype) for i in range(case.read)]


def double(x):
    return np.asarray(x).astype(np.float64)


def close(got, want, ulps=4):
    """Within a few roundings of the stored dtype: float32 arithmetic, approximate sqrt and division on no backend here,
    but contraction into fused multiply-adds is each compiler's choice."""
    eps = float(jnp.finfo(got.dtype).eps)
    np.testing.assert_allclose(double(got), want, rtol=ulps * eps, atol=ulps * eps)
