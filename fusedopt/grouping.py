"""Which leaf belongs to which group and region, and what follows from it.

A *group* shares hyperparameters; a *region* is a run of leaves of one kind inside a group.
Without ``groups=`` there are two groups: ``bias`` (never decayed, no trust ratio) and ``weight``.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fusedopt import paths as _paths
from fusedopt.paths import Leaf, Path, show
from fusedopt.typing import PyTree, ScalarOrSchedule

BIAS_REGIONS = ("bn_bias", "bn_weight", "fc_bias")
WEIGHT_REGIONS = ("fc_weight", "first_conv", "deep_conv")
REGIONS = BIAS_REGIONS + WEIGHT_REGIONS

_SCALE_KEYS = frozenset({"scale", "gamma"})
_SHIFT_KEYS = frozenset({"bias", "beta", "b"})


def is_python_zero(value: Any) -> bool:
    """The Python number 0, which is static; an array or NumPy scalar that is 0 is an operand."""
    return isinstance(value, (int, float)) and value == 0


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Leaves that share hyperparameters of their own.

    ```python
    head = Group("head", lambda path, leaf: path[0] == "head", learning_rate_scale=0.1)
    frozen = Group("embedding", {"embed": True, "blocks": False, "head": False}, frozen=True)
    tx = fusedopt.adamw(1e-3, groups=[frozen, head])
    ```

    Attributes:
      name: shown in the layout and in hyperparameter names; not ``bias``, ``weight`` or empty.
      match: ``match(path, leaf) -> bool`` with ``path`` a tuple of key strings and ``leaf``
        anything with ``shape`` and ``dtype``; or a tree of bools shaped like the parameters or
        like a prefix of them; or such a tree of labels, as `optax.partition` takes them, where
        the label is this group's name. The first group that matches wins.
      weight_decay: None: the optimizer's own; the Python number 0: never decayed; otherwise this
        group's weight decay, a hyperparameter called ``weight_decay/<name>``.
      learning_rate_scale: factor on the learning rate, a hyperparameter called
        ``learning_rate_scale/<name>``; the Python number 1 costs nothing.
      trust_ratio: whether LARS gives each leaf its own trust ratio (static).
      frozen: never updated: updates are zero, no optimizer state is held (static).
    """

    name: str
    match: Callable[[Path, Any], bool] | PyTree
    _: dataclasses.KW_ONLY
    weight_decay: ScalarOrSchedule | None = None
    learning_rate_scale: ScalarOrSchedule = 1.0
    trust_ratio: bool = True
    frozen: bool = False

    def __post_init__(self):
        if isinstance(self.match, str):
            raise TypeError(
                f"`Group.match` of group {self.name!r}: expected a function of (path, leaf) or a tree of bools, got the "
                f"string {self.match!r}: write lambda path, leaf: {self.match!r} in path"
            )
        if is_callable_mask(self.match) and not takes(self.match, 2):
            raise TypeError(
                f"`Group.match` of group {self.name!r}: expected a function of (path, leaf), got one that does not take two "
                "arguments; a function of the parameters is what `mask` takes"
            )
        if not isinstance(self.name, str) or self.name in ("", "bias", "weight"):
            raise ValueError(f"`Group.name`: expected a name other than '', 'bias' and 'weight', got {self.name!r}")
        for field in ("trust_ratio", "frozen"):
            if not isinstance(getattr(self, field), bool):
                raise TypeError(
                    f"`Group.{field}` of group {self.name!r} is static: expected True or False, "
                    f"got {_paths.type_of(getattr(self, field))}"
                )

    @property
    def has_own_decay(self) -> bool:
        return self.weight_decay is not None and not is_python_zero(self.weight_decay)


class Placement(NamedTuple):
    """Where one trainable leaf goes. Static and hashable: part of a layout's identity."""

    group: str
    region: str
    decays: bool
    trust: bool
    frozen: bool


def regions(names: Sequence[Path], leaves: Sequence[Leaf]) -> list[str]:
    """The region of each leaf ('' for leaves that are not trainable).

    The last path key decides first, the number of dimensions second: a key ``bias``, ``b``,
    ``beta``, ``scale`` or ``gamma``, or fewer than two dimensions, is bias-like; two dimensions
    (embeddings too) are ``fc_weight``; the first leaf of three or more in tree order is
    ``first_conv`` and the others ``deep_conv``. A bias beside a ``scale`` belongs to a
    normalisation layer: ``bn_bias``.
    """
    norm_layers = {p[:-1] for p in names if p and p[-1] in _SCALE_KEYS}
    found_conv = False
    out = []
    for path, leaf in zip(names, leaves, strict=True):
        key = path[-1] if path else ""
        rank = len(leaf.shape)
        if not leaf.trainable:
            region = ""
        elif key in _SCALE_KEYS:
            region = "bn_weight"
        elif key in _SHIFT_KEYS or rank <= 1:
            in_norm = key == "beta" or (key in _SHIFT_KEYS and path[:-1] in norm_layers)
            region = "bn_bias" if in_norm else "fc_bias"
        elif rank == 2:
            region = "fc_weight"
        else:
            region = "deep_conv" if found_conv else "first_conv"
            found_conv = True
        out.append(region)
    return out


