"""What the pages take from the rest of the repository when they are built: tables and plots of benchmarks/results.

A line `<!-- figures: NAME -->` of a page becomes the table of that name.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PLOTS = ("step-ratios.png", "growth.png")
MARKER = re.compile(r"^<!-- figures: (\w+) -->$", re.MULTILINE)

sys.path.insert(0, str(ROOT))


def newest(pattern: str) -> Path:
    """The file of the newest JAX among those that match."""
    found = sorted(RESULTS.glob(pattern), key=lambda path: [int(n) for n in re.findall(r"\d+", path.stem)])
    if not found:
        raise PluginError(f"no {pattern} in {RESULTS}")
    return found[-1]


def environment(document: dict[str, Any]) -> str:
    head = document["header"]
    packages = [f"{name} {head[name]}" for name in ("jax", "optax", "flax", "torch", "python") if head.get(name)]
    return f"Measured with {', '.join(packages)} on {head['cpus']} CPUs ({head['architecture']}).\n"


def tables() -> dict[str, Callable[[], str]]:
    from benchmarks import markdown

    path = newest("cpu-jax-*.json")
    document = json.loads(path.read_text(encoding="utf-8"))
    rows = document["rows"]
    return {
        "environment": lambda: environment(document),
        "ratios": lambda: markdown.tables(rows),
        "packing": lambda: markdown.packing(rows),
        "builds": lambda: markdown.builds(rows),
        "compiled": lambda: markdown.compiled(newest("aot-jax-*.md").read_text(encoding="utf-8")),
    }


def on_files(files: Any, config: Any) -> Any:
    for name in PLOTS:
        files.append(File.generated(config, f"results/{name}", abs_src_path=str(RESULTS / name)))
    return files


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    if not MARKER.search(markdown):
        return markdown
    known = tables()

    def figure(match: re.Match[str]) -> str:
        if match[1] not in known:
            raise PluginError(f"no figures called {match[1]!r}, only {', '.join(known)}")
        return known[match[1]]()

    return MARKER.sub(figure, markdown)
