"""What docs/from-torch.md calls the same: against numbers that PyTorch printed, and Apex's formulas in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fusedopt
from tests.helpers import standard_promotion

PARAMS = {
    "kernel": np.cos(np.arange(6.0, dtype=np.float32)).reshape(2, 3),
    "bias": np.sin(np.arange(3.0, dtype=np.float32)),
}
LR, WD, STEPS = 0.05, 0.1, 5

# Parameters after five steps with the gradient cos(3*p + t), kernel before bias; torch 2.14.1 on a CPU, fused=True.
TORCH = {
    # torch.optim.AdamW(p, lr=0.05, weight_decay=0.1)
    "AdamW": [0.9598933, 0.6510676, -0.5546749, -1.020503, -0.8362025, 0.4353554, 0.0105277, 0.8668135, 0.9087798],
    # torch.optim.Adam(p, lr=0.05, weight_decay=0.1)
    "Adam": [0.9593367, 0.6547362, -0.5608724, -1.0196635, -0.8489593, 0.4380589, 0.0105331, 0.86788, 0.9084382],
    # torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True)
    "nesterov": [0.7462184, 0.615536, -0.797085, -1.3350199, -1.1906735, 0.4359145, 0.1140322, 0.7218493, 0.7338594],
    # torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1)
    "SGD": [0.7870477, 0.6574227, -0.6489168, -1.1350089, -0.9733903, 0.4640331, 0.1153997, 0.7644634, 0.7755904],
    # torch.optim.AdamW([{"params": kernel, "lr": 0.005}, {"params": bias, "weight_decay": 0.0}], lr=0.05, weight_decay=0.1)
    "groups": [0.9972036, 0.5534951, -0.4279326, -0.9923649, -0.6697506, 0.3012099, 0.0097767, 0.8885732, 0.9322793],
}
OURS = {
    "AdamW": fusedopt.adamw(LR, weight_decay=WD, mask=True),
    "Adam": fusedopt.adam(LR, weight_decay=WD, mask=True),
    "nesterov": fusedopt.sgd(LR, 0.9, True),
    "SGD": fusedopt.chain(optax.add_decayed_weights(WD), fusedopt.sgd(LR, 0.9)),
    "groups": fusedopt.adamw(
        LR, weight_decay=WD, groups=[fusedopt.Group("kernel", {"kernel": True, "bias": False}, learning_rate_scale=0.1)]
    ),
}


def run(tx):
    params = jax.tree.map(jnp.asarray, PARAMS)
    state, apply = tx.init(params), jax.jit(tx.apply)
    for t in range(1, STEPS + 1):
        params, state = apply(jax.tree.map(lambda p, t=t: jnp.cos(3 * p + t), params), state, params)
    return params


@pytest.mark.parametrize("name", TORCH)
def test_numbers_of_torch(name):
    with standard_promotion():  # of optax's add_decayed_weights
        got = run(OURS[name])
    # The numbers have seven decimals; five steps in two orders of operations.
    np.testing.assert_allclose(np.concatenate([got["kernel"].ravel(), got["bias"]]), TORCH[name], atol=5e-7)


def apex_lamb(decay, nvlamb=False):
    """Apex's FusedLAMB(lr=0.05), decay by name of the parameter: gradients clipped to a norm of 1, all in float64."""
    p = {k: x.astype(np.float64) for k, x in PARAMS.items()}
    m, v = ({k: np.zeros_like(x) for k, x in p.items()} for _ in range(2))
    for t in range(1, STEPS + 1):
        g = {k: np.cos(3 * x + t) for k, x in p.items()}
        norm = np.sqrt(sum(np.sum(x * x) for x in g.values()))
        for k in p:
            s = g[k] / max(norm, 1.0)
            m[k] = 0.9 * m[k] + 0.1 * s
            v[k] = 0.999 * v[k] + 0.001 * s * s
            u = m[k] / (1 - 0.9**t) / (np.sqrt(v[k] / (1 - 0.999**t)) + 1e-6) + decay[k] * p[k]
            ratio = np.linalg.norm(p[k]) / np.linalg.norm(u) if nvlamb or decay[k] else 1.0
            p[k] = p[k] - LR * ratio * u
    return p


LAMB = {
    "decay everywhere": (
        fusedopt.lamb(LR, weight_decay=0.01, mask=True, clip_norm=1.0),
        apex_lamb(dict(kernel=0.01, bias=0.01)),
    ),
    "groups": (
        fusedopt.lamb(LR, weight_decay=0.01, trust_ratio_mask=fusedopt.weight_mask, clip_norm=1.0),
        apex_lamb(dict(kernel=0.01, bias=0.0)),
    ),
    "use_nvlamb": (
        fusedopt.lamb(LR, weight_decay=0.01, clip_norm=1.0),
        apex_lamb(dict(kernel=0.01, bias=0.0), nvlamb=True),
    ),
}


@pytest.mark.parametrize("name", LAMB)
def test_lamb_of_apex(name):
    tx, want = LAMB[name]
    for k, got in run(tx).items():
        np.testing.assert_allclose(got, want[k], atol=5e-7)  # float32, five steps


def test_larc_of_apex_around_sgd():
    p, m = {k: x.astype(np.float64) for k, x in PARAMS.items()}, dict.fromkeys(PARAMS, 0.0)
    for t in range(1, STEPS + 1):
        for k in p:
            g, norm = np.cos(3 * p[k] + t), np.linalg.norm
            rate = 0.02 * norm(p[k]) / (norm(g) + WD * norm(p[k]) + 1e-8)
            m[k] = 0.9 * m[k] + rate * (g + WD * p[k])
            p[k] = p[k] - LR * m[k]
    for k, got in run(fusedopt.lars(LR, WD, True, 0.02, 1e-8, True, momentum=0.9)).items():
        np.testing.assert_allclose(got, p[k], atol=5e-7)


def test_the_loss_scale_takes_the_decisions_of_grad_scaler():
    """torch.amp.GradScaler(init_scale=65536.0, growth_interval=3) after each of these steps, as it printed them."""
    found_inf = [0, 0, 0, 0, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0]
    scales = [2**16, 2**16, 2**17, 2**17, 2**16, 2**16, 2**16, 2**17, 2**16, *[2**15] * 3, *[2**16] * 3, 2**17]
    scale, got = fusedopt.DynamicLossScale(65536.0, period=3), []
    for flag in found_inf:
        scale = scale.update(bool(flag))
        got.append(int(scale.loss_scale))
    assert got == scales
