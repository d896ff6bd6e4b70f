"""The trees that the steps are measured on: the known models and some that are nothing but a kind of tree."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import fusedopt
from benchmarks import models
from benchmarks.models import leaf


def tiny_300() -> dict:
    """300 matrices of 24 to 576 elements, each of another shape."""
    rng = np.random.default_rng(0)
    rows, columns = rng.integers(4, 24, 300, endpoint=True), rng.integers(6, 24, 300, endpoint=True)
    return {f"layer_{i:03}": {"kernel": leaf(int(m), int(n))} for i, (m, n) in enumerate(zip(rows, columns))}


def convs_120() -> dict:
    """120 convolutions of 3x3 from 32 to 32 channels, each with a norm's scale and bias."""
    return {f"layer_{i:03}": models.conv_bn(3, 32, 32) for i in range(120)}


def adapters_600() -> dict:
    """600 matrices of 3,072 elements, as the adapters of a large model that is not trained itself."""
    return {f"adapter_{i:03}": {"kernel": leaf(16, 192)} for i in range(600)}


def mixed() -> dict:
    """8 matrices of 1024x1024 among 264 of 128 elements: nearly all parameters are in few arrays."""
    large = {f"large_{i}": {"kernel": leaf(1024, 1024)} for i in range(8)}
    return {**large, **{f"small_{i:03}": {"kernel": leaf(8, 16)} for i in range(264)}}


def large_10() -> dict:
    """10 matrices of 1000x1000: nothing to win here by packing."""
    return {f"layer_{i}": {"kernel": leaf(1000, 1000)} for i in range(10)}


def lars_200() -> dict:
    """200 matrices of 64x64: 400 norms."""
    return {f"layer_{i:03}": {"kernel": leaf(64, 64)} for i in range(200)}


def equal_leaves(count: int, *shape: int) -> dict:
    """That many arrays of one shape."""
    return {f"layer_{i:04}": {"kernel": leaf(*shape)} for i in range(count)}


TREES: dict[str, Callable[[], dict]] = {
    **{build.__name__: build for build in (tiny_300, convs_120, adapters_600, mixed, large_10, lars_200)},
    **models.MODELS,
}

STEP = tuple(name for name in TREES if name != "lars_200")
LARS = ("resnet50", "convs_120", "lars_200")
LARGE = 10_000_000
"""Parameters from which on a step is a matter of memory bandwidth, and is held against that of a copy."""


def shapes(name: str) -> dict:
    """The tree `name`, of shapes."""
    if name not in TREES:
        raise ValueError(f"no tree {name!r}: the known ones are {', '.join(TREES)}")
    return TREES[name]()


class Tree:
    """Parameters and gradients of a tree, on the host: each candidate gets copies of its own.

    Both are normal numbers and the same in every run. The gradients on the device, as a tree and packed, are shared by
    the candidates: no step writes to them.
    """

    def __init__(self, tree: Any, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.leaves, self.parameters = models.describe(tree)
        self.params, self.grads = (
            jax.tree.map(lambda x, s=scale: np.float32(s) * rng.standard_normal(x.shape, np.float32), tree)
            for scale in (0.02, 1e-3)
        )
        self._packed: dict[Any, Any] = {}

    @functools.cached_property
    def device_grads(self) -> Any:
        return jax.device_put(self.grads, may_alias=False)

    def device_params(self) -> Any:
        """New each time: a step takes what it gets."""
        return jax.device_put(self.params, may_alias=False)

    def packed_params(self, tx: Any) -> fusedopt.FlatParams:
        """New each time, as an optimizer lays them out."""
        return jax.device_put(jax.tree.map(np.asarray, fusedopt.pack(self.params, tx)), may_alias=False)

    def packed_grads(self, tx: Any) -> fusedopt.FlatParams:
        flat = fusedopt.pack(self.grads, tx)
        return self._packed.setdefault(flat.layout, flat)
