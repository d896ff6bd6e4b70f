"""What a row of the table of errors is, and where in the source an error was raised.

The rows are in the other files of this folder, sorted by topic: what a user does, and the whole text that it gives.
"""

from __future__ import annotations

import ast
import functools
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import fusedopt
import pallas_kernels

ROOTS = tuple(pathlib.Path(package.__file__).parent for package in (fusedopt, pallas_kernels))


class Row(NamedTuple):
    """One mistake.

    Attributes:
      id: of the test.
      call: makes it.
      error: the exception's type, exactly.
      text: the whole message; ``…`` stands for what other machines, versions and orders change.
    """

    id: str
    call: Callable[[], Any]
    error: type[Exception]
    text: str


class Step(NamedTuple):
    """One mistake in a step, which must also leave alone what a jitted step would be given to overwrite.

    Attributes:
      make: ``() -> (tx, grads, state, params)``.
      extra: keywords of the step.
      method: ``apply`` or ``update``.
    """

    id: str
    make: Callable[[], tuple[Any, Any, Any, Any]]
    error: type[Exception]
    text: str
    extra: dict[str, Any] = {}
    method: str = "apply"

    @property
    def row(self) -> Row:
        def call():
            tx, grads, state, params = self.make()
            getattr(tx, self.method)(grads, state, params, **self.extra)

        return Row(self.id, call, self.error, self.text)


class Site(NamedTuple):
    """A ``raise`` in the source."""

    file: str
    first: int
    last: int
    function: str


def matches(text: str, message: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, text.split("…"))), message, flags=re.DOTALL) is not None


@functools.cache
def caught(row: Row) -> Exception | None:
    """What the row's call raises. Once: the tests look at it one by one, and all together."""
    try:
        row.call()
    except Exception as error:
        return error
    return None


def site_of(error: Exception) -> Site | None:
    """The ``raise`` of this library that an exception comes from; None if another one's code raised it."""
    trace, last = error.__traceback__, None
    while trace is not None:
        last = (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return next((s for s in sites() if last and s.file == last[0] and s.first <= last[1] <= s.last), None)


@functools.cache
def sites() -> tuple[Site, ...]:
    """Every ``raise`` of both packages, but those that pass on an error raised elsewhere."""
    files = sorted(path for root in ROOTS for path in root.rglob("*.py"))
    return tuple(site for path in files for site in _raises(path))


def _raises(path: pathlib.Path) -> Iterator[Site]:
    package = next(root for root in ROOTS if root in path.parents)
    module = ".".join([package.name, *path.relative_to(package).with_suffix("").parts])

    def walk(node: ast.AST, inside: str) -> Iterator[Site]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Raise) and child.exc is not None:
                yield Site(str(path), child.lineno, child.end_lineno or child.lineno, inside)
            name = getattr(child, "name", None) if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else None
            yield from walk(child, f"{inside}.{name}" if name else inside)

    return walk(ast.parse(path.read_text(encoding="utf-8")), module)
