"""The static half of an optimizer: what was asked for, and the layout that follows from it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from fusedopt import layout_builder
from fusedopt import paths as _paths
from fusedopt.grouping import Group, Placement, is_callable_mask, mask_flags, place
from fusedopt.hyperparams import Hyperparams
from fusedopt.layout import Bucket, FlatLayout, Packing
from fusedopt.packing import FlatParams, pack_whole, slot_dtype
from fusedopt.rules import Rule
from fusedopt.state import FusedState, fields_of, signature, trusted
from pallas_kernels import Backend


@dataclasses.dataclass(frozen=True, eq=False)
class Optimizer:
    """Everything about an optimizer that is known before it sees a number.

    Attributes:
      rule: the formula of leaves with a trust ratio, or of all leaves if it has none.
      plain_rule: the formula of the other leaves; the same slots.
      hyperparams: names, values and ranges, in the order of the state's vector.
      decays: False if weight decay is absent (the Python number 0 was given), so that
        parameters need not even be read.
      groups, decay_mask, trust_mask, packing, backend, skip_nonfinite, ema_debias: as given.
      bias_trust: the default group ``bias`` has trust ratios too, unless `trust_mask` says otherwise.
      masters: keep a float32 copy of each bucket of lower precision.
      accumulate: gradients that make a step.
      shards: the `Shards` of which buffers are one each, inside the shard_map of `zero1`; None: whole buffers.
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
    backend: Backend | None = None
    skip_nonfinite: bool = True
    bias_trust: bool = False
    masters: bool = False
    ema_debias: bool = False
    accumulate: int = 1
    shards: Any = None
    slot_dtypes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    _layouts: dict = dataclasses.field(default_factory=dict, repr=False)
    _seen: dict = dataclasses.field(default_factory=dict, repr=False)

    @property
    def averages(self) -> bool:
        """Whether it keeps an average of the parameters."""
        return "ema_decay" in self.hyperparams.names()

    @property
    def clips(self) -> bool:
        return "clip_norm" in self.hyperparams.names()

    @property
    def needs_params(self) -> bool:
        own = self.rule.trust or self.averages or self.masters or self.decays
        return own or any(g.has_own_decay for g in self.groups)

    @property
    def buffer_names(self) -> tuple[str, ...]:
        """The fields of the state that hold a buffer for each bucket, or for some."""
        extra = {"ema": self.averages, "master": self.masters, "accumulated": self.accumulate > 1}
        return (*self.rule.slots, *(name for name, wanted in extra.items() if wanted))

    def kept(self, bucket: Bucket) -> tuple[str, ...]:
        """The fields of the state that hold a buffer for this bucket."""
        return tuple(n for n in self.buffer_names if n != "master" or bucket.dtype.itemsize < 4)

    def rule_of(self, bucket: Bucket) -> Rule:
        return self.rule if bucket.trust else self.plain_rule

    def layout_of(self, tree: _paths.Flattened, name: str, packing: Packing | None = None) -> FlatLayout:
        """The layout of a tree under this optimizer's groups and masks, cached."""
        leaves = layout_builder.leaf_descriptions(tree, name)
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
                layout_builder.build(
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
        self._remember(self._layouts, layout, layout_builder.relabelled(layout, placements))
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
        bias_trust = self.bias_trust and self.trust_mask is None

        def one(p: Placement | None) -> Placement | None:
            if p is None:
                return None
            trust = p.trust or (bias_trust and p.group == "bias")
            return p._replace(
                decays=p.decays and (self.decays or p.group in own_decay), trust=trust and self.rule.trust
            )

        return tuple(map(one, placements))

    def init(self, params: Any) -> FusedState:
        """The state of fresh parameters: arrays or FlatParams; abstract values where no parameter is copied."""
        if type(params).__name__ == "_ParamsPlaceholder":
            # optax.tree_map_params looks for what it finds this object in: the slots.
            zero: Any = 0
            slots: dict[str, Any] = dict.fromkeys(self.buffer_names, params)
            slots |= dict.fromkeys(self._scalar_fields(), zero)
            return FusedState(zero, skipped=zero, total_skipped=zero, **slots)
        flat = params if isinstance(params, FlatParams) else _paths.flatten(params)
        layout = self.adapt(flat) if isinstance(flat, FlatParams) else self.layout_of(flat, "params")
        buffers = {}
        for i, b in enumerate(layout.buckets):
            if not b.frozen:
                copied = functools.partial(self._copied, flat, layout, i)
                like = self._solo_leaf(flat, layout, i)
                buffers[b] = {name: self._fresh(name, b, copied, like) for name in self.kept(b)}
        wide = any(slot_dtype(b.dtype) == jnp.float64 for b in layout.buckets)
        dtype = jnp.float64 if wide else jnp.float32
        fresh = {
            "hyperparams": lambda: self.hyperparams.init(dtype),
            "trust_ratios": lambda: jnp.ones((len(trusted(layout)),), dtype),
            "grad_norm": lambda: jnp.zeros((), dtype),
            "micro_step": lambda: jnp.zeros((), jnp.int32),
        }
        fields: dict[str, Any] = {name: fresh[name]() for name in self._scalar_fields()}
        state = FusedState(
            count=jnp.zeros((), jnp.int32),
            skipped=jnp.zeros((), jnp.bool_),
            total_skipped=jnp.zeros((), jnp.int32),
            **fields_of(self, buffers),
            **fields,
        )
        self.remember(state, layout)
        return state

    def _scalar_fields(self) -> list[str]:
        """The fields of the state that some optimizers have and that hold no buffers."""
        wanted = {"trust_ratios": self.rule.trust, "grad_norm": self.clips, "micro_step": self.accumulate > 1}
        return ["hyperparams", *(name for name, here in wanted.items() if here)]

    def _fresh(self, name: str, bucket: Bucket, copied: Callable[[], jax.Array], like: Any) -> jax.Array:
        if name == "master" or (name == "ema" and not self.ema_debias):
            return copied().astype(slot_dtype(bucket.dtype))
        dtype = self.slot_dtype(name, bucket)
        return jnp.zeros(bucket.shape, dtype) if like is None else jnp.zeros_like(like, dtype)

    @staticmethod
    def _solo_leaf(flat: Any, layout: FlatLayout, i: int) -> Any:
        """The leaf that is bucket i alone, sharded like which its slots begin; None if there is no such array."""
        bucket = layout.buckets[i]
        if not bucket.solo:
            return None
        leaf = flat.buckets[i] if isinstance(flat, FlatParams) else flat.leaves[layout.segments_of(bucket)[0].leaf]
        # In a jit JAX takes the devices from the mesh in use: without one it would refuse what the type says.
        unknown = isinstance(leaf, Tracer) and jax.sharding.get_abstract_mesh().empty
        return leaf if isinstance(leaf, jax.Array) and not unknown else None

    @staticmethod
    def _copied(flat: Any, layout: FlatLayout, i: int) -> jax.Array:
        """A bucket of the parameters, which shares no memory with them."""
        bucket = layout.buckets[i]
        if isinstance(flat, FlatParams):
            return jnp.array(flat.buckets[i], copy=True)
        for s in layout.segments_of(bucket):
            if isinstance(flat.leaves[s.leaf], jax.ShapeDtypeStruct):
                raise TypeError(
                    f"`params` leaf `{_paths.show(s.path)}`: expected an array, got an abstract value; `ema_decay` and "
                    "`master_weights` copy parameters: use jax.eval_shape(tx.init, params) for an abstract state"
                )
        return pack_whole(flat.leaves, bucket, layout)

    def slot_dtype(self, slot: str, bucket: Bucket) -> Any:
        return self.slot_dtypes.get(slot) or slot_dtype(bucket.dtype)

    def remember(self, state: FusedState, layout: FlatLayout) -> None:
        """Lets `layout_for` name the segments of a state that comes without its parameters."""
        self._remember(self._seen, signature(state), layout)

    def layout_for(self, state: FusedState) -> FlatLayout:
        try:
            return self._seen[signature(state)]
        except KeyError:
            raise ValueError(
                "`state`: this optimizer has not seen a state of this layout, and a state holds no paths: pass `params` too"
            ) from None

    @staticmethod
    def _remember(cache: dict, key: Any, value: Any) -> None:
        if len(cache) >= 64:  # a program with more models than this only pays the lookup anew
            cache.clear()
        cache[key] = value
