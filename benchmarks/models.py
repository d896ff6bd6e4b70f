"""The trees of `fusedopt.models`, with numbers in them."""

from __future__ import annotations

import jax
import numpy as np

from fusedopt.models import MODELS as MODELS
from fusedopt.models import conv as conv
from fusedopt.models import conv_bn as conv_bn
from fusedopt.models import dense as dense
from fusedopt.models import leaf as leaf
from fusedopt.models import mlp as mlp
from fusedopt.models import norm as norm
from fusedopt.models import shapes as shapes


def arrays(name: str, seed: int = 0, scale: float = 0.02) -> dict:
    """The tree of the model `name`, of NumPy arrays: the same for the same `seed` and `scale`.

    Normal values of standard deviation `scale`, around one for the scales of norms and around zero for all else. No
    model is initialized like this; but zeros, with which biases and half of LoRA start, would hide mistakes.
    """
    rng = np.random.default_rng(seed)

    def draw(path, shape):
        values = rng.standard_normal(shape.shape, dtype=np.float32)
        values *= np.float32(scale)
        if path[-1].key == "scale":
            values += np.float32(1)
        return values

    return jax.tree.map_with_path(draw, shapes(name))


def describe(tree) -> tuple[int, int]:
    """The number of leaves of a tree of shapes or arrays, and of the parameters in them."""
    leaves = jax.tree.leaves(tree)
    return len(leaves), sum(x.size for x in leaves)
