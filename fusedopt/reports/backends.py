"""Which backend updates which buckets on a device, and why not another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

import pallas_kernels
from fusedopt.bucket import backend_of
from fusedopt.layout import Bucket, FlatLayout
from fusedopt.optimizer import Optimizer
from fusedopt.state import live_buckets
from pallas_kernels import dispatch
from pallas_kernels.elementwise import REFUSED_PIECES, refused_tail


class Choice(NamedTuple):
    """What updates some buckets.

    Attributes:
      what: how many buckets, packed and solo.
      backend: its name; None if the one that was asked for cannot run.
      reasons: of every backend that was not taken, why: by name.
    """

    what: str
    backend: str | None
    reasons: Mapping[str, str]


def choices(opt: Optimizer, layout: FlatLayout, mode: str, device: Any = None) -> list[Choice]:
    """The backends of an optimizer's buckets on a device, as `resolve_backend` decides.

    Args:
      mode: "flat", "apply" or "optax": the packed buckets of trees are pieces, which not every backend takes.
      device: as `pallas_kernels.supported_backends` takes it.
    """
    found: dict[tuple, list[str]] = {}
    for b in live_buckets(layout):
        backend, reasons = _choice(opt, layout, b, mode, device)
        found.setdefault((backend, tuple(reasons.items())), []).append("solo" if b.solo else "packed")
    return [
        Choice(", ".join(f"{kinds.count(kind):,} {kind}" for kind in dict.fromkeys(kinds)), backend, dict(reasons))
        for (backend, reasons), kinds in found.items()
    ]


def _choice(opt: Optimizer, layout: FlatLayout, b: Bucket, mode: str, device: Any) -> tuple[str | None, dict[str, str]]:
    asked = backend_of(opt, b)
    arrays = [jax.ShapeDtypeStruct(b.shape, b.dtype)]
    arrays += [jax.ShapeDtypeStruct(b.shape, opt.slot_dtype(slot, b)) for slot in opt.rule.slots]
    refused: Mapping[dispatch.Backend, str] = {}
    if asked is None:
        refused = refused_tail(b.size) if mode == "flat" else REFUSED_PIECES
    elif asked == "mosaic" and b.trust and not b.solo and layout.align != pallas_kernels.BLOCK:  # `measure` raises
        refused = {"mosaic": f"takes norms of whole blocks, packing=fusedopt.Packing(align={pallas_kernels.BLOCK})"}
    support = dispatch.considered(asked, arrays, refused=refused, device=device)
    if asked is None:
        chosen = next(name for name, s in support.items() if s)
    else:
        chosen = asked if support[asked] else None
    reasons = {name: s.reason for name, s in support.items() if not s and name != chosen}
    better = "leaves that are buckets of their own are left to XLA"
    if asked == "xla" and opt.backend is None:
        reasons = {name: reasons.get(name, better) for name in support if name != "xla"}
    elif asked is not None:
        own = f"`backend`={asked!r} was asked for"
        reasons = {name: reasons.get(name, own) for name in support if name != chosen}
    else:
        reasons = {name: reasons.get(name, f"{chosen} comes first") for name in support if name != chosen}
    return chosen, reasons


def deprecated(device: Any = None) -> str:
    """What to know of a backend that JAX is about to drop and `backend=None` takes on a device; empty if there is none."""
    if not dispatch.compat.TRITON_IS_DEPRECATED:
        return ""
    after = {}
    for what, refused in (("whole buffers", {}), ("the leaves of trees", REFUSED_PIECES)):
        able = [name for name, s in pallas_kernels.supported_backends(device).items() if s and name not in refused]
        if able[0] == "triton":
            after[what] = able[1]
    if not after:
        return ""
    then = " and ".join(f"{what} by {name}" for what, name in after.items())
    return (
        f"jax {jax.__version__} deprecates Pallas' Triton backend, which updates {' and '.join(after)} here; "
        f"without it: {then}"
    )
