"""The README is true where it can be run."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import fusedopt

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def test_python_blocks_run_as_printed():
    """All in one process, with JAX as a user has it: a block may use names of an earlier one."""
    code = "\n".join(blocks("python"))
    assert "fusedopt" in code
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_quick_start_is_short():
    assert len(blocks("python")[0].strip().splitlines()) <= 20


def test_commands_are_targets_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = set(re.findall(r"\bmake ([a-z-]+)", README))
    assert {"train", "test"} <= commands
    for command in commands:
        assert re.search(rf"^{command}:", makefile, flags=re.MULTILINE), f"make {command}"


def test_links_to_files():
    for target in re.findall(r"\]\(([^):#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_one_version_everywhere():
    with open(ROOT / "pyproject.toml", "rb") as file:
        assert tomllib.load(file)["project"]["version"] == fusedopt.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## \[(\d.*)\]", changelog, flags=re.MULTILINE)[0] == fusedopt.__version__


def test_extras_and_folders_exist():
    with open(ROOT / "pyproject.toml", "rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    named = re.search(r"with the extra `(\w+)` for Flax and `(\w+)`", README)
    assert set(named.groups()) <= set(extras)
    for folder in re.findall(r"^\| `(\w+)/` \|", README, flags=re.MULTILINE):
        assert (ROOT / folder).is_dir(), folder
