"""Reads a compiled program's text: which kernels it launches, and how many bytes they touch."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import NamedTuple

# What stands in a program and launches nothing.
NO_KERNEL = {
    "parameter",
    "constant",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
}

COLLECTIVES = {"all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"}

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<op>[\w\-]+)\((?P<rest>.*)$")
_SHAPE = re.compile(r"\b(pred|[a-z]+\d+(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of the entry computation.

    Attributes:
        name, op: as in the text.
        sizes: bytes of each result.
        operands: names.
        label: the name that the source gave the kernel, or the instruction's own.
        aliases: result index -> operand index, where a result is written over an operand.
        target: what a custom call calls.
    """

    name: str
    op: str
    sizes: tuple[int, ...]
    operands: tuple[str, ...]
    label: str
    aliases: dict[int, int]
    target: str = ""


def entry(text: str) -> list[Instruction]:
    """The instructions of the entry computation, in the order in which they run."""
    body = text[text.index("\nENTRY ") :].splitlines()[2:]
    found = []
    for line in body:
        if line.startswith("}"):
            break
        if match := _INSTRUCTION.match(re.sub(r"/\*.*?\*/", "", line)):
            found.append(_instruction(match))
    return found


def _instruction(match: re.Match) -> Instruction:
    rest = match["rest"]
    arguments = rest[: _closing(rest)]
    operands = tuple(re.findall(r"%([\w.\-]+)", arguments)) if match["op"] not in ("constant", "parameter") else ()
    aliasing = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", rest)
    aliases = {int(i or 0): int(k) for i, k in _ALIAS.findall(aliasing[1])} if aliasing else {}
    label = re.search(r'op_name="[^"]*?\b(fusedopt_\w+)', rest)
    sizes = tuple(_bytes(*shape) for shape in _SHAPE.findall(match["type"]))
    target = re.search(r'custom_call_target="([^"]+)"', rest)
    name = match["name"]
    return Instruction(
        name, match["op"], sizes, operands, label[1] if label else name, aliases, target[1] if target else ""
    )


def _closing(text: str) -> int:
    depth = 1
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if not depth:
            return i
    return len(text)


def _bytes(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])
    return math.prod(int(d) for d in dims.split(",") if d) * bits // 8


class Collective(NamedTuple):
    """One collective of a program: its name without "-start", and the bytes of each result on a device."""

    op: str
    sizes: tuple[int, ...]


def collectives(text: str) -> list[Collective]:
    """What the devices say to each other, in the order of the text; all computations are looked at."""
    found = []
    for line in text.splitlines():
        match = _INSTRUCTION.match(re.sub(r"/\*.*?\*/", "", line))
        op = match["op"].removesuffix("-start") if match else ""
        if op in COLLECTIVES:
            sizes = tuple(_bytes(*shape) for shape in _SHAPE.findall(match["type"]))
            if match["op"] != op and match["type"].startswith("("):  # a start gives operands and results
                sizes = sizes[len(sizes) // 2 :]
            found.append(Collective(op, sizes))
    return found


def accessed_bytes(program: list[Instruction]) -> int:
    """Bytes read and written by all kernels: operands and results, each once per kernel.

    A kernel that continues another one's work, with a buffer that the first has handed on to be written in place,
    takes its own part of that buffer: such a buffer counts once for all kernels of one name.
    """
    by_name = {x.name: x for x in program}
    total = 0
    for x in program:
        if x.op in NO_KERNEL:
            continue
        continued = {i for i, name in enumerate(x.operands) if _maker(name, by_name).label == x.label and x.aliases}
        total += sum(_size(name, by_name) for i, name in enumerate(x.operands) if i not in continued)
        total += sum(size for i, size in enumerate(x.sizes) if x.aliases.get(i) not in continued)
    return total


def _maker(name: str, by_name: dict[str, Instruction]) -> Instruction:
    """The instruction that computed a value, behind renamings."""
    x = by_name[name]
    while x.op in ("get-tuple-element", "bitcast", "tuple") and x.operands:
        x = by_name[x.operands[0]]
    return x


def _size(name: str, by_name: dict[str, Instruction]) -> int:
    return sum(by_name[name].sizes)
