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


def test_other_lines_between_packed_and_solo_have_both_modes_in_a_cell():
    rows = [
        row("packing", "a", "optax", 1.0),
        row("packing", "a", "flat 1", 1.25),
        row("packing", "a", "apply 1", 0.875),
        row("packing", "a", "flat None", 12.3),
        row("packing", "b", "flat 1", 2.0),
    ]
    assert markdown.packing(rows).splitlines() == [
        "| `solo_from` | `a` | `b` |",
        "| --- | ---: | ---: |",
        "| `1` | 1.25, **0.88** | 2.00,  |",
        "| `None` | 12,  | ,  |",
    ]


def test_builds_are_those_of_train_steps():
    rows = [
        row("train", "net", "optax", 1.0, build_ratio=1.0),
        row("train", "net", "flat", 3.0, build_ratio=1.5),
        row("step", "net", "flat", 3.0, build_ratio=9.0),
    ]
    assert markdown.builds(rows).splitlines() == [
        "|  | arrays | `FlatParams` | `apply` |",
        "| --- | ---: | ---: | ---: |",
        "| `net` | 1,200 | 1.50 |  |",
    ]


def test_what_was_compiled_is_read_from_its_table():
    text = """# Head

| target | model | rule | mode | packing | backend | has_nan | launches | accesses |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
| h200 | resnet50 | adamw | flat | all | default | yes | 9 | 8.01 |
| h200 | resnet50 | adamw | flat | < 16384 | default | yes | 23 | 8.02 |
| h200 | resnet50 | adamw | apply | < 16384 | default | yes | 26 | 8.03 |
| h200 | resnet50 | adamw | apply | < 16384 | default | no | 1 | 1 |
| h200 | ragged | adamw | apply | < 16384 | default | yes | 2 | 2 |
| h200 | resnet50 | optax |  |  | default | no | 163 | 7.00 |
"""
    assert markdown.compiled(text).splitlines()[2:] == ["| `adamw` | 23, 8.02 | 9, 8.01 | 26, 8.03 | 163, 7.00 |"]
