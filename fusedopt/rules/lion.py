"""Lion, "evolved sign momentum".

Chen et al., "Symbolic discovery of optimization algorithms" (NeurIPS 2023), Algorithm 2, with the
decay times the learning rate as in optax:

    d = sign( b1*m + (1-b1)*g )
    m = b2*m + (1-b2)*g                    from the m that d was made of
    u = -lr*( d + wd*w )

Every element of d is -1, 0 or 1: the learning rate is to be three to ten times smaller, and the
decay as much larger, than for AdamW.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from fusedopt.rules.base import Rule, decay_term


@dataclasses.dataclass(frozen=True)
class Lion(Rule):
    """Lion. Nothing in it is static."""

    slots = ("mu",)
    neutral = {"lr": 0.0, "b2": 1.0, "c2": 0.0, "wd": 0.0}

    def scalars(self, h, t):
        b1, b2 = h["b1"], h["b2"]
        s = {"lr": h["learning_rate"], "b1": b1.keep, "c1": b1.complement, "b2": b2.keep, "c2": b2.complement}
        if "weight_decay" in h:
            s["wd"] = h["weight_decay"]
        return s

    def formula(self, s, g, w, m):
        d = s.b1 * m + s.c1 * g
        # Written out, because not every kernel language has a sign; 0 and NaN stay what they are.
        d = jnp.where(d > 0, jnp.ones_like(d), jnp.where(d < 0, -jnp.ones_like(d), d))
        m = s.b2 * m + s.c2 * g
        if w is not None:
            d = d + decay_term(s.wd, w)
        return -s.lr * d, m
