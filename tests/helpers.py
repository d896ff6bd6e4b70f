"""Shared by the tests: trees, a float64 oracle of every optimizer, and the table of optimizers.

The oracle is NumPy, one leaf at a time, written from the formulas and not from the library: it
knows no buffers, and its norms are those of one leaf.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fusedopt

# ---------------------------------------------------------------------------------------- trees


def normal(shape: tuple[int, ...] = (), seed: int = 0, scale: float = 1.0, dtype: Any = np.float32) -> np.ndarray:
    return np.asarray(scale * np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def filled(shapes: Any, seed: int = 0, scale: float = 1.0, dtype: Any = np.float32) -> Any:
    """Arrays for a tree of shape tuples; every leaf has numbers of its own."""
    leaves, treedef = jax.tree.flatten(shapes, is_leaf=_is_shape)
    return treedef.unflatten([normal(s, 1000 * seed + i, scale, dtype) for i, s in enumerate(leaves)])


def _is_shape(x: Any) -> bool:
    return isinstance(x, tuple) and all(isinstance(n, int) for n in x)


# Every rank from 0 to 4, an empty leaf, sizes around the alignment of 128, and a leaf (16,512 elements) above the
# default `solo_from`. Weights and biases by their names and by their rank.
RAGGED = {
    "conv_in": {"kernel": (3, 3, 2, 5), "bias": (5,)},
    "conv": {"kernel": (1, 2, 7, 9)},
    "norm": {"scale": (127,), "bias": (128,)},
    "square_bias": {"bias": (4, 33)},
    "fc": {"kernel": (1, 127), "bias": (129,)},
    "head": {"kernel": (129, 1), "b": (1,)},
    "row": {"kernel": (2, 64)},
    "empty": {"kernel": (0, 3), "bias": (0,)},
    "temperature": (),
    "embedding": (129, 128),
}


def ragged(seed: int = 0, scale: float = 1.0) -> Any:
    return filled(RAGGED, seed, scale)


def resnet(width: int = 4, blocks: int = 2) -> Any:
    """Shapes of a small residual net: convolutions without a bias, normalisation layers, a classifier."""
    tree: dict[str, Any] = {
        "conv_init": {"kernel": (7, 7, 3, width)},
        "bn_init": {"scale": (width,), "bias": (width,)},
        "head": {"kernel": (width, 10), "bias": (10,)},
    }
    for i in range(blocks):
        tree[f"block_{i}"] = {
            "conv": {"kernel": (3, 3, width, width)},
            "bn": {"scale": (width,), "bias": (width,)},
        }
    return tree


def transformer(width: int = 8, blocks: int = 2, vocabulary: int = 16) -> Any:
    """Shapes of a small transformer: embeddings, attention with 3-D kernels, layer norms."""
    tree: dict[str, Any] = {"embed": {"embedding": (vocabulary, width)}, "ln_f": {"scale": (width,)}}
    for i in range(blocks):
        tree[f"block_{i}"] = {
            "attn": {"kernel": (width, 2, width // 2), "bias": (2, width // 2)},
            "ln": {"scale": (width,), "bias": (width,)},
            "mlp": {"kernel": (width, 4 * width), "bias": (4 * width,)},
        }
    return tree


def abstract(shapes: Any, dtype: Any = jnp.float32) -> Any:
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, dtype), shapes, is_leaf=_is_shape)


def gradients(params: Any, steps: int, seed: int = 1, scale: float = 1.0) -> Any:
    """A tree like `params` whose leaves have a leading axis of `steps`: random gradients with a mean of their own."""
    leaves, treedef = jax.tree.flatten(params)
    out = []
    for i, x in enumerate(leaves):
        mean = 0.5 * normal(np.shape(x), 77_000 * seed + i)
        out.append((scale * (mean + normal((steps, *np.shape(x)), 91_000 * seed + i))).astype(np.float32))
    return treedef.unflatten(out)


def paths_of(tree: Any) -> list[tuple[str, ...]]:
    entries, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [
        tuple(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in keys) for keys, _ in entries
    ]


def is_weight(path: Sequence[str], leaf: Any) -> bool:
    """Whether a leaf decays and has a trust ratio by default, as the documentation says it."""
    return np.ndim(leaf) >= 2 and (not path or path[-1] not in ("bias", "scale", "beta", "gamma", "b"))


# --------------------------------------------------------------------------------------- oracle


class Oracle:
    """One optimizer in float64, one leaf at a time.

    Args:
      formula: `formula(w, g, slots, h, t, weight) -> (u, slots)`, one of those below.
      params: a tree of arrays.
      hyperparams: what `formula` reads from `h`; `wd` is 0 for the leaves of group `bias`.
      weights: whether each leaf is of group `weight`; default `is_weight`.
    """

    def __init__(self, formula: Callable[..., Any], params: Any, weights: Sequence[bool] | None = None, **hyperparams):
        leaves, self.treedef = jax.tree.flatten(params)
        self.formula, self.h, self.count = formula, hyperparams, 0
        self.leaves = [np.asarray(x, np.float64) for x in leaves]
        self.slots: list[dict[str, np.ndarray]] = [{} for _ in leaves]
        if weights is None:
            weights = [is_weight(p, x) for p, x in zip(paths_of(params), leaves, strict=True)]
        self.weights = list(weights)

    def updates(self, grads: Any, **changed: Any) -> Any:
        """The updates of the next step; the slots move on, the parameters stay."""
        self.count += 1
        h = {**self.h, **changed}
        out = []
        for i, g in enumerate(jax.tree.leaves(grads)):
            own = {**h, "wd": h.get("wd", 0.0) if self.weights[i] else 0.0}
            g = np.asarray(g, np.float64)
            u, self.slots[i] = self.formula(self.leaves[i], g, self.slots[i], own, self.count, self.weights[i])
            out.append(u)
        return self.treedef.unflatten(out)

    def step(self, grads: Any, **changed: Any) -> Any:
        """The parameters after the next step."""
        updates = jax.tree.leaves(self.updates(grads, **changed))
        self.leaves = [w + u for w, u in zip(self.leaves, updates, strict=True)]
        return self.tree

    def run(self, stacked: Any) -> Any:
        """The parameters after all steps of gradients with a leading axis."""
        for t in range(len(jax.tree.leaves(stacked)[0])):
            self.step(jax.tree.map(lambda x, t=t: x[t], stacked))
        return self.tree

    @property
    def tree(self) -> Any:
        return self.treedef.unflatten(self.leaves)


def sgd_formula(w, g, slots, h, t, weight):
    d = g
    if h.get("momentum") is not None:
        m = h["momentum"] * slots.get("mu", 0.0) + g
        d = g + h["momentum"] * m if h.get("nesterov") else m
        slots = {"mu": m}
    return -h["lr"] * (d + h["wd"] * w), slots


def adam_formula(w, g, slots, h, t, weight):
    b1, b2, eps = h["b1"], h["b2"], h["eps"]
    if h.get("l2"):
        g = g + h["wd"] * w
    m = b1 * slots.get("mu", 0.0) + (1 - b1) * g
    v = b2 * slots.get("nu", 0.0) + (1 - b2) * g * g
    if h.get("eps_inside"):
        d = np.sqrt(1 - b2**t) / (1 - b1**t) * m / np.sqrt(v + eps)
    else:
        m_hat = m / (1 - b1**t)
        if h.get("nesterov"):
            m_hat = b1 * m / (1 - b1 ** (t + 1)) + (1 - b1) * g / (1 - b1**t)
        d = m_hat / (np.sqrt(v / (1 - b2**t) + h.get("eps_root", 0.0)) + eps)
    if not h.get("l2"):
        d = d + h["wd"] * w
    return -h["lr"] * d, {"mu": m, "nu": v}


def lion_formula(w, g, slots, h, t, weight):
    m = slots.get("mu", 0.0)
    d = np.sign(h["b1"] * m + (1 - h["b1"]) * g)
    return -h["lr"] * (d + h["wd"] * w), {"mu": h["b2"] * m + (1 - h["b2"]) * g}


def lamb_formula(w, g, slots, h, t, weight):
    d, slots = adam_formula(w, g, slots, {**h, "lr": -1.0}, t, weight)
    norm_w, norm_d = (np.sqrt(np.sum(x * x)) for x in (w, d))
    eta = norm_w / norm_d if norm_w > 0 and norm_d > 0 else 1.0
    return -h["lr"] * eta * d, slots


def lars_formula(w, g, slots, h, t, weight):
    b, lr, wd = h["momentum"], h["lr"], h["wd"]
    old = slots.get("mu", 0.0)
    paper = h.get("form", "paper") == "paper"
    if paper and not weight:  # SGD with momentum, the learning rate outside
        m = b * old + g
        return -lr * (g + b * m if h.get("nesterov") else m), {"mu": m}
    d, eta = g + wd * w, 1.0
    if weight:
        norm_w, norm_g, norm_d = (np.sqrt(np.sum(x * x)) for x in (w, g, d))
        if paper:
            if norm_w >= 1e-12 and norm_g >= 1e-12:
                eta = min(h["tc"] * norm_w / (norm_g + wd * norm_w + h["eps"]), h.get("cap", 100.0))
        elif norm_w >= 1e-12 and norm_d >= 1e-12:
            eta = h["tc"] * norm_w / (norm_d + h["eps"])
    m = b * old + lr * eta * d
    return -(b * m + lr * eta * d) if h.get("nesterov") else -m, {"mu": m}


# ----------------------------------------------------------------------------------- optimizers


@dataclasses.dataclass(frozen=True)
class Case:
    """One optimizer under test.

    Attributes:
      name: the test id.
      make: `make(learning_rate, **options)` -> a fusedopt optimizer.
      twin: `twin(learning_rate)` -> the same from optax with the same masks; None where optax has no such form.
      formula, hyperparams: for `Oracle`, without the learning rate.
      large_lr: a learning rate far above any in use, at which the float64 oracle must still be met.
    """

    name: str
    make: Callable[..., Any]
    twin: Callable[..., Any] | None
    formula: Callable[..., Any]
    hyperparams: dict[str, Any]
    large_lr: float = 1.0

    def oracle(self, params: Any, learning_rate: float, weights: Sequence[bool] | None = None) -> Oracle:
        return Oracle(self.formula, params, weights, lr=learning_rate, **self.hyperparams)

    def __repr__(self) -> str:
        return self.name


def _partial(factory: Callable[..., Any], **fixed: Any) -> Callable[..., Any]:
    return lambda learning_rate, **options: factory(learning_rate, **{**fixed, **options})


mask = fusedopt.weight_mask

# No value is a default: a hyperparameter that were ignored or mixed up with another one would show.
_SGD = {"weight_decay": 0.03}
_ADAM = {"b1": 0.87, "b2": 0.98, "eps": 1e-5}
_LION = {"b1": 0.87, "b2": 0.98}
_LARS = {"weight_decay": 0.03, "trust_coefficient": 0.02, "eps": 1e-3, "momentum": 0.8}


def _optax_sgd(momentum=None, nesterov=False):
    def make(learning_rate):
        trace = () if momentum is None else (optax.trace(momentum, nesterov),)
        decay = optax.add_decayed_weights(_SGD["weight_decay"], mask)
        return optax.chain(*trace, decay, optax.scale_by_learning_rate(learning_rate))

    return make


def _optax_adamw(**options):
    return lambda learning_rate: optax.adamw(learning_rate, **_ADAM, weight_decay=0.05, mask=mask, **options)


def _optax_adam_l2(learning_rate):
    return optax.chain(optax.add_decayed_weights(0.05, mask), optax.adam(learning_rate, **_ADAM))


def _optax_eps_inside(learning_rate):
    # sqrt(v + eps) = sqrt(1-b2^t) * sqrt(v/(1-b2^t) + eps/(1-b2^t)): an eps_root that changes with t.
    def eps_root(count):
        t = count.astype(jnp.float32) + 1
        return 1e-5 / -jnp.expm1(t * np.float32(np.log(0.98)))

    return optax.inject_hyperparams(optax.adamw, static_args=("mask",))(
        learning_rate, b1=0.87, b2=0.98, eps=0.0, eps_root=eps_root, weight_decay=0.05, mask=mask
    )


def _optax_lars(nesterov=False, **options):
    return lambda learning_rate: optax.lars(
        learning_rate, **{**_LARS, **options}, weight_decay_mask=mask, trust_ratio_mask=mask, nesterov=nesterov
    )


_ADAMW = {**_ADAM, "wd": 0.05}
_LARS_ORACLE = {"wd": 0.03, "tc": 0.02, "eps": 1e-3, "momentum": 0.8}

OPTIMIZERS: tuple[Case, ...] = (
    Case("sgd", _partial(fusedopt.sgd, **_SGD), _optax_sgd(), sgd_formula, {"wd": 0.03}),
    Case(
        "momentum",
        _partial(fusedopt.sgd, momentum=0.8, **_SGD),
        _optax_sgd(0.8),
        sgd_formula,
        {"wd": 0.03, "momentum": 0.8},
    ),
    Case(
        "nesterov",
        _partial(fusedopt.sgd, momentum=0.8, nesterov=True, **_SGD),
        _optax_sgd(0.8, True),
        sgd_formula,
        {"wd": 0.03, "momentum": 0.8, "nesterov": True},
    ),
    Case("adam", _partial(fusedopt.adam, **_ADAM), lambda lr: optax.adam(lr, **_ADAM), adam_formula, {**_ADAM}),
    Case(
        "adam_l2",
        _partial(fusedopt.adam, weight_decay=0.05, **_ADAM),
        _optax_adam_l2,
        adam_formula,
        {**_ADAMW, "l2": True},
    ),
    Case(
        "nadam",
        _partial(fusedopt.adam, nesterov=True, **_ADAM),
        lambda lr: optax.adam(lr, nesterov=True, **_ADAM),
        adam_formula,
        {**_ADAM, "nesterov": True},
    ),
    Case("adamw", _partial(fusedopt.adamw, weight_decay=0.05, **_ADAM), _optax_adamw(), adam_formula, _ADAMW),
    Case(
        "adamw_eps_root",
        _partial(fusedopt.adamw, weight_decay=0.05, eps_root=1e-3, **_ADAM),
        _optax_adamw(eps_root=1e-3),
        adam_formula,
        {**_ADAMW, "eps_root": 1e-3},
    ),
    Case(
        "adamw_eps_inside",
        _partial(fusedopt.adamw, weight_decay=0.05, eps_inside=True, **_ADAM),
        _optax_eps_inside,
        adam_formula,
        {**_ADAMW, "eps_inside": True},
    ),
    Case(
        "lion",
        _partial(fusedopt.lion, weight_decay=0.05, **_LION),
        lambda lr: optax.lion(lr, weight_decay=0.05, mask=mask, **_LION),
        lion_formula,
        {**_LION, "wd": 0.05},
    ),
    Case("lars", _partial(fusedopt.lars, **_LARS), None, lars_formula, _LARS_ORACLE),
    Case(
        "lamb",
        _partial(fusedopt.lamb, weight_decay=0.05, **_ADAM),
        lambda lr: optax.lamb(lr, weight_decay=0.05, mask=mask, **_ADAM),
        lamb_formula,
        _ADAMW,
        large_lr=0.1,
    ),
    Case(
        "lars_nesterov",
        _partial(fusedopt.lars, nesterov=True, **_LARS),
        None,
        lars_formula,
        {**_LARS_ORACLE, "nesterov": True},
    ),
    Case(
        "lars_no_decay",
        _partial(fusedopt.lars, **{**_LARS, "weight_decay": 0.0}),
        _optax_lars(weight_decay=0.0),  # without decay the two forms of the ratio are one
        lars_formula,
        {**_LARS_ORACLE, "wd": 0.0},
    ),
    Case(
        "lars_optax",
        _partial(fusedopt.lars, trust_ratio="optax", **_LARS),
        _optax_lars(),
        lars_formula,
        {**_LARS_ORACLE, "form": "optax"},
    ),
    Case(
        "lars_optax_nesterov",
        _partial(fusedopt.lars, trust_ratio="optax", nesterov=True, **_LARS),
        _optax_lars(True),
        lars_formula,
        {**_LARS_ORACLE, "form": "optax", "nesterov": True},
    ),
)

OPTIMIZER_NAMES = tuple(c.name for c in OPTIMIZERS)

NAMED = ("sgd", "momentum", "nesterov", "adam", "adamw", "lion", "lars", "lamb")
"""One of each kind. The other cases differ from these in a hyperparameter or a flag, which changes the formula and nothing
around it: the tests of the formulas (the oracle, the twins in optax, hyperparameters, conversions) take them all."""


def one_of_each(core: Sequence[str] = ()) -> list[str]:
    """NAMED, and those of `core` that are not among them."""
    return list(dict.fromkeys((*NAMED, *core)))


def each_once(others: Sequence[Any], all_of: Sequence[str] = ("adamw", "lars")) -> list[tuple[str, Any]]:
    """(optimizer, other) pairs: those of `all_of` with each of `others`, the rest of NAMED with one each, in turn.

    What is varied beside the optimizer (mode, packing, backend) is one piece of code for all rules, so that not every
    rule needs to meet each of its branches.
    """
    return [
        (name, other)
        for i, name in enumerate(one_of_each(all_of))
        for j, other in enumerate(others)
        if name in all_of or i % len(others) == j
    ]


def case(name: str) -> Case:
    return next(c for c in OPTIMIZERS if c.name == name)


# ---------------------------------------------------------------------------------- comparisons

# Distance of a value from the exact one, relative to its magnitude, by the dtype it is stored in: a few roundings.
# (Unit roundoff: bfloat16 3.9e-3, float16 4.9e-4, float32 6.0e-8, float64 1.1e-16.)
ROUNDING = {
    np.dtype(jnp.bfloat16): 8e-3,
    np.dtype(np.float16): 1e-3,
    np.dtype(np.float32): 2.5e-7,
    np.dtype(np.float64): 5e-16,
}


def largest(tree: Any) -> float:
    """The largest magnitude in a tree, 0 if it is empty."""
    sizes = [np.max(np.abs(np.asarray(x, np.float64))) for x in jax.tree.leaves(tree) if np.size(x)]
    return float(max(sizes, default=0.0))


def assert_close(got: Any, want: Any, tolerance: float) -> None:
    """Every element of `got` within `tolerance` of the largest magnitude in the tree `want`."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    bound = tolerance * largest(want)
    for path, a, b in zip(paths_of(want), jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.shape(a) == np.shape(b), path
        if np.size(b):
            error = np.max(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)))
            assert error <= bound, f"{'/'.join(path)}: off by {error:.3g}, allowed {bound:.3g}"


