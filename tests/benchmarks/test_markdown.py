"""The README's tables of ratios are those of the committed results."""

from __future__ import annotations

import pathlib

import pytest

from benchmarks import markdown, storage

ROOT = pathlib.Path(__file__).parents[2]


def row(section, case, candidate, ratio, **more):
    return {
        "section": section,
        "case": case,
        "candidate": candidate,
        "leaves": 1200,
        "parameters": 1_250_000,
        "ratio": ratio,
        **more,
    }


def test_what_is_slower_is_bold_and_what_is_missing_is_empty():
    rows = [
        row("step", "a", "optax", 1.0),
        row("step", "a", "flat", 12.34),
        row("step", "a", "apply", 0.994),
        row("step", "a", "update", 0.996),
        row("step", "a", "torch fused", 0.5),
        row("step", "b", "optax", 1.0),
        row("step", "b", "flat", 2.0, error="MemoryError"),
    ]
    text = markdown.tables(rows)
    assert "| `a` | 1,200 | 1.25M | 12 | **0.99** | 1.00 | 25 |" in text
    assert "| `b` | 1,200 | 1.25M | 2.00 |  |  |  |" in text


def test_guarded_steps_are_held_against_the_guard_of_optax():
    rows = [
        row("guarded", "a", "optax", 1.0),
        row("guarded", "a", "flat", 0.8, against={"apply_if_finite": {"ratio": 2.5}}),
    ]
    assert "| `a` | 1,200 | 1.25M | 2.50 |" in markdown.tables(rows)


@pytest.mark.parametrize(("parameters", "text"), [(999, "999"), (1000, "1k"), (11_142, "11.1k"), (124_439_808, "124M")])
def test_sizes(parameters, text):
    assert markdown.size(parameters) == text


def test_the_readme_has_the_committed_figures():
    (path,) = (ROOT / "benchmarks" / "results").glob("cpu-jax-*.json")
    readme = (ROOT / "README.md").read_text()
    table = readme.partition("<!-- python -m benchmarks.markdown -->\n")[2].partition("\n<!-- end -->")[0]
    assert table.strip() == markdown.tables(storage.read(path)).strip()
