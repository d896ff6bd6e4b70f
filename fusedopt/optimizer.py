"""The static half of an optimizer: what was asked for, and the layout that follows from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fusedopt import layout as _layout
from fusedopt import paths as _paths
from fusedopt.grouping import Group, Placement, is_callable_mask, mask_flags, place
from fusedopt.hyperparams import Hyperparams
from fusedopt.layout import Bucket, FlatLayout, Packing
from fusedopt.packing import FlatParams, slot_dtype
from fusedopt.paths import show
from fusedopt.rules import Rule


class FusedState(NamedTuple):
    """State of a fusedopt optimizer: arrays only, so that every checkpoint library takes it.

    Slots are tuples with one buffer for each bucket that is not frozen, in layout order; fields
    that an optimizer does not use are ``()``.
    """

    count: Any  # int32 []: finite steps taken
    mu: Any = ()  # first moment or velocity
    nu: Any = ()  # second moment
    hyperparams: Any = ()  # float32 [k] (float64 with float64 parameters); decays b as 1 - b
    skipped: Any = ()  # bool []: the last step was skipped
    total_skipped: Any = ()  # int32 []
    trust_ratios: Any = ()  # float32 [segments with a trust ratio], of the last step


@dataclasses.dataclass(frozen=True, eq=False)
class Optimizer:
    """Everything about an optimizer that is known before it sees a number.

    Attributes:
      rule: the formula of leaves with a trust ratio, or of all leaves if it has none.
      plain_rule: the formula of the other leaves; the same slots.
      hyperparams: names, values and ranges, in the order of the state's vector.
      decays: False if weight decay is absent (the Python number 0 was given), so that
        parameters need not even be read.
      groups, decay_mask, trust_mask, packing, backend, skip_nonfinite: as given.
      slot_dtypes: slot name -> dtype that overrides float32.
    """

    rule: Rule
    plain_rule: Rule
    hyperparams: Hyperparams
    decays: bool
    groups: tuple[Group, ...] = ()
    decay_mask: Any = None
    trust_mask: Any = None
    mask_argument: str = "mask"
    packing: Packing = Packing()
    backend: str | None = None
    skip_nonfinite: bool = True
    slot_dtypes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    _layouts: dict = dataclasses.field(default_factory=dict, repr=False)
    _seen: dict = dataclasses.field(default_factory=dict, repr=False)

    @property
    def needs_params(self) -> bool:
        return self.rule.trust or self.decays or any(g.has_own_decay for g in self.groups)

    def rule_of(self, bucket: Bucket) -> Rule:
        return self.rule if bucket.trust else self.plain_rule

    def layout_of(self, tree: _paths.Flattened, name: str, packing: Packing | None = None) -> FlatLayout:
        """The layout of a tree under this optimizer's groups and masks, cached."""
        leaves = _layout.leaf_descriptions(tree, name)
        masks = tuple(
            self._mask_flags(mask, argument, tree.source, tree.paths, leaves)
            for mask, argument in ((self.decay_mask, self.mask_argument), (self.trust_mask, "trust_ratio_mask"))
        )
        key = (tree.treedef, tuple(leaves), masks, packing)
        if key not in self._layouts:
            names = tree.paths()
            placements = self._normalised(place(names, leaves, self.groups, *masks))
            self._remember(
                self._layouts,
                key,
                _layout.build(
                    tree.treedef,
                    names,
                    leaves,
                    placements,
                    [g.name for g in self.groups],
                    packing or self.packing,
                ),
            )
        return self._layouts[key]

    def layout_of_params(self, params: Any) -> FlatLayout:
        """The layout of a tree or of FlatParams."""
        if isinstance(params, FlatParams):
            return self.adapt(params)
        return self.layout_of(_paths.flatten(params), "params")

    def adapt(self, flat: FlatParams) -> FlatLayout:
        """The layout of FlatParams, as this optimizer's groups and masks see it, cached."""
        if flat.layout in self._layouts:
            return self._layouts[flat.layout]
        layout = flat.layout
        names: list = [()] * layout.num_leaves
        leaves = [_paths.Leaf((), None, False)] * layout.num_leaves
        for s in layout.segments:
            names[s.leaf], leaves[s.leaf] = s.path, _paths.Leaf(s.shape, s.dtype, True)
        structs = layout.treedef.unflatten(
            [None if leaf.dtype is None else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        )

        def flags(mask, argument):
            return self._mask_flags(mask, argument, structs, lambda: names, leaves)

        placements = self._normalised(
            place(
                names,
                leaves,
                self.groups,
                flags(self.decay_mask, self.mask_argument),
                flags(self.trust_mask, "trust_ratio_mask"),
            )
        )
        self._remember(self._layouts, layout, _layout.relabelled(layout, placements))
        return self._layouts[layout]

    def _mask_flags(self, mask, argument, tree, paths, leaves):
        if mask is None:
            return None
        if is_callable_mask(mask):
            mask = mask(tree)
        return mask_flags(mask, paths(), leaves, argument)

    def _normalised(self, placements):
        """Placements without the flags that make no difference to this optimizer."""
        own_decay = {g.name for g in self.groups if g.has_own_decay}

        def one(p: Placement | None) -> Placement | None:
            if p is None:
                return None
            return p._replace(
                decays=p.decays and (self.decays or p.group in own_decay), trust=p.trust and self.rule.trust
            )

        return tuple(map(one, placements))

    def init(self, params: Any) -> FusedState:
        """The state of fresh parameters (arrays, abstract values or FlatParams)."""
        if type(params).__name__ == "_ParamsPlaceholder":
            # optax.tree_map_params looks for what it finds this object in: the slots.
            ratios = 0 if self.rule.trust else ()
            slots = dict.fromkeys(self.rule.slots, params)
            return FusedState(0, hyperparams=0, skipped=0, total_skipped=0, trust_ratios=ratios, **slots)
        layout = self.layout_of_params(params)
        live = live_buckets(layout)
        slots = {slot: tuple(jnp.zeros(b.shape, self.slot_dtype(slot, b)) for b in live) for slot in self.rule.slots}
        wide = any(slot_dtype(b.dtype) == jnp.float64 for b in layout.buckets)
        dtype = jnp.float64 if wide else jnp.float32
        ratios: Any = ()
        if self.rule.trust:
            ratios = jnp.ones((len(trusted(layout)),), dtype)
        state = FusedState(
            count=jnp.zeros((), jnp.int32),
            hyperparams=self.hyperparams.init(dtype),
            skipped=jnp.zeros((), jnp.bool_),
            total_skipped=jnp.zeros((), jnp.int32),
            trust_ratios=ratios,
            **slots,
        )
        self.remember(state, layout)
        return state

    def slot_dtype(self, slot: str, bucket: Bucket) -> Any:
        return self.slot_dtypes.get(slot) or slot_dtype(bucket.dtype)

    def remember(self, state: FusedState, layout: FlatLayout) -> None:
        """Lets `layout_for` name the segments of a state that comes without its parameters."""
        self._remember(self._seen, _signature(state), layout)

    def layout_for(self, state: FusedState) -> FlatLayout:
        try:
            return self._seen[_signature(state)]
        except KeyError:
            raise ValueError(
                "this optimizer has not seen a state of this layout: call `tx.init(params)` "
                "or `tx.update` first, so that paths are known"
            ) from None

    @staticmethod
    def _remember(cache: dict, key: Any, value: Any) -> None:
        if len(cache) >= 64:  # a program with more models than this only pays the lookup anew
            cache.clear()
        cache[key] = value

    def check_state(self, state: FusedState, layout: FlatLayout) -> None:
        """Raises ValueError if the slots were laid out for other parameters, naming the leaf."""
        if not isinstance(state, FusedState):
            raise ValueError(f"`state`: expected the FusedState of this optimizer's init, got {type(state).__name__} "
                "(restore a checkpoint into the structure of `tx.init(params)`)")
        live = live_buckets(layout)
        for slot in self.rule.slots:
            buffers = getattr(state, slot)
            if len(buffers) != len(live):
                raise ValueError(
                    f"`state.{slot}` is of another layout: got {len(buffers)} buffers, expected "
                    f"{len(live)} for these parameters ({', '.join(b.name for b in live[:4])}"
                    f"{', ...' if len(live) > 4 else ''})"
                )
            for b, buffer in zip(live, buffers, strict=True):
                if jnp.shape(buffer) != b.shape:
                    members = layout.segments_of(b)
                    raise ValueError(
                        f"`state.{slot}` is of another layout: bucket `{b.name}` with leaf "
                        f"`{show(members[0].path)}`: got shape {jnp.shape(buffer)}, expected "
                        f"{b.shape}"
                    )
        count = len(trusted(layout)) if self.rule.trust else 0
        if self.rule.trust and jnp.shape(state.trust_ratios) != (count,):
            raise ValueError(
                f"`state.trust_ratios` is of another layout: got shape "
                f"{jnp.shape(state.trust_ratios)}, expected {(count,)}"
            )


def live_buckets(layout: FlatLayout) -> list[Bucket]:
    """The buckets that have slots, in the order of the slots."""
    return [b for b in layout.buckets if not b.frozen]


def trusted(layout: FlatLayout):
    """The segments that have a trust ratio, in the order of `FusedState.trust_ratios`."""
    return [s for b in live_buckets(layout) if b.trust for s in layout.segments_of(b)]


def _signature(state: FusedState) -> tuple:
    return tuple(jnp.shape(x) for x in jax.tree.leaves(state))
