"""The pages of docs/ as programs: what of a page is run, and what it says that it prints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

FENCE = re.compile(r"^```(?P<language>\w*)(?P<options>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block: its language, the title that readers see above it, its text, and the line before the text."""

    language: str
    title: str
    code: str
    line: int


def pages() -> list[str]:
    """Paths of all pages below docs/."""
    return sorted(str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md"))


def text(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    source, found = text(page), []
    for match in FENCE.finditer(source):
        title = re.search(r'title="([^"]*)"', match["options"])
        line = source.count("\n", 0, match.start("code"))
        found.append(Block(match["language"], title[1] if title else "", match["code"], line))
    return found


def not_run(block: Block) -> bool:
    """Python that readers are told is not run by the tests, and why: "Not run: needs two hosts"."""
    return block.language == "python" and block.title.startswith("Not run: ")


def program(page: str) -> str:
    """The page's Python, top to bottom, each line where it stands in the page, so that tracebacks name it."""
    lines: list[str] = []
    for block in blocks(page):
        if block.language == "python" and not not_run(block):
            lines += [""] * (block.line - len(lines)) + block.code.splitlines()
    return "\n".join(lines) + "\n" if lines else ""


def printed(page: str) -> str:
    """What the page says its program prints."""
    return "".join(b.code for b in blocks(page) if b.title == "Output")
