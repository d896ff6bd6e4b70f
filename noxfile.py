"""The checks in environments of their own, each with what it needs and no more: `pipx run nox`, or `nox -s tests`.

The Makefile makes one environment for all of them, which is quicker to work in; what runs is the same.
"""

import pathlib
import tomllib

import nox

nox.needs_version = ">=2024.10"
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "types", "tests", "docs", "dist"]

EXTRAS = tomllib.loads(pathlib.Path("pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]

# The ends of the range that pyproject.toml promises.
OLDEST, NEWEST = ("3.11", ["jax==0.10.2", "jaxlib==0.10.2"]), ("3.12", [])


def of_dev(*names: str) -> list[str]:
    """These tools, in the versions that the extra `dev` asks for."""
    return [text for name in names for text in EXTRAS["dev"] if text.startswith(name)]


@nox.session
@nox.parametrize("python,jax", [OLDEST, NEWEST], ids=["oldest", "newest"])
def tests(session: nox.Session, jax: list[str]) -> None:
    """pytest, with the oldest and with the newest JAX; arguments after -- go to pytest, such as -m "slow or not slow"."""
    session.install("--editable", ".[dev]", *jax)
    session.run("python", "-m", "pytest", "-n", "2", *session.posargs)


@nox.session(python=NEWEST[0])
def lint(session: nox.Session) -> None:
    """ruff."""
    session.install(*of_dev("ruff"))
    session.run("ruff", "check", ".")


@nox.session(python=NEWEST[0])
def types(session: nox.Session) -> None:
    """pyright, over the packages and a typed program that uses them."""
    session.install("--editable", ".[flax]", *of_dev("pyright", "pytest>"))
    session.run("pyright", "--pythonpath", str(pathlib.Path(session.bin, "python")))


@nox.session(python=NEWEST[0])
def dist(session: nox.Session) -> None:
    """The sdist and the wheel, built, and used elsewhere."""
    session.install(*of_dev("build"))
    session.run("python", ".ci/check_dist.py")


@nox.session(python=NEWEST[0])
def docs(session: nox.Session) -> None:
    """The site, with every warning an error."""
    session.install("--editable", ".[docs]")
    session.run("python", "-m", "mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "1"})
