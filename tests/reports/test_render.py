"""Tables as text, through rich and as HTML; numbers with units; rich and matplotlib are optional."""

import html
import io
import re
import sys

import pytest
from rich.console import Console

import fusedopt
from fusedopt.reports import render
from fusedopt.reports.render import Table
from tests.reports.test_report import small

TABLES = [
    Table("Fruit & nuts", ("what", "how many"), [("apples", "3"), ("<nuts>", "1,000"), ("all", "1,003")], total=True),
    Table("Facts", ("", ""), [("colour", "green")], left=2, notes=["a remark"]),
    Table("Nothing"),
]


@pytest.fixture
def no_rich(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)  # cannot be imported
    monkeypatch.setitem(sys.modules, "rich.console", None)


def test_plain_text():
    assert render.plain("Heading", TABLES) == "\n".join(
        [
            "Heading",
            "",
            "Fruit & nuts",
            "  what    how many",
            "  apples         3",
            "  <nuts>     1,000",
            "  all        1,003",
            "",
            "Facts",
            "  colour  green",
            "  a remark",
            "",
            "Nothing",
        ]
    )


def test_rich_text_has_every_cell_and_no_escapes():
    text = render.text("Heading", TABLES)
    for cell in ("Heading", "Fruit & nuts", "how many", "<nuts>", "1,003", "green", "a remark", "Nothing"):
        assert cell in text
    assert "\x1b" not in text
    assert re.search("apples +3$", text, re.M)  # numbers to the right


def test_text_is_plain_without_rich(no_rich):
    assert render.text("Heading", TABLES) == render.plain("Heading", TABLES)
    text = str(fusedopt.report(fusedopt.adamw(0.1), small()))
    assert "bytes moved, at least" in text
    assert "─" not in text


def test_html_is_escaped_and_whole():
    text = render.as_html("A < B", TABLES)
    assert "A &lt; B" in text
    assert "Fruit &amp; nuts" in text
    assert "&lt;nuts&gt;" in text
    for tag in ("table", "thead", "tbody", "tr", "td", "th", "p", "div", "caption"):
        assert len(re.findall(rf"<{tag}[ >]", text)) == text.count(f"</{tag}>"), tag
    assert "<th style='text-align:right'>1,003</th>" in text  # the sum stands out


def test_a_report_looks_the_same_everywhere():
    report = fusedopt.report(fusedopt.lamb(0.1), small())
    file = io.StringIO()
    Console(file=file, width=120).print(report)
    words = lambda text: re.findall(r"[\w,.]+", text)  # noqa: E731
    shown = html.unescape(re.sub(r"<[^>]+>", " ", report._repr_html_()))
    assert words(file.getvalue()) == words(render.plain(report.heading, report.tables()))
    assert sorted(words(shown)) == sorted(words(file.getvalue()))
    assert repr(report) == "<Report of lamb, apply, on cpu: 5 leaves, 41,288 parameters; print it>"


@pytest.mark.parametrize("columns", [40, 100, 200])
def test_a_narrow_terminal_gets_a_hundred_columns(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = render.text("Heading", [Table("T", ("a", "b"), [("x " * 200, "1")])]).splitlines()
    assert max(map(len, lines)) <= max(columns, 100)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (1024, "1.02 kB"), (12_345, "12.3 kB"), (999_600, "1.00 MB")]
    + [(204_472_320, "204 MB"), (3.5e9, "3.50 GB"), (7e12, "7.00 TB"), (7e15, "7000 TB")],
)
def test_sizes(number, text):
    assert render.size(number) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 ns"), (3.25e-6, "3.25 µs"), (41e-3, "41.0 ms"), (12.5e-9, "12.5 ns"), (2.0, "2.00 s"), (90.0, "90.0 s")],
)
def test_times(number, text):
    assert render.seconds(number) == text


def test_counts():
    assert render.count(25_557_032) == "25,557,032"
