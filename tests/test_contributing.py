"""What CONTRIBUTING.md and noxfile.py name is there."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_links_to_files():
    links = [target.replace("\\", "") for target in re.findall(r"\]\(([^):#]+)\)", TEXT)]
    assert len(links) > 20
    for target in links:
        assert (ROOT / target).exists(), target


def test_commands_are_targets_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = set(re.findall(r"`make ([a-z-]+)", TEXT))
    assert {"lint", "types", "test", "dist"} <= commands
    for command in commands:
        assert re.search(rf"^{command}:", makefile, flags=re.MULTILINE), f"make {command}"


def test_nox_has_a_session_for_each_check():
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    assert {"tests", "lint", "types", "docs", "dist"} <= {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