def assert_equal(got: Any, want: Any) -> None:
    """The same structure, dtypes and bits (signs of zeros and NaNs too)."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for path, a, b in zip(paths_of(want), jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        assert a.tobytes() == b.tobytes(), f"{'/'.join(path)}: different bits"


def avals(tree: Any) -> Any:
    """(shape, dtype, weak_type) of every leaf: what a retrace depends on."""
    return jax.tree.map(lambda x: (jnp.shape(x), x.dtype, getattr(x, "weak_type", False)), tree)


def standard_promotion():
    """optax's own functions mix dtypes that strict promotion refuses."""
    return jax.numpy_dtype_promotion("standard")


def counted(fn: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    """`fn` and a list that grows by one at each call: jitted, at each trace."""
    traces: list[int] = []

    def wrapper(*args, **kwargs):
        traces.append(1)
        return fn(*args, **kwargs)

    return wrapper, traces


# ----------------------------------------------------------------------------------------- runs

MODES = ("update", "apply", "flat_update", "flat_apply")


@functools.cache
def problem(steps: int = 100) -> tuple[Any, Any]:
    """`RAGGED` parameters, and gradients with a leading axis."""
    params = ragged()
    return params, gradients(params, steps)


@functools.cache
def flat_runs(name: str) -> dict[float, Any]:
    """Learning rate -> (FlatParams, state) after the steps of `problem`, by `apply`: one compiled program."""
    params, grads = problem()
    c = case(name)
    tx = c.make(1e-2)
    flat = fusedopt.pack(params, tx)
    flat_grads = jax.vmap(lambda g: fusedopt.pack(g, tx))(grads)
    run = scan_steps(tx, "apply")
    out = {}
    for learning_rate in (1e-2, c.large_lr):
        state = tx.set_hyperparams(tx.init(flat), learning_rate=learning_rate)
        out[learning_rate] = run(flat, state, flat_grads)
    assert run._cache_size() == 1
    return out


def final_params(tx: Any, mode: str, params: Any, stacked: Any, *, pack_with: Any = None) -> Any:
    """The parameters, as a tree, after one jitted scan over gradients with a leading axis, in one of `MODES`.

    FlatParams are packed with the packing of `tx`, or for `pack_with`.
    """
    start = jax.tree.map(jnp.asarray, params)
    if mode.startswith("flat"):
        options = (pack_with,) if pack_with is not None else ()
        packing = None if pack_with is not None else tx.optimizer.packing
        start = fusedopt.pack(start, *options, packing=packing)
        stacked = jax.vmap(lambda g: fusedopt.pack(g, *options, packing=packing))(stacked)
    out, _ = scan_steps(tx, mode)(start, tx.init(start), stacked)
    return out.tree if mode.startswith("flat") else out


@functools.lru_cache(maxsize=32)
def scan_steps(tx: Any, mode: str = "update") -> Callable[..., Any]:
    """Jitted `(params, state, stacked gradients) -> (params, state)`, one step for each slice of the leading axis."""

    def body(carry, g):
        params, state = carry
        if mode.endswith("apply"):
            return tx.apply(g, state, params), None
        updates, state = tx.update(g, state, params)
        return (optax.apply_updates(params, updates), state), None

    return jax.jit(lambda params, state, stacked: jax.lax.scan(body, (params, state), stacked)[0])


def optax_params(tx: Any, params: Any, stacked: Any) -> Any:
    """The parameters after the same steps of an optax optimizer."""
    with standard_promotion():
        params = jax.tree.map(jnp.asarray, params)
        return scan_steps(tx)(params, tx.init(params), stacked)[0]
