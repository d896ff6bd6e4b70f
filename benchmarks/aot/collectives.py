"""What the devices of a compiled program say to each other."""

from __future__ import annotations

from typing import NamedTuple

from fusedopt.reports import hlo

COLLECTIVES = {"all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"}


class Collective(NamedTuple):
    """One collective of a program: its name without "-start", and the bytes of each result on a device."""

    op: str
    sizes: tuple[int, ...]


def collectives(text: str) -> list[Collective]:
    """Those of all computations, in the order of the text."""
    found = []
    for x in (x for program in hlo.computations(text)[1].values() for x in program):
        op, sizes = x.op.removesuffix("-start"), x.sizes
        if op in COLLECTIVES:
            if x.op != op and len(sizes) > 1:  # a start gives operands and results
                sizes = sizes[len(sizes) // 2 :]
            found.append(Collective(op, sizes))
    return found
