"""What is stored of the notebooks: outputs of the code that is there, small, and nothing of the machine that made them."""

from __future__ import annotations

import ast
import base64
import copy
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from notebooks import execute

ROOT = Path(__file__).parents[2]
NAMES = execute.names()
LARGEST = 300_000  # bytes of a file: what a reviewer's browser still draws at once
FIGURE = 1_000  # pixels: wider ones are scaled down beyond legibility

# A path from the root of a file system, a drive, a home, or an address: outputs have no use for any of them.
OF_A_MACHINE = re.compile(r"(?<![\w.>])/(?:\w[\w.-]*/)|[A-Z]:\\|~/|\w+://|\blocalhost\b|\b\d+\.\d+\.\d+\.\d+:\d+")


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook):
    return [output for cell in code_cells(notebook) for output in cell.outputs]


def texts(output):
    return [output.get("text", ""), *(v for k, v in output.get("data", {}).items() if not k.startswith("image/"))]


def test_there_are_five():
    assert [name[:2] for name in NAMES] == ["01", "02", "03", "04", "05"]


@pytest.mark.parametrize("name", NAMES)
class TestStored:
    def test_format(self, name):
        nbformat.validate(execute.read(name))
        normalised = execute.read(name)
        execute.normalise(normalised)
        assert normalised == execute.read(name), "run: python -m notebooks.execute"

    def test_outputs_are_those_of_the_code(self, name):
        notebook = execute.read(name)
        assert notebook.metadata.fusedopt.code_digest == execute.code_digest(notebook), (
            f"the code has changed since it was run: python -m notebooks.execute {name}"
        )
        assert [cell.execution_count for cell in code_cells(notebook)] == list(range(1, len(code_cells(notebook)) + 1))

    def test_no_errors_and_no_warnings(self, name):
        found = outputs(execute.read(name))
        assert {output.output_type for output in found} <= {"stream", "display_data", "execute_result"}
        assert not [output for output in found if output.get("name") == "stderr"]
        assert not re.search(r"[Ww]arning|Traceback", "".join(text for o in found for text in texts(o)))

    def test_figures(self, name):
        pictures = [o.data["image/png"] for o in outputs(execute.read(name)) if "image/png" in o.get("data", {})]
        assert pictures
        for picture in pictures:
            data = base64.b64decode(picture)
            assert data.startswith(b"\x89PNG")
            width, height = (int.from_bytes(data[i : i + 4]) for i in (16, 20))
            assert 300 < width < FIGURE
            assert 100 < height < FIGURE

    def test_small(self, name):
        assert (execute.FOLDER / f"{name}.ipynb").stat().st_size < LARGEST

    def test_nothing_of_a_machine(self, name):
        for output in outputs(execute.read(name)):
            for text in texts(output):
                assert not OF_A_MACHINE.search(text), text

    def test_reads_as_a_text(self, name):
        notebook = execute.read(name)
        assert re.match(r"# \S", notebook.cells[0].source)
        sources = [cell.source for cell in notebook.cells]
        assert all(source.strip() for source in sources)
        # Code that defines, then code that draws, at most: further on a reader wants a word.
        kinds = "".join("c" if cell.cell_type == "code" else "t" for cell in notebook.cells)
        assert "cccc" not in kinds
        assert kinds.endswith("t")

    def test_links(self, name):
        text = "\n".join(cell.source for cell in execute.read(name).cells if cell.cell_type == "markdown")
        for target in re.findall(r"\]\(([^):#]+)\)", text):
            assert (execute.FOLDER / target).exists(), target
        for command in re.findall(r"\bmake ([a-z-]+)\b`", text):
            assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)

    def test_needs_no_checkout(self, name):
        code = "\n".join(cell.source for cell in code_cells(execute.read(name)))
        nodes = list(ast.walk(ast.parse(code)))
        imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        installed = {"fusedopt", "pallas_kernels", "jax", "numpy", "optax", "matplotlib", "sklearn"}
        assert {module.split(".")[0] for module in imported} - sys.stdlib_module_names <= installed

    def test_first_code_is_the_installation(self, name):
        assert code_cells(execute.read(name))[0].source == code_cells(execute.read(NAMES[0]))[0].source
        assert not code_cells(execute.read(name))[0].outputs

    def test_says_what_the_machine_can_run(self, name):
        assert "xla: yes, runs everywhere" in code_cells(execute.read(name))[1].outputs[0].text


def test_paths_and_addresses_are_found():
    for text in ("in /home/me/x.py", "C:\\x", "see ~/x", "http://host/x", "'/usr/lib/python3'", "at 127.0.0.1:8888"):
        assert OF_A_MACHINE.search(text), text
    for text in ("block/conv/kernel", "12 / 3", "norm of gradient / norm of weights", "jax 0.12.0.1 on cpu", "1/256"):
        assert not OF_A_MACHINE.search(text), text


def test_a_changed_cell_changes_the_digest():
    notebook = execute.read(NAMES[0])
    changed = copy.deepcopy(notebook)
    changed.cells[0].source += " "  # text
    assert execute.code_digest(changed) == execute.code_digest(notebook)
    code_cells(changed)[0].source += " "
    assert execute.code_digest(changed) != execute.code_digest(notebook)


class TestInstallation:
    """The first cell, where something is missing: what it hands to pip, which is not called."""

    @pytest.fixture
    def commands(self, monkeypatch):
        """A list of the commands that are run. Everything seems to be missing."""
        found = []
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        monkeypatch.setattr(subprocess, "run", lambda command, check: found.append(command))
        return found

    @staticmethod
    def run():
        exec(code_cells(execute.read(NAMES[0]))[0].source, {})

    def test_nothing_is_missing(self, monkeypatch, commands):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        self.run()
        assert commands == []

    @pytest.mark.parametrize(("cwd", "source"), [("notebooks", ".."), ("", ".")])
    def test_in_a_checkout(self, monkeypatch, commands, tmp_path, cwd, source):
        for folder in ("notebooks", "fusedopt"):
            (tmp_path / folder).mkdir()
        (tmp_path / "fusedopt" / "__init__.py").touch()
        monkeypatch.chdir(tmp_path / cwd)
        self.run()
        assert commands == [[sys.executable, "-m", "pip", "install", "--quiet", source, "matplotlib", "scikit-learn"]]

    def test_beside_a_wheel(self, monkeypatch, commands, tmp_path):
        (tmp_path / "fusedopt-0.1.0-py3-none-any.whl").touch()
        monkeypatch.chdir(tmp_path)
        self.run()
        assert "./fusedopt-0.1.0-py3-none-any.whl" in commands[0]

    def test_in_colab_with_a_gpu(self, monkeypatch, commands, tmp_path):
        (tmp_path / "fusedopt-0.1.0-py3-none-any.whl").touch()
        (tmp_path / "nvidia-smi").touch(mode=0o755)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("PATH", str(tmp_path))
        self.run()
        assert "jax[cuda12]" not in commands[0]  # a GPU machine that is not Colab keeps its JAX
        monkeypatch.setitem(sys.modules, "google.colab", object())
        self.run()
        assert "jax[cuda12]" in commands[1]

    def test_nowhere(self, monkeypatch, commands, tmp_path):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ModuleNotFoundError, match=r"pip wheel --no-deps .*upload"):
            self.run()
        assert commands == []
