"""Bytes that a step must move: what no program that computes it can do without."""

from __future__ import annotations

from fusedopt.layout import Bucket, FlatLayout
from fusedopt.optimizer import Optimizer
from fusedopt.packing import slot_dtype

PASSES = ("look for NaN", "accumulate", "clip", "norms", "update")


def needed_bytes(opt: Optimizer, layout: FlatLayout, mode: str) -> dict[str, int]:
    """Bytes that the passes over parameters, gradients and state must read and write in a step that is taken.

    An array is read once, and written once, between two points at which a number must be known that depends on all of
    it: whether the gradients are finite, their norm, the norms of the leaves. Everything else could be one kernel. What a
    program moves besides (copies of packed leaves, kernels that are not fused, scalars and sums) is not counted: this is
    a lower bound, and compiling tells the rest.

    Args:
      mode: "flat" counts the padding of packed buckets too; "apply" and "optax" do not.

    Returns:
      Bytes by pass, of those in `PASSES` that there are.
    """
    total: dict[str, int] = dict.fromkeys(PASSES, 0)
    for b in layout.buckets:
        for name, count in _bucket(opt, layout, b, mode).items():
            total[name] += count
    return {name: count for name, count in total.items() if count}


def _bucket(opt: Optimizer, layout: FlatLayout, b: Bucket, mode: str) -> dict[str, int]:
    n = b.size if mode == "flat" else sum(layout.sizes_of(b))
    own, wide = n * b.dtype.itemsize, n * slot_dtype(b.dtype).itemsize
    size = {"g": own, "w": own, "accumulated": wide, "ema": wide, "master": wide}
    size |= {slot: n * opt.slot_dtype(slot, b).itemsize for slot in opt.rule.slots}
    if b.frozen:
        return {"look for NaN": own} if opt.skip_nonfinite else {}
    kept = opt.kept(b)
    accumulates, trust = opt.accumulate > 1, b.trust
    any_norm = any(x.trust and not x.frozen for x in layout.buckets)
    looks = opt.skip_nonfinite and (accumulates or not (opt.clips or trust))
    truth = "master" if "master" in kept else "w"
    gradient = "accumulated" if accumulates else "g"

    total: dict[str, int] = {}
    known: set[str] = set()  # what has been read or written since the last point at which a number had to be known

    def pass_(name: str, reads: set[str], writes: set[str], waits: bool) -> None:
        if waits and n > 1:  # of a single element XLA makes no sum
            known.clear()
        total[name] = sum(size[x] for x in reads - known) + sum(size[x] for x in writes)
        known.update(reads | writes)

    if looks:
        pass_("look for NaN", {"g"}, set(), False)
    if accumulates:
        pass_("accumulate", {"g", "accumulated"}, {"accumulated"}, looks)
    if opt.clips:
        pass_("clip", {gradient}, set(), False)
    if trust:
        pass_("norms", {gradient, truth, *opt.rule.measures}, set(), opt.clips)
    kept_through = {x for x in kept if x != "accumulated"}
    reads = {gradient, *kept_through}
    if truth == "w" or mode == "optax":  # a master weight replaces its parameter unseen
        reads.add("w")
    waits = opt.clips or trust or (opt.skip_nonfinite and (any_norm or not accumulates))
    pass_("update", reads, {"w", *kept_through}, waits)
    return total
