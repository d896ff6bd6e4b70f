"""Which backend runs where, and why: the one capability table of the package."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import numpy as np
from jax.core import Tracer

from pallas_kernels import compat, tiling

Backend = Literal["xla", "mosaic", "triton"]
"""Name of a backend: "xla" is the definition and runs everywhere, the others are Pallas kernels for NVIDIA GPUs."""

BACKENDS: tuple[Backend, ...] = (
    ("mosaic", "triton", "xla") if compat.MOSAIC_IN_COMMAND_BUFFERS else ("triton", "mosaic", "xla")
)
"""Best first: `backend=None` takes the first one that its device and arrays support."""

# An abstract mesh knows the name of its devices and not their compute capability. First match wins.
_CAPABILITIES: tuple[tuple[str, tuple[int, int]], ...] = (
    (r"\b(GB300|B300)\b", (10, 3)),
    (r"\b(GB200|B200|B100)\b", (10, 0)),
    (r"\b(GH200|H200|H100|H800|H20)\b", (9, 0)),
    (r"\bGB10\b", (12, 1)),
    (r"\b(RTX 50\d\d|RTX PRO \d{4})\b", (12, 0)),
    (r"\bThor\b", (11, 0)),
    (r"\b(L40S?|L4|L20|RTX 40\d\d|RTX \d{4} Ada)\b", (8, 9)),
    (r"\b(A10G?|A16|A2|A40|RTX 30\d\d|RTX A\d{4})\b", (8, 6)),
    (r"\b(A100|A800|A30)\b", (8, 0)),
    (r"\b(T4G?|RTX 20\d\d)\b", (7, 5)),
    (r"\bV100\b", (7, 0)),
    (r"\bP100\b", (6, 0)),
)


@dataclasses.dataclass(frozen=True)
class Support:
    """Whether a backend can be used, and the reason. True and False as the answer."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        return f"<{'yes' if self.ok else 'no'}: {self.reason}>"


class Target(NamedTuple):
    """What the table looks at: platform, device kind, and compute capability (None: not an NVIDIA GPU we know)."""

    platform: str
    kind: str
    capability: tuple[int, int] | None


_interpret: contextvars.ContextVar[bool] = contextvars.ContextVar("pallas_kernels_interpret", default=False)


@contextlib.contextmanager
def interpret() -> Iterator[None]:
    """Within it a kernel backend asked for by name runs interpreted, on any device: slow, for tests and study.

    Looked at while tracing; a function jitted and traced outside keeps what it was traced with. Mosaic needs
    jax >= 0.11. `backend=None` is not affected.
    """
    token = _interpret.set(True)
    try:
        yield
    finally:
        _interpret.reset(token)


def interpreting() -> bool:
    return _interpret.get()


def target(device: Any = None) -> Target:
    """The target that a device, an abstract device or the name of a device kind stands for; None: the default."""
    if device is None:
        device = jax.config.jax_default_device or jax.devices()[0]
    if isinstance(device, str):
        # jax_default_device may also be the name of a platform.
        if device in ("cpu", "gpu", "tpu", "cuda", "rocm"):
            return target(jax.devices(device)[0])
        return Target("gpu" if _capability_of_kind(device) else "unknown", device, _capability_of_kind(device))
    kind = device.device_kind
    stated = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    capability = (int(stated[1]), int(stated[2])) if stated else _capability_of_kind(kind)
    return Target(str(device.platform), kind, capability if device.platform in ("gpu", "cuda") else None)


def _capability_of_kind(kind: str) -> tuple[int, int] | None:
    if "AMD" in kind:
        return None
    return next((capability for name, capability in _CAPABILITIES if re.search(name, kind)), None)


def _supports(where: Target) -> dict[Backend, Support]:
    """The capability table."""
    have = where.capability
    if where.platform not in ("gpu", "cuda"):
        gpu = Support(False, f"needs an NVIDIA GPU, the device is {where.kind!r} (platform {where.platform!r})")
    elif have is None:
        gpu = Support(False, f"needs a known NVIDIA GPU, the compute capability of {where.kind!r} is unknown")
    else:
        gpu = Support(True, f"{where.kind!r} has {have[0]}.{have[1]}")

    def needs(what: str, ok: bool) -> Support:
        return gpu if ok or not gpu else Support(False, f"needs {what}, {gpu.reason}")

    capability = have or (0, 0)
    # Selecting Mosaic on 8.x aborts the process, and its code for 12.x does not assemble: it must not pass there.
    mosaic = needs("compute capability 9.x or 10.x", capability[0] in (9, 10))
    if not compat.HAS_MOSAIC:
        mosaic = Support(False, f"needs jax >= 0.11, this is {jax.__version__}")
    table: dict[Backend, Support] = {
        "mosaic": mosaic,
        "triton": needs("compute capability >= 8.0", capability >= (8, 0)),
        "xla": Support(True, "runs everywhere"),
    }
    return {name: table[name] for name in BACKENDS}


