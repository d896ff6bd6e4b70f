"""Layer-wise adaptive rate scaling.

You, Gitman and Ginsburg, "Large batch training of convolutional networks" (2017), Algorithm 1.
For each leaf (segment) of its own, with norms over the whole leaf:

    paper   eta = tc*|w| / (|g| + wd*|w| + eps),   at most max_trust_ratio
    optax   eta = tc*|w| / (|g + wd*w| + eps)
            eta = 1 where one of the norms in it (paper: |w|, |g|) is below 1e-12
    m = b*m + lr*eta*(g + wd*w)
    u = -m                               nesterov: u = -( b*m + lr*eta*(g + wd*w) )

The learning rate is inside the momentum, as in the paper: a change of the learning rate does not
rescale the velocity gathered so far. Leaves without a trust ratio take `Sgd` with momentum in
the paper form, and these formulas with eta = 1 in the optax form.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from fusedopt.rules.base import Rule, decay_term

NORM_FLOOR = 1e-12


@dataclasses.dataclass(frozen=True)
class Lars(Rule):
    """LARS with momentum. `form` is "paper" or "optax"; `trust=False` fixes eta at 1."""

    form: str = "paper"
    nesterov: bool = False
    trust: bool = True

    slots = ("mu",)
    neutral = {"lr": 0.0, "b": 1.0, "wd": 0.0}

    def scalars(self, h, t):
        return {"lr": h["learning_rate"], "b": h["momentum"].keep, "wd": h["weight_decay"]}

    def measured(self, s, g, w, *slots):
        """The two quantities whose norms the trust ratio needs, elementwise.

        In the optax form w is in it even where decay does not apply, so `s.wd` must be 0 there.
        """
        if self.form == "optax":
            g = g + decay_term(s.wd, w)
        return w, g

    def trust_ratio(self, h, wd, norms):
        """eta of each segment, shape (S,), from norms (2, S) of `measured`, and wd (0-d)."""
        w, g = norms
        denominator = g + h["eps"]
        if self.form == "paper":
            # The ratio of the norms, not of wd*|w|: no product that could overflow.
            denominator = denominator + wd * w
        eta = h["trust_coefficient"] * (w / jnp.where(denominator > 0, denominator, 1))
        if self.form == "paper":
            eta = jnp.minimum(eta, h["max_trust_ratio"])
        tiny = (w < NORM_FLOOR) | (g < NORM_FLOOR)
        return jnp.where(tiny, jnp.ones_like(eta), eta)

    def formula(self, s, g, w, m):
        d = g if w is None else g + decay_term(s.wd, w)
        step = s.lr * s.eta * d if self.trust else s.lr * d
        m = s.b * m + step
        return -(s.b * m + step) if self.nesterov else -m, m
