"""Run the notebooks anew, in place, and keep of their outputs only what belongs under version control.

    python -m notebooks.execute                 # all of them
    python -m notebooks.execute 01_quickstart

The kernel is the Python that runs this, on the CPU and with the checkout in front of its path, whatever kernels are
registered on the machine. Stored are the outputs, and in the metadata a digest of the code that they came from, which
tests/notebooks compares with the code that is there.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
CELL_SECONDS = 600  # one that takes longer hangs


def names() -> list[str]:
    """The notebooks, without their ending, in order."""
    return sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def read(name: str) -> Any:
    """A notebook as it is stored.

    Raises:
      ValueError: there is none of this name.
    """
    if name not in names():
        raise ValueError(f"`name`: expected one of {', '.join(names())}, got {name!r}")
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code_digest(notebook: Any) -> str:
    """16 hex digits that change with any code cell, and not with text."""
    code = "\0".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.blake2b(code.encode(), digest_size=8).hexdigest()


class _ThisPython(KernelSpecManager):
    """One kernel, by any name: `sys.executable`."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name="Python 3", language="python")


def run(notebook: Any, cwd: Path = FOLDER, extra_env: Mapping[str, str] | None = None) -> None:
    """Executes a notebook in place, as Jupyter would with this Python on the CPU; the first error is raised.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell raised; the text holds the cell and the traceback.
    """
    with tempfile.TemporaryDirectory() as private:
        env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "MPLBACKEND", "PYTHONWARNINGS")}
        path = [str(FOLDER.parent), *filter(None, [env.get("PYTHONPATH")])]
        env |= {"PYTHONPATH": os.pathsep.join(path), "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
        env |= {"IPYTHONDIR": private, "JUPYTER_RUNTIME_DIR": private, "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
        manager = AsyncKernelManager(
            kernel_spec_manager=_ThisPython(),
            connection_file=f"{private}/kernel.json",
            transport="ipc" if os.name == "posix" else "tcp",  # no ports that others could listen on
        )
        client = NotebookClient(
            notebook,
            km=manager,
            timeout=CELL_SECONDS,
            resources={"metadata": {"path": str(cwd)}},
            record_timing=False,
            coalesce_streams=True,
        )
        client.execute(env=env | dict(extra_env or {}), cleanup_kc=True)


def normalise(notebook: Any) -> None:
    """Takes out, in place, what another run on another machine would write differently without meaning anything by it."""
    notebook.metadata = nbformat.from_dict(
        {
            "fusedopt": {"code_digest": notebook.metadata.get("fusedopt", {}).get("code_digest", "")},
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i:02}"
        cell.metadata = nbformat.from_dict({})
        for output in cell.get("outputs", ()):
            output.pop("transient", None)
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})


def write(name: str, notebook: Any) -> Path:
    """Normalises and stores a notebook that has been run."""
    notebook.metadata["fusedopt"] = {"code_digest": code_digest(notebook)}
    normalise(notebook)
    nbformat.validate(notebook)
    path = FOLDER / f"{name}.ipynb"
    nbformat.write(notebook, path)
    return path


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m notebooks.execute", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="name", help=f"one of {', '.join(names())} (default: all)")
    args = parser.parse_args(argv)
    for name in args.names or names():
        try:
            notebook = read(name)
        except ValueError as error:
            parser.error(str(error))
        start = time.perf_counter()
        run(notebook)
        path = write(name, notebook)
        print(f"{path.name}: {time.perf_counter() - start:.0f} s, {path.stat().st_size // 1000} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
