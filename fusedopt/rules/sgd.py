"""Stochastic gradient descent, with momentum or Nesterov momentum, decay decoupled.

The form of optax.sgd and of Sutskever et al., "On the importance of initialization and momentum
in deep learning" (ICML 2013) as deep-learning frameworks write it: no dampening, the learning
rate outside the momentum. Weight decay is decoupled (Loshchilov and Hutter, "Decoupled weight
decay regularization", ICLR 2019): it never enters the momentum.

    m = b*m + g                          with momentum
    d = g | m | g + b*m                  plain | momentum | nesterov (m already updated)
    u = -lr*(d + wd*w)
"""

from __future__ import annotations

import dataclasses

from fusedopt.rules.base import Rule, decay_term


@dataclasses.dataclass(frozen=True)
class Sgd(Rule):
    """SGD. `momentum` and `nesterov` are static: they decide whether a slot exists."""

    momentum: bool = False
    nesterov: bool = False

    neutral = {"lr": 0.0, "b": 1.0, "wd": 0.0}

    @property
    def slots(self):
        return ("mu",) if self.momentum else ()

    def scalars(self, h, t):
        s = {"lr": h["learning_rate"]}
        if self.momentum:
            s["b"] = h["momentum"].keep
        if "weight_decay" in h:
            s["wd"] = h["weight_decay"]
        return s

    def formula(self, s, g, w, *slots):
        d = g
        if self.momentum:
            m = s.b * slots[0] + g
            d = g + s.b * m if self.nesterov else m
            slots = (m,)
        if w is not None:
            d = d + decay_term(s.wd, w)
        return (-s.lr * d, *slots)
