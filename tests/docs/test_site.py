"""The built site: strict, whole, findable, and without a host other than its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import fusedopt
import pallas_kernels
from benchmarks import markdown
from tests.docs.pages import ROOT, pages

pytestmark = pytest.mark.slow  # a build takes seconds

FETCHED = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src"}


class Page(HTMLParser):
    """What one page of the site links to, fetches, can be linked to, and shows outside of code."""

    def __init__(self, html: str):
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.ids: set[str] = set()
        self.shown: list[str] = []
        self.tables: list[list[int]] = []
        self.hidden = 0
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids.add(given.get("id") or "")
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag in FETCHED and given.get(FETCHED[tag]) and given.get("rel") != "canonical":
            self.fetched.append(given[FETCHED[tag]])
        if tag in ("code", "pre", "script", "style"):
            self.hidden += 1
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append(0)
        if tag in ("td", "th"):
            self.tables[-1][-1] += 1

    def handle_endtag(self, tag):
        if tag in ("code", "pre", "script", "style"):
            self.hidden -= 1

    def handle_data(self, data):
        if not self.hidden:
            self.shown.append(data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def site(folder):
    return {p.relative_to(folder).as_posix(): Page(p.read_text(encoding="utf-8")) for p in folder.rglob("*.html")}


def test_every_page_is_there_and_nothing_else_of_the_folder(folder, site):
    assert set(site) == {"404.html", *(page.replace(".md", ".html") for page in pages())}
    assert not list(folder.rglob("*.py"))


def test_nothing_is_fetched_from_another_host(site):
    for name, page in site.items():
        assert page.fetched, name
        for url in page.fetched:
            assert not urlsplit(url).netloc, f"{name}: {url}"


def test_every_link_ends_at_a_page_and_at_a_place_in_it(folder, site):
    for name, page in site.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.netloc or parts.scheme or name == "404.html":  # its links are to the root of a server
                continue
            target = (folder / name).parent / unquote(parts.path) if parts.path else folder / name
            assert target.resolve().is_file(), f"{name}: {link}"
            if parts.fragment:
                ids = site[target.resolve().relative_to(folder.resolve()).as_posix()].ids
                assert unquote(parts.fragment) in ids, f"{name}: {link}"


def test_no_markup_is_left(site):
    for name, page in site.items():
        shown = "".join(page.shown)
        for left in ("](", "](#", "```", "**", ":::", "<!--", "{#"):
            assert left not in shown, f"{name}: {shown[max(0, shown.find(left) - 60) :][:120]!r}"


def test_the_rows_of_a_table_are_as_wide_as_its_head(site):
    tables = [(name, widths) for name, page in site.items() for widths in page.tables]
    assert len(tables) > 20
    for name, widths in tables:
        assert len(set(widths)) == 1, (name, widths)


@pytest.mark.parametrize("module", [fusedopt, pallas_kernels], ids=lambda m: m.__name__)
def test_every_public_name_has_a_place_in_the_reference(module, site):
    ids = set().union(*(page.ids for name, page in site.items() if name.startswith("api/")))
    assert {f"{module.__name__}.{name}" for name in module.__all__} <= ids


def test_the_search_finds(folder):
    """The index that the search reads, on a server and from a folder."""
    text = (folder / "search" / "search_index.json").read_text(encoding="utf-8")
    assert (folder / "search" / "search_index.js").read_text(encoding="utf-8") == f"var __index = {text}"
    sections = json.loads(text)["docs"]
    for words, page in {
        "weight decay": "semantics.html",
        "GradScaler": "from-torch.html",
        "check_restored": "checkpoints.html",
        "trust ratio": "api/optimizers.html",
        "resolve_backend": "api/pallas_kernels.html",
    }.items():
        found = {s["location"].partition("#")[0] for s in sections if words in s["title"] + " " + s["text"]}
        assert page in found, (words, found)


def test_the_figures_are_those_of_the_results(folder):
    html = (folder / "performance.html").read_text(encoding="utf-8")
    newest = sorted((ROOT / "benchmarks" / "results").glob("cpu-jax-*.json"))[-1]
    rows = json.loads(newest.read_text(encoding="utf-8"))["rows"]
    first = markdown.tables(rows).splitlines()[4].split("|")
    cells = [cell.strip().strip("`*") for cell in first[1:-1]]
    row = r"\s*".join(rf"<td[^>]*>(?:<code>|<strong>)?{re.escape(cell)}(?:</code>|</strong>)?</td>" for cell in cells)
    assert re.search(row, html), cells
    for plot in ("step-ratios.png", "growth.png"):
        assert (folder / "results" / plot).read_bytes() == (Path(newest).parent / plot).read_bytes()
