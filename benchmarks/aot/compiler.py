"""Ahead-of-time compilation for a GPU described by a file, and the facts that come out of it.

Needs the `aot` extra: XLA's CUDA plugin compiles without a driver or a device. Registers and spills are those that
NVIDIA's assembler reports; it comes with the extra too.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import importlib.util
import math
import os
import pathlib
import re
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fusedopt.reports import hlo

TARGETS = pathlib.Path(__file__).parent / "targets"

WHOLE = P()

# Mosaic writes its kernels' text where this variable says; it is read when a kernel is compiled.
MOSAIC_DUMP = {"MOSAIC_GPU_DUMP_TO": tempfile.mkdtemp(prefix="mosaic-"), "MOSAIC_GPU_DUMP_PTX": "1"}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What the assembler says of one kernel: its PTX, registers a thread, bytes spilled to local memory."""

    ptx: str
    registers: int
    spilled: int

    def vector_accesses(self) -> tuple[int, int]:
        """(loads, stores) of 16 bytes."""
        loads = re.findall(r"ld\.global\S*\.v(?:4\.\w32|2\.\w64|8\.\w16)", self.ptx)
        stores = re.findall(r"st\.global\S*\.v(?:4\.\w32|2\.\w64|8\.\w16)", self.ptx)
        return len(loads), len(stores)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program compiled for a target.

    Attributes:
        launches: (kind, captured) of each kernel or copy, in order; captured: inside a command buffer.
        arguments, donated, aliased, temporary: bytes.
        accessed: bytes that the kernels read and write.
        kernels: ours, by the name the source gave them (`fusedopt_adam_weight`), a list each.
        seconds: that XLA took.
    """

    launches: tuple[tuple[str, bool], ...]
    arguments: int
    donated: int
    aliased: int
    temporary: int
    accessed: int
    kernels: dict[str, list[Kernel]]
    seconds: float
    text: str = dataclasses.field(repr=False)

    def count(self, prefix: str = "") -> int:
        """Launches; with a prefix, kernels of that name."""
        if not prefix:
            return len(self.launches)
        return sum(x.label.startswith(prefix) for x in hlo.entry(self.text) if x.op == "custom-call")


def missing() -> str:
    """What the `aot` extra brings and is not here; empty if all is."""
    wanted = ["jax_plugins.xla_cuda13", "jax_cuda13_plugin"]
    lacks = [name for name in wanted if not _found(name)] + ([] if _assembler() else ["ptxas"])
    return ", ".join(lacks)


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@functools.cache
def mesh(target: str, devices: int = 1) -> jax.sharding.Mesh:
    """A mesh of devices of the target ("h200", "a100", "t4", "unknown"), all in one host, along the axis "data"."""
    described = (TARGETS / f"{target}.pbtxt").read_text()
    topology = topologies.get_topology_desc(platform="cuda", topology=f"1x1x{devices}", target_config=described)
    return topologies.make_mesh(topo=topology, mesh_shape=(devices,), axis_names=("data",))


def on(target: str, tree: Any, devices: int = 1, specs: Any = WHOLE) -> Any:
    """Abstract arrays that live on the target, by PartitionSpecs: a pytree prefix."""
    specs = jax.tree.broadcast(specs, tree, is_leaf=lambda x: isinstance(x, P))

    def put(x: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh(target, devices), spec))

    return jax.tree.map(put, tree, specs)


def compile_for(
    target: str, fn: Callable[..., Any], *args: Any, donate: Sequence[int] = (), devices: int = 1, specs: Any = WHOLE
) -> Compiled:
    """`jax.jit(fn, donate_argnums=donate)` for abstract `args`, compiled for the target; bytes are those of a device."""
    args = on(target, args, devices, specs)
    os.environ.update(MOSAIC_DUMP)
    with (
        tempfile.TemporaryDirectory(prefix="aot-") as folder,
        jax.sharding.use_abstract_mesh(mesh(target, devices).abstract_mesh),
    ):
        options = {"xla_dump_to": folder, "xla_dump_emitter_re": "ptx", "xla_dump_hlo_as_text": True}
        lowered = jax.jit(fn, donate_argnums=tuple(donate)).lower(*args)
        start = time.perf_counter()
        with _no_cache():
            compiled = lowered.compile(compiler_options=options)
        seconds = time.perf_counter() - start
        launches = tuple(_launches(pathlib.Path(folder)))
        ptx = [path.read_text() for path in sorted(pathlib.Path(folder).glob("*.ptx"))]
    memory, text = compiled.memory_analysis(), compiled.as_text()
    donated = sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for i in donate for x in jax.tree.leaves(args[i])
    )
    program = hlo.entry(text)
    kernels = _kernels(ptx, {x.label for x in program if "mosaic" in x.target})
    return Compiled(
        launches,
        memory.argument_size_in_bytes,
        donated,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        hlo.accessed_bytes(text),
        kernels,
        seconds,
        text,
    )


@contextlib.contextmanager
def _no_cache() -> Iterator[None]:
    """JAX's cache of compiled programs has no way to hand out one for a device that is not there."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)


def _launches(folder: pathlib.Path) -> Iterator[tuple[str, bool]]:
    """From the last list of thunks that XLA wrote: what it will launch."""
    lists = sorted(folder.glob("*thunk_sequence*"), key=lambda path: ("after" in path.name, path.name))
    for line in lists[-1].read_text().splitlines():
        match = re.match(r"(\s*)\d+: (k\w+)", line)
        if match and match[2] != "kCommandBuffer":
            yield match[2], bool(match[1])


def _kernels(texts: list[str], mosaic: set[str]) -> dict[str, list[Kernel]]:
    found = collections.defaultdict(list)
    dumped = pathlib.Path(MOSAIC_DUMP["MOSAIC_GPU_DUMP_TO"])
    texts = texts + [path.read_text() for name in sorted(mosaic) for path in sorted(dumped.glob(f"{name}_[0-9]*.ptx"))]
    for ptx in texts:
        for entry in re.findall(r"\.entry (\w+)", ptx):
            name = re.sub(r"(_mosaic_gpu_kernel|__\d+|_\d+)+$", "", entry)
            if name.startswith("fusedopt_"):
                found[name].append(_assemble(ptx))
    return dict(found)


@functools.cache
def _assemble(ptx: str) -> Kernel:
    architecture = re.search(r"\.target (sm_\w+)", ptx)[1]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [_assembler(), "-v", f"-arch={architecture}", file.name, "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
    return Kernel(ptx, max(map(int, re.findall(r"Used (\d+) registers", said))), spilled)


@functools.cache
def _assembler() -> str | None:
    """ptxas: of the wheel that the `aot` extra installs, else of a CUDA toolkit."""
    wheels = sorted(pathlib.Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin/ptxas"))
    return str(wheels[-1]) if wheels else shutil.which("ptxas")
