"""Flax's TrainState with a fused step. Imported by `fusedopt.TrainState`, because Flax is optional."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax
from flax import serialization, struct
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training import train_state

from fusedopt.by_path import exported, installed, leaves_by_path, nested
from fusedopt.optax_form import from_optax_state
from fusedopt.packing import FlatParams, pack
from fusedopt.serialization import register
from fusedopt.state import FusedState
from fusedopt.transformation import FusedTransformation
from fusedopt.typing import Flag, PyTree, Scalar

register()


@dataclasses.dataclass(frozen=True)
class Unpacking:
    """`apply_fn` of a model whose FlatParams it is given in place of trees."""

    fn: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = jax.tree.map(
            lambda x: x.tree if isinstance(x, FlatParams) else x,
            (args, kwargs),
            is_leaf=lambda x: isinstance(x, FlatParams),
        )
        return self.fn(*args, **kwargs)


class TrainState(train_state.TrainState):
    """``flax.training.train_state.TrainState`` whose `apply_gradients` is one fused step, in place where donated.

    ```python
    state = fusedopt.TrainState.create(apply_fn=model.apply, params=params, tx=fusedopt.adamw(1e-3), flat=True)

    @partial(jax.jit, donate_argnums=0)
    def train_step(state, x, y):
        grads = jax.grad(lambda p: loss(state.apply_fn({"params": p}, x), y))(state.params)
        return state.apply_gradients(grads=grads)
    ```

    Subclass it for further fields, such as ``batch_stats: Any``. With an optimizer that is not fused it does what
    Flax's does.

    Attributes:
      step: int32 []: calls of `apply_gradients` that were not skipped. Without ``accumulate`` that is the optimizer's
        own ``count``, also where gradients were not finite; with ``accumulate=k`` it is k times that at the ends of steps.
      apply_fn: usually ``model.apply`` (static). In the flat mode it takes FlatParams wherever the model takes a tree.
      params: the parameters: a tree, or FlatParams in the flat mode. `params_tree` is a tree in both.
      tx: the optimizer (static).
      opt_state: its state.

    flax.serialization stores parameters and states of fusedopt by path. What was stored under one packing, or in one
    mode, can be restored under another, and a leaf that is missing or of another shape is an error that names it. What
    Flax's own TrainState stored of the namesake in optax can be restored too.
    """

    # Flax's own annotations leave no room for FlatParams.
    params: Any = struct.field(pytree_node=True)
    opt_state: Any = struct.field(pytree_node=True)

    @classmethod
    def create(cls, *, apply_fn: Callable[..., Any], params: PyTree, tx: Any, flat: bool = False, **kwargs: Any):
        """A state at step 0.

        Args:
          apply_fn: a function, usually ``model.apply``.
          params: a tree of arrays, or FlatParams, which means the flat mode.
          tx: an optimizer of fusedopt, or any optax transformation.
          flat: hold parameters (a copy) and gradients in a few buffers.
          **kwargs: the fields of a subclass.

        Raises:
          ValueError: `flat` with parameters that Flax overwrites by their gradients.
        """
        if flat or isinstance(params, FlatParams):
            if not isinstance(params, FlatParams):
                params = pack(params, tx if isinstance(tx, FusedTransformation) else None)
            if OVERWRITE_WITH_GRADIENT in params:
                raise ValueError(
                    f"`flat`: expected parameters without {OVERWRITE_WITH_GRADIENT!r}, got some, which stay a tree: leave `flat` "
                    "out"
                )
            apply_fn = apply_fn if isinstance(apply_fn, Unpacking) else Unpacking(apply_fn)
        inner = params["params"] if _overwrites(params) else params
        step = jnp.zeros((), jnp.int32)
        return cls(step=step, apply_fn=apply_fn, params=params, tx=tx, opt_state=tx.init(inner), **kwargs)

    def apply_gradients(
        self, *, grads: PyTree, has_nan: Flag | None = None, loss_scale: Scalar | None = None, **kwargs: Any
    ) -> Self:
        """The state after one step; if it is skipped, with the same parameters, `step` and count.

        Args:
          grads: gradients with respect to `params`: a tree, or FlatParams in the flat mode.
          has_nan: a 0-d flag; nonzero skips the step.
          loss_scale: what the gradients are divided by; 0 counts as 1, inf and NaN skip the step.
          **kwargs: new values of fields, which are taken over also where the step is skipped; any other name is a
            hyperparameter of this step, such as ``learning_rate=0.1``.

        Raises:
          TypeError: `has_nan` or `loss_scale` with an optimizer that is not of fusedopt, or a keyword that is neither
            a field nor a hyperparameter.
          ValueError: gradients that do not fit, as of ``tx.apply``.
        """
        names = {f.name for f in dataclasses.fields(self)}
        fields = {k: v for k, v in kwargs.items() if k in names}
        extra = {k: v for k, v in kwargs.items() if k not in names}
        extra |= {k: v for k, v in (("has_nan", has_nan), ("loss_scale", loss_scale)) if v is not None}
        self._check(extra)
        overwrite = _overwrites(grads)
        params = self.params["params"] if overwrite else self.params
        gradients = grads["params"] if overwrite else grads
        if isinstance(self.tx, FusedTransformation):
            params, opt_state = self.tx.apply(gradients, self.opt_state, params, **extra)
        else:
            updates, opt_state = self.tx.update(gradients, self.opt_state, params, **extra)
            params = optax.apply_updates(params, updates)
        if overwrite:
            key = OVERWRITE_WITH_GRADIENT
            params = {"params": params, key: grads[key]}
        step = self.step + _advance(self.opt_state, opt_state)
        return self.replace(**{"step": step, "params": params, "opt_state": opt_state, **fields})

    @property
    def params_tree(self) -> Any:
        """The parameters as a tree, in either mode."""
        return self.params.tree if isinstance(self.params, FlatParams) else self.params

    @property
    def ema_params(self) -> Any:
        """The average that ``ema_decay`` keeps, held like `params`: ``state.apply_fn({"params": state.ema_params}, x)``.

        Raises:
          ValueError: the optimizer keeps no average.
        """
        if not isinstance(self.tx, FusedTransformation):
            raise ValueError(
                f"`ema_params`: expected an optimizer of fusedopt made with `ema_decay`, got {type(self.tx).__name__}"
            )
        return self.tx.ema_params(self.opt_state, self.params)

    def _check(self, extra: dict[str, Any]) -> None:
        if not isinstance(self.tx, FusedTransformation):
            ours = len(_fused_states(self.opt_state)) > 0
            if extra and not (ours and isinstance(self.tx, optax.GradientTransformationExtraArgs)):
                raise TypeError(
                    f"`{next(iter(extra))}`: expected an optimizer made by fusedopt as `tx` for it, got {type(self.tx).__name__}"
                )
        elif isinstance(self.opt_state, FusedState):  # in a chain, it may be for a transformation in front
            known = self.tx.optimizer.hyperparams
            for name in extra:
                if name not in (*known.names(), *known.absent, "has_nan", "loss_scale"):
                    raise TypeError(
                        f"`{name}` is neither a field of {type(self).__name__} nor a hyperparameter "
                        f"({', '.join(known.names())})"
                    )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        serialization.register_serialization_state(cls, _to_state_dict, _from_state_dict, override=True)


def _overwrites(tree: Any) -> bool:
    """Whether some of these are parameters that Flax overwrites by their gradients (fp8 scales)."""
    return isinstance(tree, Mapping) and OVERWRITE_WITH_GRADIENT in tree


def _fused_states(state: Any) -> list[FusedState]:
    found = jax.tree.leaves(state, is_leaf=_is_fused)
    return [s for s in found if _is_fused(s)]


def _is_fused(x: Any) -> bool:
    return isinstance(x, FusedState)


def _advance(old: Any, new: Any) -> Any:
    """By how much `step` grows: 0 where a fused optimizer skipped the step."""
    states = _fused_states(old), _fused_states(new)
    if len(states[0]) != 1 or len(states[1]) != 1:
        return 1
    # Not `skipped`, which a wrapper that holds a step back leaves as it was.
    return (states[1][0].total_skipped == states[0][0].total_skipped).astype(jnp.int32)


def _stored_fields(state: TrainState) -> list[str]:
    return [f.name for f in dataclasses.fields(state) if f.metadata.get("pytree_node", True)]


def _to_state_dict(state: TrainState) -> dict[str, Any]:
    out = {name: getattr(state, name) for name in _stored_fields(state)}
    if isinstance(state.tx, FusedTransformation):
        opt, params = state.tx.optimizer, out["params"]
        layout = opt.layout_of_params(params["params"] if _overwrites(params) else params)

        def by_path(x: Any) -> Any:
            if not _is_fused(x):
                return x
            values = exported(opt, x, layout)
            return {k: nested(v) if k in (*opt.buffer_names, "trust_ratios") else v for k, v in values.items()}

        out["opt_state"] = jax.tree.map(by_path, out["opt_state"], is_leaf=_is_fused)
    return {name: serialization.to_state_dict(x) for name, x in out.items()}


def _from_state_dict(state: TrainState, stored: Mapping[str, Any]) -> TrainState:
    names = _stored_fields(state)
    if set(names) != set(stored):
        raise ValueError(f"`{type(state).__name__}`: got the fields {sorted(stored)}, expected {sorted(names)}")
    tx = state.tx
    fused = isinstance(tx, FusedTransformation)
    new = {
        name: serialization.from_state_dict(getattr(state, name), stored[name], name=name)
        for name in names
        if name != "opt_state" or not fused
    }
    if fused:
        params = new["params"]
        params = params["params"] if _overwrites(params) else params
        new["opt_state"] = _fused_from(tx, state.opt_state, stored["opt_state"], params)
    return state.replace(**new)


def _fused_from(tx: FusedTransformation, like: Any, stored: Any, params: Any) -> Any:
    opt = tx.optimizer
    if not _is_ours(stored):
        return from_optax_state(tx, stored, params)  # what Flax's TrainState stored of an optax optimizer

    def one(fields: Mapping[str, Any]) -> FusedState:
        missing = [name for name in ("count", *opt.buffer_names) if name not in fields]
        if missing:
            raise ValueError(
                f"`opt_state` has no `{missing[0]}`, which this optimizer keeps; it has {', '.join(fields)}"
            )
        by_path = (*opt.buffer_names, "trust_ratios")
        given = {k: leaves_by_path(v) if k in by_path else v for k, v in fields.items()}
        return installed(opt, params, given, source="opt_state")

    # Flax hands back what is stored for an object that it does not know.
    hole = object()
    found = serialization.from_state_dict(
        jax.tree.map(lambda x: hole if _is_fused(x) else x, like, is_leaf=_is_fused), stored, name="opt_state"
    )
    return one(found) if _is_fused(like) else _filled(like, found, one)


def _is_ours(stored: Any) -> bool:
    """Whether a stored state is that of a fused optimizer, alone or in a chain."""
    return isinstance(stored, Mapping) and ("total_skipped" in stored or any(map(_is_ours, stored.values())))


def _filled(like: Any, found: Any, one: Callable[..., FusedState]) -> Any:
    """The states of a chain; that of the fused optimizer stands last."""
    if _is_fused(like):
        return one(found)
    return (*found[:-1], _filled(like[-1], found[-1], one))


serialization.register_serialization_state(TrainState, _to_state_dict, _from_state_dict, override=True)
