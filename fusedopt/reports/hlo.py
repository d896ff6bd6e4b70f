"""Reads a compiled program's text: which kernels it launches, and how many bytes they touch."""

from __future__ import annotations

import dataclasses
import math
import re

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

# What runs other computations, perhaps never or many times: the text does not say how many kernels that makes.
CONTROL = {"while", "conditional", "call", "async-start"}

# What reads a part of its first operand, as large as its result; what writes a part of its result.
PARTIAL_READS = {"slice", "dynamic-slice", "gather"}
PARTIAL_WRITES = {"dynamic-update-slice", "scatter"}

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"^\s*(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<op>[\w\-]+)\((?P<rest>.*)$"
)
_SHAPE = re.compile(r"\b(pred|[a-z]+\d+(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name, op: as in the text.
        sizes: bytes of each result.
        elements: numbers in all results.
        operands: names.
        label: the name that the source gave the kernel, or the instruction's own.
        aliases: result index -> operand index, where a result is written over an operand.
        target: what a custom call calls.
        calls: the computation of a fusion.
        number: of a parameter.
        root: whether it is the result of its computation.
    """

    name: str
    op: str
    sizes: tuple[int, ...]
    elements: int
    operands: tuple[str, ...]
    label: str
    aliases: dict[int, int]
    target: str = ""
    calls: str = ""
    number: int | None = None
    root: bool = False


def computations(text: str) -> tuple[str, dict[str, list[Instruction]]]:
    """The name of the entry computation, and the instructions of all, in the order in which they run."""
    found: dict[str, list[Instruction]] = {}
    entry_name, body = "", None
    for line in text.splitlines():
        if body is None:
            if match := _COMPUTATION.match(line):
                body = found[match["name"]] = []
                entry_name = match["name"] if match["entry"] else entry_name
        elif line.startswith("}"):
            body = None
        elif match := _INSTRUCTION.match(re.sub(r"/\*.*?\*/", "", line)):
            body.append(_instruction(match))
    return entry_name, found


def entry(text: str) -> list[Instruction]:
    """The instructions of the entry computation."""
    name, found = computations(text)
    return found[name]


def _instruction(match: re.Match) -> Instruction:
    op, rest = match["op"], match["rest"]
    arguments = rest[: _closing(rest)]
    operands = tuple(re.findall(r"%([\w.\-]+)", arguments)) if op not in ("constant", "parameter") else ()
    aliasing = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", rest)
    label = re.search(r'op_name="[^"]*?\b(fusedopt_\w+)', rest)
    target = re.search(r'custom_call_target="([^"]+)"', rest)
    calls = re.search(r"\bcalls=%?([\w.\-]+)", rest)
    shapes = [(dtype, math.prod(int(d) for d in dims.split(",") if d)) for dtype, dims in _SHAPE.findall(match["type"])]
    return Instruction(
        match["name"],
        op,
        tuple(_bits(dtype) * count // 8 for dtype, count in shapes),
        sum(count for _, count in shapes),
        operands,
        label[1] if label else match["name"],
        {int(i or 0): int(k) for i, k in _ALIAS.findall(aliasing[1])} if aliasing else {},
        target[1] if target else "",
        calls[1] if calls else "",
        int(arguments) if op == "parameter" else None,
        bool(match["root"]),
    )


def _closing(text: str) -> int:
    depth = 1
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if not depth:
            return i
    return len(text)


def _bits(dtype: str) -> int:
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8  # pred


def kernels(program: list[Instruction]) -> list[Instruction]:
    """The instructions that launch a kernel or a copy, one each."""
    return [x for x in program if x.op not in NO_KERNEL and not x.op.endswith("-done")]


def uncountable(text: str, bytes_too: bool = True) -> str:
    """An operation for which the text does not say how many kernels run, or how many bytes they touch; else empty."""
    found = {x.op for x in entry(text)} & CONTROL
    if bytes_too:
        found |= {x.op for body in computations(text)[1].values() for x in body} & PARTIAL_WRITES
    return ", ".join(sorted(found))


def accessed_bytes(text: str) -> int:
    """Bytes read and written by all kernels: operands and results, each once per kernel.

    An operand of which a kernel reads slices counts with the size of these. A kernel that continues another one's work,
    with a buffer that the first has handed on to be written in place, takes its own part of that buffer: such a buffer
    counts once for all kernels of one name.
    """
    name, found = computations(text)
    by_name = {x.name: x for x in found[name]}
    total = 0
    for x in kernels(found[name]):
        sizes = [sum(by_name[operand].sizes) for operand in x.operands]
        if x.op in PARTIAL_READS:
            sizes[0] = min(sizes[0], sum(x.sizes))
        if x.op == "fusion":
            sizes = _read_by_fusion(found[x.calls])
        continued = {i for i, name in enumerate(x.operands) if x.aliases and _maker(name, by_name).label == x.label}
        total += sum(size for i, size in enumerate(sizes) if i not in continued)
        total += sum(size for i, size in enumerate(x.sizes) if x.aliases.get(i) not in continued)
    return total


def _read_by_fusion(body: list[Instruction]) -> list[int]:
    """Bytes that a fusion reads of each operand: of an operand that is only sliced, the slices.

    From the result back to the parameters: who wants how many elements of each instruction. An instruction with as many
    elements as its operand is taken to be elementwise, so that it wants what is wanted of itself.
    """
    by_name = {x.name: x for x in body}
    wanted: dict[str, dict[str, int]] = {x.name: {x.name: x.elements} if x.root else {} for x in body}
    read: dict[int, int] = {}
    for x in reversed(body):
        here = min(sum(wanted[x.name].values()), x.elements)
        if x.number is not None:
            read[x.number] = sum(x.sizes) * here // max(x.elements, 1)
        for i, name in enumerate(x.operands if here else ()):
            if x.op in PARTIAL_READS and i == 0:
                wanted[name][x.name] = here
            elif by_name[name].elements == x.elements:
                wanted[name] |= wanted[x.name]
            else:
                wanted[name][x.name] = by_name[name].elements
    return [read[i] for i in sorted(read)]


def _maker(name: str, by_name: dict[str, Instruction]) -> Instruction:
    """The instruction that computed a value, behind renamings."""
    x = by_name[name]
    while x.op in ("get-tuple-element", "bitcast", "tuple") and x.operands:
        x = by_name[x.operands[0]]
    return x
