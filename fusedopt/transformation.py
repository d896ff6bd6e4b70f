"""The object that users hold: an optax gradient transformation that can also write in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, cast

import jax
import jax.numpy as jnp
import optax

from fusedopt.optimizer import Optimizer
from fusedopt.packing import FlatParams, gathered, pieces_of, placed_like, slot_dtype
from fusedopt.paths import Path, flatten, type_of
from fusedopt.scalars import callers_flag, unscale_factor
from fusedopt.state import FusedState, buffers_of, check_state, trusted
from fusedopt.typing import Apply, Init, Params, PyTree, Scalar, State, Update
from fusedopt.update import step


class FusedTransformation(optax.GradientTransformationExtraArgs, Generic[State]):
    """An optax ``GradientTransformationExtraArgs`` with an in-place step.

    ``init(params) -> state``; params may be abstract values or `FlatParams`.

    ``update(grads, state, params=None, **extra) -> (updates, state)`` is the optax protocol: trees
    in, trees out, each update in its parameter's dtype.

    ``apply(grads, state, params, **extra) -> (params, state)`` is the same step without the tree
    of updates. Inside a jitted function that donates params and state it writes in place:

    ```python
    @partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, state, batch):
        grads = jax.grad(loss_fn)(params, batch)
        return tx.apply(grads, state, params)
    ```

    Take params and state in the order in which you return them: JAX hands a donated buffer to the
    first result of its shape, so ``jax.jit(tx.apply, donate_argnums=(1, 2))`` would give the
    parameters the memory of the moments, and XLA would copy to put that right.

    A gradient that is None (with `params` given) means no gradient: no update, no decay, and its
    moments stay. Both take FlatParams for gradients and parameters, and as ``extra``:

    * ``loss_scale``: the gradients are divided by it; 0 counts as 1, inf and NaN skip the step.
    * ``has_nan``: a 0-d flag; nonzero skips the step.
    * any hyperparameter by name: its value for this step only; one that the optimizer was made
      without is a ValueError. Other keywords are ignored, as optax asks.

    A skipped step leaves parameters, slots, count and hyperparameters bit for bit as they were
    (updates are zero), sets ``state.skipped`` and adds one to ``state.total_skipped``.

    Raises:
      ValueError: by `update` and `apply`, for other structures or shapes than those of params or state, naming
        the leaf, and where `params` are needed and missing.
      TypeError: complex leaves, and integer gradients of floating point parameters.
    """

    # Wider than optax's types, which know no FlatParams.
    init: Init[State]
    """``init(params) -> state``"""
    update: Update[State]
    """``update(grads, state, params=None, *, loss_scale=None, has_nan=None, **hyperparams) -> (updates, state)``"""
    apply: Apply[State]
    """``apply(grads, state, params, *, loss_scale=None, has_nan=None, **hyperparams) -> (params, state)``"""
    optimizer: Optimizer
    _find_state: Callable[[Any], FusedState]
    _put_state: Callable[[Any, FusedState], Any]
    last: FusedTransformation | None = None  # of a chain, the optimizer that it ends in

    def __new__(
        cls,
        init: Init[State],
        update: Update[State],
        apply: Apply[State],
        optimizer: Optimizer,
        find_state: Callable[[Any], FusedState],
        put_state: Callable[[Any, FusedState], Any],
    ):
        self = super().__new__(cls, cast(Any, init), cast(Any, update))
        self.apply = apply
        self.optimizer = optimizer
        self._find_state = find_state
        self._put_state = put_state
        return self

    def __copy__(self) -> FusedTransformation[State]:
        return self

    def __deepcopy__(self, memo: dict) -> FusedTransformation[State]:
        return self  # immutable, like the closures of optax's own transformations

    def hyperparams(self, state: State) -> dict[str, jax.Array]:
        """The values last used, by name: 0-d arrays; works inside jit.

        A scheduled value is the schedule's at the last step that was not skipped. Keywords of a
        single step are not recorded.
        """
        return self.optimizer.hyperparams.read(self._find_state(state).hyperparams)

    def set_hyperparams(self, state: State, **values: Scalar) -> State:
        """A state with other values from the next step on: numbers, arrays or tracers.

        Names with a slash, such as ``weight_decay/head``, are passed as ``**{name: value}``.

        Raises:
          ValueError: an unknown name, a number out of range, or a hyperparameter that the factory
            was given as a schedule or as an array, which would overwrite it.
        """
        fused = self._find_state(state)
        vector = self.optimizer.hyperparams.replace(fused.hyperparams, values)
        return self._put_state(state, fused._replace(hyperparams=vector))

    def trust_ratios(self, state: State, params: PyTree | None = None) -> dict[Path, jax.Array]:
        """The trust ratio of each leaf that has one, at the last step: path -> 0-d array.

        A state holds no names. They come from `params` (or gradients, or abstract values) if
        given, otherwise from the parameters that this optimizer last met with a state of these
        shapes: give them where one optimizer serves several models.

        Raises:
          ValueError: the optimizer has none, or it has not met a state of this layout.
        """
        if not self.optimizer.rule.trust:
            raise ValueError("this optimizer has no trust ratios: `lars` and `lamb` have")
        fused = self._find_state(state)
        layout = self.optimizer.layout_for(fused) if params is None else self.optimizer.layout_of_params(params)
        check_state(self.optimizer, fused, layout)
        members = trusted(layout)
        return {s.path: fused.trust_ratios[i] for i, s in enumerate(members)}

    def ema_params(self, state: State, params: Params) -> Params:
        """The average of the parameters that `ema_decay` keeps, as a tree like `params`, or FlatParams.

        Each leaf in the dtype of its parameter. Leaves that have no average, frozen ones, integers and None, are those
        of `params`. Works inside jit. Under `zero1` all devices have them whole. To train on from the average, copy it: a
        leaf may share memory with the state.

        Raises:
          ValueError: the optimizer keeps no average, or the state is of other parameters.
        """
        if not self.optimizer.averages:
            raise ValueError("this optimizer keeps no average: make it with `ema_decay`")
        fused = self._find_state(state)
        layout = self.optimizer.layout_of_params(params)
        check_state(self.optimizer, fused, layout)
        averages = {b: x["ema"].astype(b.dtype) for b, x in buffers_of(self.optimizer, fused, layout).items()}
        averages = {b: x if b.solo else gathered(x) for b, x in averages.items()}
        if isinstance(params, FlatParams):
            buckets = [averages.get(b, x) for b, x in zip(layout.buckets, params.buckets, strict=True)]
            return cast(Params, FlatParams(buckets, params.rest, params.layout))
        tree = flatten(params)
        leaves = list(tree.leaves)
        for bucket, average in averages.items():
            members = layout.segments_of(bucket)
            parts = [average] if bucket.solo else pieces_of(bucket, members, layout.align).split(average)
            for s, part in zip(members, parts, strict=True):
                leaves[s.leaf] = part if bucket.solo else placed_like(part, leaves[s.leaf])
        return tree.treedef.unflatten(leaves)


def fused(optimizer: Optimizer) -> FusedTransformation[FusedState]:
    """The transformation of an optimizer description."""

    def update(updates: Any, state: FusedState, params: Any = None, **extra: Any):
        """Gradients to updates, as optax's: ``(updates, state)``. The keywords are those of `apply`."""
        return step(optimizer, updates, state, params, extra, in_place=False)

    def apply(grads: Any, state: FusedState, params: Any, **extra: Any):
        """A step: ``(params, state)``.

        Keywords: `loss_scale`, by which the gradients are too large; `has_nan`, to skip the step; any hyperparameter, for this
        step only. Others are ignored, as optax asks. `help(type(tx))` has shapes, types and errors.
        """
        return step(optimizer, grads, state, params, extra, in_place=True)

    return FusedTransformation(
        optimizer.init,
        update,
        apply,
        optimizer,
        find_state=_own_state,
        put_state=lambda _, new: new,
    )


