"""Builds the sdist and the wheel, and uses them as a stranger would: `make dist`.

The sdist must hold every tracked file, so that its tests can be run; the wheel, which is built from the sdist, the two packages
and nothing else. The wheel is installed into an environment that has nothing but what it asks for, and the quick start of
the README is run there, outside of the checkout, with warnings as errors.
"""

from __future__ import annotations

import email
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import venv
import zipfile
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).parents[1]
DIST = ROOT / "dist"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
VERSION = PROJECT["version"]

INSTALLED = """
import importlib.metadata, importlib.resources, pathlib, sys
import fusedopt, pallas_kernels

meta = importlib.metadata.metadata("fusedopt")
assert fusedopt.__version__ == meta["Version"] == VERSION, (fusedopt.__version__, meta["Version"])
for package in (fusedopt, pallas_kernels):
    assert pathlib.Path(package.__file__).is_relative_to(sys.prefix), package.__file__
    assert importlib.resources.files(package).joinpath("py.typed").is_file(), package
try:
    import flax
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("flax is installed, so this says nothing of an environment without it")
try:
    fusedopt.TrainState
except ImportError as error:
    assert "fusedopt[flax]" in str(error), error
else:
    raise SystemExit("fusedopt.TrainState without flax: expected an ImportError")
"""


def main() -> None:
    start = time.monotonic()
    sdist, wheel = build()
    check_sdist(sdist)
    check_wheel(wheel)
    check_installed(wheel)
    print(f"dist: {sdist.name} and {wheel.name} are right, {time.monotonic() - start:.0f} s")


def build() -> tuple[pathlib.Path, pathlib.Path]:
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST, ROOT)
    (sdist,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    return sdist, wheel


def check_sdist(sdist: pathlib.Path) -> None:
    top = f"fusedopt-{VERSION}"
    with tarfile.open(sdist) as archive:
        held = {pathlib.PurePosixPath(m.name).relative_to(top).as_posix() for m in archive.getmembers() if m.isfile()}
    tracked = {name for name in run("git", "ls-files", cwd=ROOT).splitlines() if not name.startswith(".ci/")}
    same("the sdist", held - {"PKG-INFO"}, tracked)


def check_wheel(wheel: pathlib.Path) -> None:
    info = f"fusedopt-{VERSION}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        meta = email.message_from_bytes(archive.read(f"{info}/METADATA"))
    sources = {
        path.relative_to(ROOT).as_posix()
        for package in ("fusedopt", "pallas_kernels")
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".typed")
    }
    same(
        "the wheel", held, sources | {f"{info}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "licenses/LICENSE")}
    )
    stated = {
        "Name": PROJECT["name"],
        "Version": VERSION,
        "Summary": PROJECT["description"],
        "License-Expression": PROJECT["license"],
        "Requires-Python": PROJECT["requires-python"],
        "Description-Content-Type": "text/markdown",
    }
    for field, value in stated.items():
        assert meta[field] == value, f"{field}: got {meta[field]!r}, expected {value!r}"
    assert meta.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8"), "the description is not the README"
    same("Classifier", set(meta.get_all("Classifier", [])), set(PROJECT["classifiers"]))
    same("Provides-Extra", set(meta.get_all("Provides-Extra", [])), set(PROJECT["optional-dependencies"]))
    required = {re.split(r"[<>=!~ ]", text)[0] for text in meta.get_all("Requires-Dist", []) if "extra ==" not in text}
    same("Requires-Dist", required, {re.split(r"[<>=!~ ]", text)[0] for text in PROJECT["dependencies"]})


def check_installed(wheel: pathlib.Path) -> None:
    blocks = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    with tempfile.TemporaryDirectory() as name:
        away = pathlib.Path(name)
        venv.create(away / "venv", with_pip=True)
        python = away / "venv" / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel)
        for title, code in (
            ("installed", f"VERSION = {VERSION!r}\n{INSTALLED}"),
            ("quick_start", "\n".join(blocks[:2])),
        ):
            script = away / f"{title}.py"
            script.write_text(code, encoding="utf-8")
            run(python, "-W", "error", script, cwd=away)


def same(what: str, got: Iterable[str], expected: Iterable[str]) -> None:
    extra, missing = sorted(set(got) - set(expected)), sorted(set(expected) - set(got))
    if extra or missing:
        raise SystemExit(f"{what}: got {extra or 'nothing'} too much, {missing or 'nothing'} is missing")


def run(*command: object, cwd: pathlib.Path | None = None) -> str:
    done = subprocess.run([str(x) for x in command], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
