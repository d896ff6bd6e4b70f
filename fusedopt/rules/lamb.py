"""LAMB: Adam with a trust ratio for each leaf.

You et al., "Large batch optimization for deep learning: training BERT in 76 minutes" (ICLR 2020),
Algorithm 2 with phi(z) = z, as in optax. For each leaf (segment) of its own, with norms over the whole leaf:

    m = b1*m + (1-b1)*g
    v = b2*v + (1-b2)*g*g
    d = (m/(1-b1^t)) / (sqrt(v/(1-b2^t) + eps_root) + eps) + wd*w
    eta = |w| / |d|                        1 where one of the norms is 0; at most max_trust_ratio, if given
    u = -lr*eta*d

The first pass computes d for its norm and writes nothing, the second one computes it again: that
costs less memory traffic than keeping it, and a step that turns out to be bad has changed nothing.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from fusedopt.rules.adam import Adam


@dataclasses.dataclass(frozen=True)
class Lamb(Adam):
    """LAMB for the leaves that have a trust ratio; the others take decoupled `Adam`."""

    decoupled: bool = True

    trust = True
    measures = ("mu", "nu")

    def measured(self, s, g, w, m, v):
        """w and d, whose norms the trust ratio needs; d is NaN where v overflows. `s.wd` must be 0 without decay."""
        d, _, v = self.direction(s, g, w, m, v)
        return w, d + (v - v)

    def trust_ratio(self, h, wd, norms):
        """eta of each segment, shape (S,), from norms (2, S) of `measured`."""
        w, d = norms
        zero = (w == 0) | (d == 0)
        eta = w / jnp.where(zero, jnp.ones_like(d), d)
        if "max_trust_ratio" in h:
            eta = jnp.minimum(eta, h["max_trust_ratio"])
        return jnp.where(zero, jnp.ones_like(eta), eta)

    def formula(self, s, g, w, m, v):
        d, m, v = self.direction(s, g, w, m, v)
        return -s.lr * s.eta * d, m, v
