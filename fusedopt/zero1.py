"""ZeRO-1: one shard of the optimizer's state on each device, parameters on all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_kernels
from fusedopt.operands import close_operands, joined, open_operands
from fusedopt.optimizer import Optimizer
from fusedopt.packing import FlatParams, pack, slot_dtype
from fusedopt.scalars import callers_flag
from fusedopt.shard_checks import check_batch, check_local, check_shards, check_whole, check_whole_state
from fusedopt.shards import Shards, mapped
from fusedopt.state import STEP_ORDER, FusedState, check_kind
from fusedopt.transformation import FusedTransformation, _own_state
from fusedopt.typing import PyTree
from fusedopt.update import check_params_given, step


def zero1(tx: FusedTransformation[FusedState], mesh: Mesh, axis: str = "data") -> Zero1Transformation:
    """The optimizer with its state in equal shards over a mesh axis: slots, averages and master weights.

    Each device updates its own part of the parameters, and one all-gather for each bucket makes them whole again:

    ```python
    tx = fusedopt.zero1(fusedopt.adamw(1e-3), jax.make_mesh((jax.device_count(),), ("data",)))
    flat = jax.device_put(fusedopt.pack(params, tx), jax.NamedSharding(tx.mesh, jax.P()))
    state = tx.init(flat)
    train_step = tx.train_step(loss_fn)  # loss_fn(params, batch) is the mean over a batch
    flat, state, loss = train_step(flat, state, batch)
    ```

    Three ways to step, all with the numbers of one device, over Auto and Explicit meshes:

    * ``tx.train_step(loss_fn)``: the whole step, with a reduce-scatter of the gradients and an all-gather of the parameters
      for each bucket. Each device differentiates the loss of its part of the batch.
    * ``tx.apply(grads, state, params)`` or ``tx.update`` under jit, where every device has the same whole gradients (JAX
      has summed them): a drop-in for another fused optimizer, without the reduce-scatter.
    * The same in your own shard_map over `axis`, with local gradients of parameters that every device has whole, and the
      state by ``tx.specs(state)``: what `train_step` does. The mean over devices is taken in float32 or wider. Under
      check_vma=True differentiate with respect to ``jax.lax.pcast(params, axis, to="varying")``: gradients of replicated
      parameters arrive there summed over devices, and are refused.

    Use `pack` with this optimizer and keep the parameters as FlatParams; trees work, and are packed in every step.
    Everything is packed, whatever the size of leaves, and buckets end at multiples of ``axis size * 1024`` elements.

    Norms (LARS, LAMB, `clip_norm`) are of whole leaves: row sums are gathered and added in one order, whatever the number
    of devices. A skipped step is skipped on all devices. Transformations in front of it (`fusedopt.chain`) see local
    gradients inside a shard_map: clip by `clip_norm` there. Several processes make the same calls with arrays over all
    devices, of their parts of a batch by `jax.make_array_from_process_local_data`.

    Args:
      tx: an optimizer made by fusedopt; not a chain, which belongs around: ``chain(front, zero1(adamw(1e-3), mesh))``.
      mesh: of all devices that hold parameters. Over its other axes everything is replicated.
      axis: over which the state is sharded.

    Returns:
      A `FusedTransformation` with ``train_step``, ``specs``, ``place``, ``mesh`` and ``axis``. Its state is a `FusedState`
      whose buffers have ``NamedSharding(mesh, P(axis))``; everything else in it is replicated.

    Raises:
      TypeError: `tx` is not of fusedopt, or a chain, or already sharded; `mesh` is no mesh.
      ValueError: `mesh` has no axis `axis`. By init, apply and update: parameters or gradients that are sharded (as far as
        types tell: not inside a jit over an Auto mesh), FlatParams packed for other devices, gradients that are None,
        state that is not of these shards.
    """
    if not isinstance(tx, FusedTransformation) or tx._find_state is not _own_state:
        got = "a fusedopt.chain" if isinstance(tx, FusedTransformation) else type(tx).__name__
        raise TypeError(f"`tx`: expected an optimizer made by fusedopt, got {got}; a chain goes around zero1")
    if isinstance(tx, Zero1Transformation):
        raise TypeError("`tx`: expected an optimizer that is not sharded, got one made by fusedopt.zero1")
    if not isinstance(mesh, Mesh):
        raise TypeError(f"`mesh`: expected a jax.sharding.Mesh, got {type(mesh).__name__}")
    if axis not in mesh.axis_names:
        raise ValueError(f"`axis`: expected one of the axes of the mesh, {mesh.axis_names}, got {axis!r}")
    shards = Shards(axis, mesh.shape[axis])
    packing = dataclasses.replace(tx.optimizer.packing, solo_from=None, shards=shards.count)
    opt = dataclasses.replace(tx.optimizer, packing=packing, _layouts={}, _seen={})
    return Zero1Transformation(opt, mesh, shards)


class Zero1Transformation(FusedTransformation[FusedState]):
    """What `zero1` returns, see there; `mesh` and `axis` are as given."""

    mesh: Mesh
    axis: str
    _shards: Shards
    _local: Optimizer
    _jitted_init: Callable[[FlatParams], FusedState]
    _jitted: Callable[..., tuple[list[Any], FusedState]]

    def __new__(cls, opt: Optimizer, mesh: Mesh, shards: Shards):
        def init(params: Any) -> FusedState:
            return self._init(params)

        def update(updates: Any, state: FusedState, params: Any = None, **extra: Any):
            return self._step(updates, state, params, extra, False)

        def apply(grads: Any, state: FusedState, params: Any, **extra: Any):
            return self._step(grads, state, params, extra, True)

        self = super().__new__(cls, init, update, apply, opt, find_state=_own_state, put_state=lambda _, new: new)
        self.mesh, self.axis, self._shards = mesh, shards.axis, shards
        self._local = dataclasses.replace(opt, shards=shards, _layouts={}, _seen={})
        self._jitted_init = jax.jit(self._sharded_init)
        self._jitted = jax.jit(self._sharded, static_argnums=(4, 5))
        return self

    def specs(self, state: FusedState) -> FusedState:
        """PartitionSpecs of a state (arrays or abstract), for the in_specs and out_specs of a shard_map."""
        check_kind(state)
        names = self.optimizer.buffer_names
        return jax.tree_util.tree_map_with_path(lambda path, _: P(self.axis) if path[0].name in names else P(), state)

    def place(self, state: FusedState) -> FusedState:
        """A whole state, out of a checkpoint or from `from_optax_state` or `repack`, put where it belongs."""
        return jax.device_put(state, jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.specs(state)))

    def check_params(self, params: PyTree) -> None:
        """Raises ValueError for parameters that are sharded, naming a leaf; `pack` asks, for packing would gather them."""
        check_whole(params, "params")

    def train_step(
        self, loss_fn: Callable[..., Any], *, has_aux: bool = False, batch_spec: Any = None, donate: bool = True
    ) -> Callable[..., tuple[Any, ...]]:
        """The whole step as one jitted function: gradients, reduce-scatter, update of the shards, all-gather.

        Gradients are local because the function makes them: nothing can count them once for each device.

        Args:
          loss_fn: ``loss_fn(params, *batch) -> loss``, 0-d, a mean over its batch; with `has_aux`, ``(loss, aux)``. It gets
            the tree, and is run on each device for its part of the batch; collectives over `axis` work in it.
          has_aux: whether it returns more; `aux` is a pytree of floating point arrays, averaged over devices.
          batch_spec: PartitionSpec of each array of a batch, or a pytree prefix for the tuple of them; None: P(axis), parts
            along their first dimension.
          donate: whether the step takes the memory of the parameters and the state given to it.

        Returns:
          ``train_step(params, state, *batch, **extra) -> (params, state, loss)``, or ``(params, state, loss, aux)``.
          `params` are FlatParams or a tree; `extra` is that of `apply`: numbers or 0-d arrays.

        Raises:
          ValueError (`train_step`): as `apply`; arrays of a batch that the devices cannot share equally, that were put on
            other devices, or that are of one process among several.
        """
        batch_spec = P(self.axis) if batch_spec is None else batch_spec

        def body(params, state, batch, extra):
            loss, grads = jax.value_and_grad(
                lambda p: loss_fn(p.tree if isinstance(p, FlatParams) else p, *batch), has_aux=has_aux, allow_int=True
            )(params)
            params, state = self.apply(grads, state, params, **extra)
            return params, state, jax.tree.map(lambda x: jax.lax.pmean(x, self.axis), loss)

        def run(params, state, batch, extra):
            layout = self.optimizer.layout_of_params(params)
            self._shards.layout_of(layout)
            check_whole_state(self.optimizer, state, layout)
            specs = self.specs(state)
            everywhere = mapped(body, self.mesh, (P(), specs, batch_spec, P()), (P(), specs, P()))
            params, state, loss = everywhere(params, state, batch, extra)
            return (params, state, *(loss if has_aux else (loss,)))

        jitted = jax.jit(run, donate_argnums=(0, 1) if donate else ())

        def train_step(params: Any, state: FusedState, *batch: Any, **extra: Any) -> tuple[Any, ...]:
            check_whole(params, "params", self.mesh)
            check_batch(batch, batch_spec, self.mesh)
            return jitted(params, state, batch, self._known(extra, state) if extra else {})

        return train_step

    def _init(self, params: Any) -> FusedState:
        if type(params).__name__ == "_ParamsPlaceholder":
            return self.optimizer.init(params)
        if self._inside():
            raise ValueError("`init` inside a shard_map: make the state outside, and pass it by tx.specs(state)")
        check_whole(params, "params", self.mesh)
        flat = params if isinstance(params, FlatParams) else pack(params, self)
        layout = self.optimizer.adapt(flat)
        state = self._jitted_init(FlatParams(flat.buckets, (), layout))
        self.optimizer.remember(state, layout)
        return state

    def _sharded_init(self, flat: FlatParams) -> FusedState:
        self._shards.layout_of(flat.layout)
        specs = self.specs(jax.eval_shape(self.optimizer.init, flat))
        return mapped(lambda flat: self._local.init(self._own(flat)), self.mesh, (P(),), specs)(flat)

    def _step(self, grads: Any, state: FusedState, params: Any, extra: Mapping[str, Any], in_place: bool):
        opt = self.optimizer
        check_kind(state, STEP_ORDER)
        check_params_given(opt, params, in_place)
        check_whole(grads, "grads", self.mesh)
        check_whole(params, "params", self.mesh)
        layout, g, p = open_operands(opt, grads, params)
        local_layout = self._shards.layout_of(layout)
        inside = self._inside()
        check_shards(opt, state, layout, local_layout) if inside else check_whole_state(opt, state, layout)
        extra = self._known(extra, state)
        buckets: list[Any]
        whole_g, whole_p = joined(layout, g, "grads"), None if p is None else joined(layout, p, "params")
        if inside:
            buckets, state = self._own_step(whole_g, state, whole_p, extra, in_place, local_gradients=True)
        else:
            numbers = {k: v for k, v in extra.items() if isinstance(v, (bool, int, float))}
            arrays = {k: v for k, v in extra.items() if k not in numbers}
            buckets, state = self._jitted(whole_g, state, whole_p, arrays, tuple(sorted(numbers.items())), in_place)
            opt.remember(state, layout)
        new = []
        for i, (b, x) in enumerate(zip(layout.buckets, buckets, strict=True)):
            if b.frozen:
                x = p.buckets[i] if in_place and p is not None else None
            elif isinstance(g.buckets[i], pallas_kernels.Pieces):
                x = g.buckets[i].replaced(g.buckets[i].split(x), x.dtype)
            new.append(x)
        return close_operands(layout, new, g, p, in_place), state

    def _known(self, extra: Mapping[str, Any], state: FusedState) -> dict[str, Any]:
        """The keywords of a step that mean something here, looked at while numbers among them are numbers still."""
        hyperparams = self.optimizer.hyperparams
        known = {"loss_scale", "has_nan", *hyperparams.names(), *hyperparams.absent}
        extra = {k: v for k, v in extra.items() if k in known and v is not None}
        hyperparams.resolve(state.hyperparams, state.count, extra)
        return extra

    def _sharded(self, g, state, p, arrays, numbers, in_place):
        def body(g, state, p, arrays):
            return self._own_step(g, state, p, {**arrays, **dict(numbers)}, in_place, local_gradients=False)

        specs = self.specs(state)
        return mapped(body, self.mesh, (P(), specs, P(), P()), (P(), specs))(g, state, p, arrays)

    def _own_step(self, g, state, p, extra, in_place, *, local_gradients):
        """One device's part of a step: ``(whole buckets, None where frozen; state of this shard)``."""
        shards, layout = self._shards, g.layout
        local_layout = shards.layout_of(layout)
        if local_gradients:
            check_local(shards, g)
            if extra.get("has_nan") is not None:  # of these gradients alone
                extra = {**extra, "has_nan": jax.lax.psum(callers_flag(extra["has_nan"]).astype("int32"), shards.axis)}
            own_g = FlatParams([shards.mean_shard(x, slot_dtype(x.dtype)) for x in g.buckets], (), local_layout)
        else:
            own_g = self._own(g)
        new, state = step(self._local, own_g, state, None if p is None else self._own(p), extra, in_place)
        return [None if b.frozen else shards.whole(x) for b, x in zip(layout.buckets, new.buckets, strict=True)], state

    def _own(self, flat: FlatParams) -> FlatParams:
        return FlatParams([self._shards.own(x) for x in flat.buckets], (), self._shards.layout_of(flat.layout))

    def _inside(self) -> bool:
        """Whether this is a shard_map over the axis."""
        manual = jax.sharding.get_abstract_mesh().manual_axes
        if manual and self.axis not in manual:
            raise ValueError(f"`axis`: got a shard_map over {manual}, expected one over {self.axis!r} too, or none")
        return self.axis in manual
