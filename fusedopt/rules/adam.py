"""Adam and AdamW.

Kingma and Ba, "Adam: a method for stochastic optimization" (ICLR 2015), Algorithm 1;
`decoupled` is Loshchilov and Hutter, "Decoupled weight decay regularization" (ICLR 2019),
with the decay times the learning rate as in optax and PyTorch; `nesterov` is Dozat,
"Incorporating Nesterov momentum into Adam" (2016) in optax's form.

    g = g + wd*w                                    coupled (Adam's L2) only
    m = b1*m + (1-b1)*g
    v = b2*v + (1-b2)*g*g
    m_hat = m/(1-b1^t)                              nesterov: b1*m/(1-b1^(t+1)) + (1-b1)*g/(1-b1^t)
    v_hat = v/(1-b2^t)
    u = -lr*( m_hat/(sqrt(v_hat + eps_root) + eps) + wd*w )        wd*w: decoupled only

`eps_inside` is the other published form, the last lines of section 2 of the paper with epsilon
under the root:

    alpha = lr*sqrt(1-b2^t)/(1-b1^t)
    u = -( alpha*m/sqrt(v + eps) + lr*wd*w )

Where the denominator is exactly 0 (eps 0 and no gradient yet) the fraction is 0.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from fusedopt.hyperparams import bias_correction
from fusedopt.rules.base import Rule, decay_term


@dataclasses.dataclass(frozen=True)
class Adam(Rule):
    """Adam (`decoupled=False`) and AdamW. The flags are static, the numbers are operands."""

    decoupled: bool = False
    nesterov: bool = False
    eps_inside: bool = False

    slots = ("mu", "nu")
    squares_gradient = True
    neutral = {"lr": 0.0, "b1": 1.0, "c1": 0.0, "b2": 1.0, "c2": 0.0, "r1": 0.0, "r1_next": 0.0, "r2": 0.0, "wd": 0.0}

    def __post_init__(self):
        if self.eps_inside and self.nesterov:
            raise ValueError(
                "`eps_inside`: expected False with `nesterov`=True, got True; there is no published form of both"
            )

    def scalars(self, h, t):
        b1, b2 = h["b1"], h["b2"]
        correction1, correction2 = bias_correction(b1, t), bias_correction(b2, t)
        s = {
            "lr": h["learning_rate"],
            "b1": b1.keep,
            "c1": b1.complement,
            "b2": b2.keep,
            "c2": b2.complement,
            "eps": h["eps"],
        }
        if self.eps_inside:
            s["r1"] = jnp.sqrt(correction2) / correction1
        else:
            s["r1"], s["r2"], s["eps_root"] = 1 / correction1, 1 / correction2, h["eps_root"]
        if self.nesterov:
            s["r1_next"] = 1 / bias_correction(b1, t + 1)
        if "weight_decay" in h:
            s["wd"] = h["weight_decay"]
        return s

    def direction(self, s, g, w, m, v):
        """``(d, m, v)``: what the learning rate is multiplied with, and the new moments."""
        if w is not None and not self.decoupled:
            g = g + decay_term(s.wd, w)
        m = s.b1 * m + s.c1 * g
        v = s.b2 * v + s.c2 * (g * g)
        if self.nesterov:
            numerator = s.b1 * m * s.r1_next + s.c1 * g * s.r1
        else:
            numerator = m * s.r1
        if self.eps_inside:
            denominator = jnp.sqrt(v + s.eps)
        else:
            denominator = jnp.sqrt(v * s.r2 + s.eps_root) + s.eps
        d = jnp.where(denominator == 0, jnp.zeros_like(numerator), numerator / denominator)
        if w is not None and self.decoupled:
            d = d + decay_term(s.wd, w)
        return d, m, v

    def formula(self, s, g, w, m, v):
        d, m, v = self.direction(s, g, w, m, v)
        return -s.lr * d, m, v