def place(
    names: Sequence[Path],
    leaves: Sequence[Leaf],
    groups: Sequence[Group] = (),
    decay_mask: Sequence[bool] | None = None,
    trust_mask: Sequence[bool] | None = None,
) -> tuple[Placement | None, ...]:
    """Group, region and flags of each leaf; None where the leaf is not trainable."""
    matchers = [_matcher(group, names, leaves) for group in groups]
    for group, match in zip(groups, matchers):
        trainable = [i for i, leaf in enumerate(leaves) if leaf.trainable]
        if trainable and not any(match(i, leaves[i]) for i in trainable):
            raise ValueError(
                f"`groups`: {group.name!r} matches no leaf; a path is a tuple of key strings such as "
                f"{names[trainable[0]]}"
            )
    out: list[Placement | None] = []
    for i, region in enumerate(regions(names, leaves)):
        if not region:
            out.append(None)
            continue
        group = next((g for g, m in zip(groups, matchers, strict=True) if m(i, leaves[i])), None)
        if group is None:
            weight = region in WEIGHT_REGIONS
            placed = Placement("weight" if weight else "bias", region, weight, weight, False)
        else:
            placed = Placement(
                group.name, region, not is_python_zero(group.weight_decay), group.trust_ratio, group.frozen
            )
        if decay_mask is not None:
            placed = placed._replace(decays=bool(decay_mask[i]))
        if trust_mask is not None:
            placed = placed._replace(trust=bool(trust_mask[i]))
        out.append(placed)
    return tuple(out)


def _matcher(group: Group, names: Sequence[Path], leaves: Sequence[Leaf]) -> Callable[[int, Leaf], bool]:
    if is_callable_mask(group.match):
        return lambda i, leaf: bool(group.match(names[i], leaf))
    match = group.match
    labels = jax.tree.leaves(match)
    if labels and all(isinstance(label, str) for label in labels):
        match = jax.tree.map(lambda label: label == group.name, match)
    flags = mask_flags(match, names, leaves, f"Group.match of group {group.name!r}")
    return lambda i, leaf: flags[i]


def is_callable_mask(mask: Any) -> bool:
    """A function, and not a pytree of bools whose class happens to define ``__call__``."""
    return callable(mask) and jax.tree_util.all_leaves([mask])


def takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a function can be called with so many arguments, as far as its signature says."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # it has none, as some that are written in C
        return True
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def mask_flags(mask: Any, names: Sequence[Path], leaves: Sequence[Leaf], argument: str) -> tuple[bool, ...]:
    """`broadcast_mask` for the leaves that are updated; a mask needs no entry for others (None, integers)."""
    found = iter(broadcast_mask(mask, [n for n, leaf in zip(names, leaves) if leaf.trainable], argument))
    return tuple(leaf.trainable and next(found) for leaf in leaves)


def broadcast_mask(mask: Any, names: Sequence[Path], argument: str) -> tuple[bool, ...]:
    """One bool per leaf from a tree of bools that is shaped like the tree or like a prefix of it.

    Matching goes by path, so a plain dict may mask a FrozenDict or an ``nnx.State``.

    Raises:
      TypeError: a mask entry is an array or a tracer, not a Python bool.
      ValueError: a leaf that no entry covers, named by its path.
    """
    entries: dict[Path, bool] = {}
    for keys, value in jax.tree_util.tree_flatten_with_path(mask)[0]:
        path = _paths.path_of(keys)
        if not isinstance(value, (bool, np.bool_)):
            where = f" at `{show(path)}`" if path else ""
            raise TypeError(
                f"`{argument}`{where}: expected Python bools (a mask is static), got "
                f"{_paths.type_of(value)}; under optax.inject_hyperparams name this argument in "
                "`static_args`, under jax.jit build the mask outside"
            )
        entries[path] = bool(value)
    out = []
    for path in names:
        # Longest first: the path of a field called `value` is also the prefix of its neighbours' (see `path_of`).
        covering = (path[:n] for n in range(len(path), -1, -1) if path[:n] in entries)
        prefix = next(covering, None)
        if prefix is None:
            known = ", ".join(f"`{show(p)}`" for p in list(entries)[:3]) or "nothing"
            raise ValueError(
                f"`{argument}` has no entry for leaf `{show(path)}`; it covers {known}"
                + (" and more" if len(entries) > 3 else "")
                + ": each leaf needs a bool of its own, or one at a prefix of its path"
            )
        out.append(entries[prefix])
    return tuple(out)


def weight_mask(params: PyTree) -> PyTree:
    """The leaves that decay by default, as a tree of bools: an optax mask.

    ``optax.adamw(..., mask=fusedopt.weight_mask)`` decays exactly what ``fusedopt.adamw`` decays:
    the leaves of group ``weight`` (two or more dimensions and a last path key other than bias,
    scale, beta, gamma, b).

    Args:
      params: a pytree of arrays or abstract values.

    Returns:
      A tree of the structure of ``params`` with a Python bool for each leaf.

    Raises:
      TypeError: complex leaves, or leaves that are no arrays, named by path.
    """
    flat = _paths.flatten(params)
    names = flat.paths()
    leaves = [_paths.describe(x, lambda i=i: f"`params` leaf `{show(names[i])}`") for i, x in enumerate(flat.leaves)]
    flags = [
        None if leaf.dtype is None else region in WEIGHT_REGIONS
        for leaf, region in zip(leaves, regions(names, leaves), strict=True)
    ]
    return jax.tree.unflatten(flat.treedef, flags)