def _own_state(state: Any) -> FusedState:
    if not isinstance(state, FusedState):
        raise ValueError(
            f"`state`: expected the FusedState of this optimizer, got {type_of(state)}; inside optax.chain "
            "pass the member of the tuple that is one, or use fusedopt.chain"
        )
    return state


def chain(*transforms: optax.GradientTransformation) -> FusedTransformation[Any]:
    """`optax.chain` that ends in a fused optimizer and keeps its ``apply``.

    ```python
    tx = fusedopt.chain(optax.clip_by_global_norm(1.0), fusedopt.adamw(1e-3))
    params, state = tx.apply(grads, state, params)
    ```

    The transformations in front see unscaled gradients: what `loss_scale` asks for is done before them. A step that
    is skipped leaves their states as they were, as it leaves parameters and the fused state.

    Args:
      *transforms: optax transformations of the gradients, then one made by fusedopt.

    Returns:
      A transformation whose state is the tuple of their states, as in `optax.chain`.

    Raises:
      TypeError: the last one is not fused, or another one is.
    """
    last = transforms[-1] if transforms else None
    if not isinstance(last, FusedTransformation):
        got = type(last).__name__ if transforms else "nothing"
        raise TypeError(
            f"`chain`: the last transformation must be fusedopt's, got {got}; those of optax go in front of it"
        )
    for t in transforms[:-1]:
        if isinstance(t, FusedTransformation):
            raise TypeError(
                "`chain`: a fused optimizer computes final updates, nothing may follow it; only "
                "the last transformation may be fusedopt's"
            )
        if not hasattr(t, "init") or not hasattr(t, "update"):
            raise TypeError(f"`chain`: expected optax transformations, got {type(t).__name__}")
    front = [optax.with_extra_args_support(t) for t in transforms[:-1]]

    def init(params: Any) -> tuple:
        return (*(t.init(params) for t in front), last.init(params))

    def run(final: Callable[..., tuple[Any, Any]], grads, state, params, extra):
        if not isinstance(state, tuple) or len(state) != len(front) + 1:
            got = f"{len(state)} of them" if type(state) is tuple else type(state).__name__
            raise ValueError(
                f"`state`: expected a tuple of {len(front) + 1} states, one for each transformation, got {got}"
            )
        if front and extra.get("loss_scale") is not None:
            grads, extra = _unscaled(grads, extra)
        new = []
        for t, s in zip(front, state[:-1], strict=True):
            grads, s = t.update(grads, s, params, **extra)
            new.append(s)
        out, last_state = final(grads, state[-1], params, **extra)
        if last.optimizer.skip_nonfinite or extra.get("has_nan") is not None:
            skipped = last._find_state(last_state).skipped
            new = [_where(skipped, old, changed) for old, changed in zip(state[:-1], new, strict=True)]
        return out, (*new, last_state)

    def update(updates: Any, state: tuple, params: Any = None, **extra: Any):
        return run(last.update, updates, state, params, extra)

    def apply(grads: Any, state: tuple, params: Any, **extra: Any):
        return run(last.apply, grads, state, params, extra)

    chained = FusedTransformation(
        init,
        update,
        apply,
        last.optimizer,
        find_state=lambda state: last._find_state(state[-1]),
        put_state=lambda state, new: (*state[:-1], last._put_state(state[-1], new)),
    )
    chained.last = last
    return chained


def _unscaled(grads: Any, extra: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Gradients divided by the `loss_scale` of `extra`, and an `extra` without it that says whether it was unusable."""
    scale = extra["loss_scale"]
    unusable, _ = unscale_factor(scale, jnp.float32)
    flag = unusable if extra.get("has_nan") is None else unusable | callers_flag(extra["has_nan"])

    def unscaled(g: Any) -> Any:
        if g is None or not jnp.issubdtype(getattr(g, "dtype", jnp.float32), jnp.floating):
            return g
        g = jnp.asarray(g)
        dtype = slot_dtype(g.dtype)  # a quotient in 16 bits could underflow
        return g.astype(dtype) * unscale_factor(scale, dtype)[1]

    return jax.tree.map(unscaled, grads, is_leaf=lambda x: x is None), {**extra, "loss_scale": None, "has_nan": flag}


def _where(flag: jax.Array, old: Any, new: Any) -> Any:
    return jax.tree.map(lambda a, b: b if a is b else jnp.where(flag, a, b), old, new)
