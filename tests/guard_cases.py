"""A model with a leaf of every kind, and steps of it in every mode, for the tests of skipped steps."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

import fusedopt
from tests.helpers import assert_equal, avals, case, normal

NAN, INF = np.nan, np.inf

# A frozen group, packed and solo buckets, three dtypes, a 0-d and an empty leaf.
PACKING = fusedopt.Packing(solo_from=64)
FROZEN = fusedopt.Group("still", lambda path, leaf: path[0] == "frozen", frozen=True)


def model(seed=0):
    shapes = {
        "a": {"kernel": (3, 5), "bias": (5,)},
        "b": {"kernel": (5, 3), "bias": (3,)},
        "solo": {"kernel": (9, 8)},
        "solo_vector": (70,),
        "scalar": (),
        "empty": (0, 2),
        "frozen": (2, 3),
        "half": {"kernel": (4, 5), "large": (8, 8)},
    }
    leaves, treedef = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    tree = treedef.unflatten([jnp.asarray(normal(s, 100 * seed + i)) for i, s in enumerate(leaves)])
    tree["half"] = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree["half"])
    return tree


@functools.cache
def stepper(name, mode, options=()):
    """One jitted step of an optimizer on `model()`, and a state that has moments: (tx, step, params, state)."""
    tx = case(name).make(0.1, packing=PACKING, groups=[FROZEN], **dict(options))
    params = model()
    flat = mode.startswith("flat")
    start = fusedopt.pack(params, tx) if flat else params

    def step(grads, state, params, extra):
        grads = fusedopt.pack(grads, tx) if flat else grads
        return (tx.apply if mode.endswith("apply") else tx.update)(grads, state, params, **extra)

    step = jax.jit(step)
    _, state = step(model(1), tx.init(start), start, {})
    return tx, step, start, state


def assert_skipped(mode, start, state, out, after, times=1):
    """Nothing moved but `skipped` and `total_skipped`."""
    assert_equal(out, start if mode.endswith("apply") else jax.tree.map(jnp.zeros_like, start))
    assert bool(after.skipped)
    assert int(after.total_skipped) == int(state.total_skipped) + times
    marks = {"skipped": state.skipped, "total_skipped": state.total_skipped}
    assert_equal(after._replace(**marks), state)
    assert avals(after) == avals(state)
