"""What an optimizer does with a model, on one page: layout, memory, backends, and the cost of a step."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

from fusedopt.packing import FlatParams
from fusedopt.paths import flatten
from fusedopt.reports import backends, bandwidth, contents, program, render, tables, traffic
from fusedopt.reports.bandwidth import Bandwidth
from fusedopt.reports.program import Program
from fusedopt.reports.render import Table, count
from fusedopt.transformation import FusedTransformation

Mode = Literal["optax", "apply", "flat"]
MODES: tuple[Mode, ...] = ("optax", "apply", "flat")


def report(tx: FusedTransformation, params: Any, *, mode: Mode | None = None, device: Any = None) -> Report:
    """What `tx` holds of these parameters and what a step of it costs. Computes nothing with them.

    ```python
    report = fusedopt.report(tx, params)
    print(report)
    report.compile().measure_bandwidth()  # counts the kernels of a step; estimates its time
    report.plot().savefig("layout.png")
    ```

    Args:
      tx: an optimizer made by fusedopt, or a `fusedopt.chain` that ends in one.
      params: a tree of arrays or of `jax.ShapeDtypeStruct`, or `FlatParams`.
      mode: how the step is taken: "optax" (``tx.update`` and ``optax.apply_updates``), "apply" (``tx.apply`` of trees) or
        "flat" (``tx.apply`` of `FlatParams`). None: "flat" for FlatParams, otherwise "apply".
      device: a `jax.Device`, or the name of a device kind such as "NVIDIA H200" for what is known without one. None: where
        the parameters are, else the default device.

    Returns:
      A `Report`: prints itself, through rich if that is installed; notebooks show it as HTML.

    Raises:
      TypeError: `tx` is not of fusedopt; a leaf of `params` is no array, named by its path; `device` is neither a device nor
        a name.
      ValueError: an unknown `mode`, or one that does not go with `params`; parameters without a leaf that is updated.
    """
    return Report(tx, params, mode, device)


class Report:
    """The facts that `report` gathers; see there.

    Attributes:
      mode, name: the mode; the optimizer's name.
      layout: the `FlatLayout`.
      device, target: the name of the device kind; what `pallas_kernels.supported_backends` takes for it.
      regions: list of `contents.Region`, in memory order.
      params_memory, state_memory: `contents.Memory` of the parameters, and of the state by what holds it.
      optax_name, optax_memory: the same of the optimizer's namesake in optax.
      choices: list of `backends.Choice`: what updates which buckets, and why not another backend.
      needed: bytes by pass that a step cannot do without, see `traffic.needed_bytes`; on each device that shares the state.
      program: the compiled step, counted (`Program`); None before `compile`.
      bandwidth: `Bandwidth` of the device; None before `measure_bandwidth`.
      devices: number of devices that share the state (`zero1`).
    """

    def __init__(self, tx: FusedTransformation, params: Any, mode: Mode | None = None, device: Any = None):
        if not isinstance(tx, FusedTransformation):
            raise TypeError(f"`tx`: expected an optimizer made by fusedopt, got {_not_fused(tx)}")
        is_flat = isinstance(params, FlatParams)
        if mode not in (None, *MODES):
            raise ValueError(f"`mode`: expected one of {', '.join(map(repr, MODES))} or None, got {mode!r}")
        if is_flat and mode not in (None, "flat"):
            raise ValueError(f"`mode`: {mode!r} takes a tree, but `params` are FlatParams: pass params.tree")
        if not (device is None or isinstance(device, str) or hasattr(device, "device_kind")):
            raise TypeError(
                f"`device`: expected a jax.Device, the name of a device kind or None, got {type(device).__name__}"
            )
        self.mode: Mode = mode or ("flat" if is_flat else "apply")
        opt = tx.optimizer
        tree = params if is_flat else _checked(tx, params)
        self._tx, self._device = tx, device
        self._params = program.abstract(tree)
        if self.mode == "flat" and not is_flat:
            self._params = program.pack_abstract(tx, self._params)
        self.layout = opt.layout_of_params(self._params)
        if not self.layout.segments:
            raise ValueError("`params`: expected at least one floating point array, got none")
        self.name = contents.name_of(opt)
        sharded = program.zero1_of(tx)
        self.devices = 1 if sharded is None else sharded.mesh.shape[sharded.axis]

        self.regions = contents.regions(self.layout)
        padding = sum(b.dtype.itemsize * (b.size - sum(self.layout.sizes_of(b))) for b in self.layout.buckets)
        self.params_memory = contents.tree_memory(self._params, padding if self.mode == "flat" else 0)
        state = jax.eval_shape(tx.init, self._params)
        self.state_memory = contents.state_memory(opt, self.layout, tx._find_state(state), state)
        self.optax_name, self.optax_memory = contents.optax_memory(opt, self.layout, _as_tree(self._params))
        if (front := self.state_memory.get(contents.FRONT)) is not None:  # they are optax's own
            self.optax_name, self.optax_memory[contents.FRONT] = f"{self.optax_name} in the same chain", front
        self.target, self.device = _where(self._params, device)
        buffers = "flat" if sharded is not None else self.mode  # zero1 packs trees
        self.choices = backends.choices(opt, self.layout, buffers, self.target)
        needed = traffic.needed_bytes(opt, self.layout, self.mode)
        self.needed = {name: n // self.devices for name, n in needed.items()}
        self.program: Program | None = None
        self.bandwidth: Bandwidth | None = None

    @property
    def state_bytes(self) -> int:
        """Bytes of the state, on all devices together."""
        return sum(m.bytes for m in self.state_memory.values())

    @property
    def device_state_bytes(self) -> int:
        """Bytes of the state on each device: all of it, unless `zero1` shares its buffers."""
        shared = sum(m.bytes for name, m in self.state_memory.items() if name in self._tx.optimizer.buffer_names)
        return shared // self.devices + self.state_bytes - shared

    @property
    def optax_bytes(self) -> int:
        """Bytes of the state of the namesake in optax."""
        return sum(m.bytes for m in self.optax_memory.values())

    @property
    def needed_bytes(self) -> int:
        """Bytes that a step must read and write, at least."""
        return sum(self.needed.values())

    @property
    def step_bytes(self) -> int:
        """Bytes that a step reads and writes: counted if it has been compiled, otherwise at least."""
        counted = None if self.program is None else self.program.accessed
        return self.needed_bytes if counted is None else counted

    @property
    def expected_seconds(self) -> float | None:
        """`step_bytes` at the measured bandwidth. None before it is measured."""
        return None if self.bandwidth is None else self.step_bytes / self.bandwidth.bytes_per_second

    def compile(self) -> Report:
        """Compiles a step for the device, parameters and state donated, and counts it. Seconds; minutes for 3,000 leaves.

        Raises:
          ValueError: `device` is a name, parameters are sharded, or the backend cannot run there.
        """
        if isinstance(self._device, str):
            raise ValueError(f"`device`: compiling needs a device of this machine, got the name {self._device!r}")
        self.program = program.compile_step(self._tx, self._params, self.mode, self._device)
        return self

    def measure_bandwidth(self) -> Report:
        """Measures how fast the device copies, in a few seconds, for the expected time of a step.

        Raises:
          ValueError: `device` is a name.
        """
        if isinstance(self._device, str):
            raise ValueError(f"`device`: measuring needs a device of this machine, got the name {self._device!r}")
        here = self._device
        if here is None and (sharding := program.sharding_of(self._params)) is not None:
            here = min(sharding.device_set, key=lambda d: d.id)
        self.bandwidth = bandwidth.measure(here)
        return self

    def plot(self, figure: Any = None) -> Any:
        """Draws the layout and the memory, see `drawing.draw`. Needs matplotlib.

        Args:
          figure: a Figure or SubFigure to draw into; None makes one of the size that the layout needs.

        Returns:
          The Figure.

        Raises:
          ImportError: matplotlib is not installed.
          TypeError: `figure` is neither a Figure nor a SubFigure.
        """
        try:
            import matplotlib  # noqa: F401
        except ModuleNotFoundError as error:
            raise ImportError(
                "`plot` needs matplotlib, which is not installed: install the extra, pip install 'fusedopt[report]'"
            ) from error
        from fusedopt.reports.drawing import draw

        return draw(self, figure)

    @property
    def heading(self) -> str:
        """One line that says what this is about."""
        leaves, parameters = len(self.layout.segments), self.layout.size
        return f"{self.name}, {self.mode}, on {self.device}: {count(leaves)} leaves, {count(parameters)} parameters"

    def tables(self) -> list[Table]:
        """The report as tables of text."""
        return tables.tables(self)

    def __rich__(self) -> Any:
        return render.rich(self.heading, self.tables())

    def __str__(self) -> str:
        return render.text(self.heading, self.tables())

    def _repr_html_(self) -> str:
        return render.as_html(self.heading, self.tables())

    def __repr__(self) -> str:
        return f"<Report of {self.heading}; print it>"


def _not_fused(tx: Any) -> str:
    name = type(tx).__name__
    if hasattr(tx, "init") and hasattr(tx, "update"):
        return (
            f"{name}, an optax transformation: write fusedopt.adamw for optax.adamw and so on, and fusedopt.chain for "
            "optax.chain"
        )
    return name


def _checked(tx: FusedTransformation, params: Any) -> Any:
    """The tree as it is, once its leaves are known to be arrays."""
    tx.optimizer.layout_of(flatten(params), "params")
    return params


def _as_tree(params: Any) -> Any:
    """The tree of abstract FlatParams; arrays without a namesake in optax (keys) as numbers."""
    tree = jax.eval_shape(lambda flat: flat.tree, params) if isinstance(params, FlatParams) else params
    number = jax.ShapeDtypeStruct((), "float32")
    return jax.tree.map(lambda x: number if jnp.issubdtype(x.dtype, jax.dtypes.extended) else x, tree)


def _where(params: Any, device: Any) -> tuple[Any, str]:
    """What `supported_backends` takes for a device, and its name."""
    if isinstance(device, str):
        return device, device
    if device is None:
        found = [x.sharding for x in jax.tree.leaves(params) if x.sharding is not None]
        if found:
            mesh = getattr(found[0], "mesh", None)
            abstract = getattr(mesh, "abstract_device", None) if mesh is not None else None
            device = abstract or min(found[0].device_set, key=lambda d: d.id)
    if device is None:
        device = jax.config.jax_default_device or jax.devices()[0]
    return device, device if isinstance(device, str) else device.device_kind
