"""The pages are true where they can be run: each is one program, and prints what it says it prints."""

from __future__ import annotations

import ast
import os
import pkgutil
import re
import subprocess
import sys

import jax
import optax
import pytest

import fusedopt
import pallas_kernels
from tests.docs.pages import DOCS, ROOT, blocks, not_run, pages, printed, program, text

PROGRAMS = [page for page in pages() if program(page)]


# A process each: all but the first page with the slow tests.
@pytest.mark.parametrize("page", [pytest.param(p, marks=() if p == "index.md" else pytest.mark.slow) for p in PROGRAMS])
def test_python_blocks_run_and_print_what_the_page_says(page, tmp_path):
    """Top to bottom in one process, with JAX as a user has it: one device unless the page asks for more."""
    file = tmp_path / f"{os.path.basename(page)}.py"
    file.write_text(program(page), encoding="utf-8")
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", str(file)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed(page)


@pytest.mark.parametrize("page", pages())
def test_no_block_escapes(page):
    """Indented fences and other spellings of the language would not be found, hence not run."""
    found = blocks(page)
    assert len(re.findall(r"^\s*```\S", text(page), flags=re.MULTILINE)) == len(found)
    assert {b.language for b in found} <= {"python", "text", "sh"}
    for block in found:
        if not_run(block):
            ast.parse(block.code)
            assert len(block.title) > len("Not run: ") + 10, "the reason is missing"


def test_blocks_that_are_not_run_are_rare():
    every = [b for page in pages() for b in blocks(page) if b.language == "python"]
    assert sum(map(not_run, every)) <= 2 < len(every) / 20


@pytest.mark.parametrize("page", pages())
def test_names_exist(page):
    """`fusedopt.x`, `optax.x` and `jax.x.y`, wherever a page writes them, are names of these packages."""
    prose = re.sub(r"^:::.*$", "", text(page), flags=re.MULTILINE)  # the build looks at these
    for module in (fusedopt, pallas_kernels, optax, jax):
        for path in re.findall(rf"(?<![\w.\]/-]){module.__name__}\.[\w.]*\w", prose):
            pkgutil.resolve_name(path)


@pytest.mark.parametrize("page", pages())
def test_commands_exist(page):
    """`make x` is a target and `python -m x` a module of the checkout."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:`|^)make ([a-z-]+)", text(page), flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), f"make {target}"
    for module in re.findall(r"python -m ((?:benchmarks|examples)[\w.]*)", text(page)):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def test_every_public_name_is_in_the_api_reference():
    shown = "\n".join(p.read_text(encoding="utf-8") for p in (DOCS / "api").glob("*.md"))
    for module in (fusedopt, pallas_kernels):
        for name in module.__all__:
            path = re.escape(f"{module.__name__}.{name}")
            assert re.search(rf"^::: {path}$|^\[\]\(\){{#{path}}}$", shown, flags=re.MULTILINE), path