def supported_backends(device: Any = None) -> dict[Backend, Support]:
    """For every backend whether `device` can run it, and why.

    Args:
        device: a `jax.Device`, an abstract device, or the name of a device kind ("NVIDIA H200"); None is the
            default device.

    Returns:
        backend name -> `Support`, the preferred backend first.
    """
    return dict(_supports(target(device)))


def _device_of(arrays: Sequence[Any]) -> Any:
    for x in arrays:
        if isinstance(x, Tracer):
            device = getattr(jax.typeof(x).sharding.mesh, "abstract_device", None)
        elif isinstance(x, jax.Array):
            device = min(x.sharding.device_set, key=lambda d: d.id)
        else:
            device = getattr(getattr(getattr(x, "sharding", None), "mesh", None), "abstract_device", None)
        if device is not None:
            return device
    return jax.sharding.get_abstract_mesh().abstract_device


def explicit_spec(x: Any) -> Any:
    """The spec in an array's type, which says how it is cut over Explicit axes of a mesh; None if it is not."""
    if not isinstance(x, jax.Array):
        return None
    spec = getattr(jax.typeof(x).sharding, "spec", ())
    return spec if any(part is not None for part in spec) else None


def _objection(backend: Backend, arrays: Sequence[Any]) -> str:
    """Why the backend's kernels cannot take the arrays; empty if they can."""
    if backend == "xla":
        return ""
    for x in arrays:
        if x.size > tiling.MAX_ELEMENTS:
            return f"takes at most 2**31 - 1 elements, got {x.size}"
        if backend == "mosaic" and np.dtype(x.dtype).itemsize > 4:
            return f"takes no {x.dtype} arrays"
        if backend == "mosaic" and isinstance(x, Tracer) and jax.typeof(x).mat.varying:
            return "takes no arrays of a shard_map with check_vma=True"
        if (spec := explicit_spec(x)) is not None:
            return f"takes whole arrays, got one sharded by {spec} over an Explicit mesh"
    return ""


def considered(
    backend: Backend | None = None,
    arrays: Sequence[Any] = (),
    *,
    refused: Mapping[Backend, str] = {},
    device: Any = None,
) -> dict[Backend, Support]:
    """For every backend whether it can run a call, and why. The preferred one first; arguments as `resolve_backend`'s."""
    support = _supports(target(_device_of(arrays) if device is None else device))
    if backend is not None and interpreting():
        ok = compat.HAS_MOSAIC or backend != "mosaic"
        support[backend] = Support(True, "interpreted") if ok else support[backend]
    for name in BACKENDS:
        objection = refused.get(name) or _objection(name, arrays)
        if support[name] and objection:
            support[name] = Support(False, objection)
    return support


def resolve_backend(
    backend: Backend | None = None,
    arrays: Sequence[Any] = (),
    *,
    refused: Mapping[Backend, str] = {},
    device: Any = None,
) -> Backend:
    """The backend that runs a call. Resolved while tracing.

    Args:
        backend: a name means that backend or an error; None the best one for the device and the arrays.
        arrays: the call's arrays. The device is that of their mesh or sharding, else of the abstract mesh in
            use, else the default device.
        refused: backends that this call cannot use, and why.
        device: as `supported_backends` takes it, instead of that of the arrays.

    Raises:
        ValueError: `backend` is no name of a backend, or one that this device or these arrays cannot use; the
            message gives the reason of every backend.
    """
    if backend is not None and backend not in get_args(Backend):
        raise ValueError(f"`backend` must be None or one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    support = considered(backend, arrays, refused=refused, device=device)
    if backend is None:
        return next(name for name in BACKENDS if support[name])
    if not support[backend]:
        reasons = "".join(f"\n  {name}: {'yes' if s else 'no'}, {s.reason}" for name, s in support.items())
        raise ValueError(f"`backend`={backend!r} cannot run here:{reasons}")
    return backend
