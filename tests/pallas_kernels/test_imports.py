"""Imports go one way, and importing needs no GPU."""

import ast
import pathlib
import subprocess
import sys

import pytest

import pallas_kernels

ROOT = pathlib.Path(pallas_kernels.__file__).parent
MODULES = sorted(ROOT.glob("*.py"))


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_imports_only_jax_and_itself(path):
    for name in imported(path):
        root = name.split(".")[0]
        assert root in {"jax", "numpy", "pallas_kernels"} or root in sys.stdlib_module_names, name
        assert not name.startswith("jax._src") or path.stem == "compat", name


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_versions_are_checked_in_compat_only(path):
    assert path.stem == "compat" or "__version_info__" not in path.read_text()


def test_importing_loads_no_kernel_language():
    wanted = {"jax.experimental.pallas", "jax.experimental.pallas.mosaic_gpu", "jax.experimental.pallas.triton"}
    loaded = subprocess.run(
        [sys.executable, "-c", f"import pallas_kernels, sys; print(len({wanted} & set(sys.modules)))"],
        capture_output=True, text=True, check=True, cwd=ROOT.parent,
    )  # fmt: skip
    assert loaded.stdout.strip() == "0"
