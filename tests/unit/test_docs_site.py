"""The docs site: a strict build, its links, its requests and its search. It needs the extra
``docs``, and the last test Chromium.
"""

from __future__ import annotations

import functools
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest

from tests.support.browser import Tab, chromium
from tests.support.source_tree import ROOT
from tests.support.waiting import until


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: a warning ends the build."""
    pytest.importorskip("material", reason="needs the extra docs: pip install 'glowplug[docs]'")
    folder = tmp_path_factory.mktemp("site")
    words = ["build", "--strict", "-f", "docs/site/mkdocs.yml", "-d", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0 and "WARNING -" not in done.stderr, done.stderr
    return folder


class Elements(HTMLParser):
    """Ids, links and resources of an HTML page.

    Attributes:
        ids: ids of all elements.
        hrefs: targets of links.
        resources: addresses that a browser loads with the page.
        paragraphs: texts of the paragraphs.
    """

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.hrefs: list[str] = []
        self.resources: list[str] = []
        self.paragraphs: list[str] = []
        self._in_paragraph = False
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids.update(filter(None, (given.get("id"), given.get("name"))))
        if tag == "a" and "href" in given:
            self.hrefs.append(given["href"])
        elif tag == "link" and "href" in given and given.get("rel") != "canonical":
            self.resources.append(given["href"])
        self.resources += [given["src"]] if "src" in given else []
        if tag == "p":
            self.paragraphs.append("")
        self._in_paragraph = tag == "p" or (self._in_paragraph and tag != "pre")

    def handle_endtag(self, tag: str) -> None:
        self._in_paragraph = self._in_paragraph and tag != "p"

    def handle_data(self, data: str) -> None:
        if self._in_paragraph:
            self.paragraphs[-1] += data


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Elements]:
    return {page.relative_to(site).as_posix(): Elements(page) for page in site.rglob("*.html")}


def test_links_of_the_site_lead_to_its_pages(site: Path, pages: dict[str, Elements]) -> None:
    """Also those of docs/ to files elsewhere in the repository, which are pages of the site."""
    dead = []
    for name, page in pages.items():
        if name == "404.html":  # served in place of any page, so its links are absolute
            continue
        for href in (*page.hrefs, *page.resources):
            parts = urlsplit(href)
            if parts.scheme or parts.netloc:
                continue
            target = unquote(urljoin(name, parts.path)) if parts.path else name
            target = target + "index.html" if target.endswith("/") or not target else target
            target = "index.html" if target == "." else target
            there = (site / target).exists()
            if there and parts.fragment and target in pages:
                there = unquote(parts.fragment) in pages[target].ids
            dead += [] if there else [f"{name}: {href}"]
    assert dead == []
    listed = "repository/tests/thirdparty/glowplug-lines/src/glowplug_lines/plugin.py.html"
    assert listed in pages and "repository/index.html" in pages


def test_the_site_loads_nothing_from_other_hosts(pages: dict[str, Elements]) -> None:
    found = {
        f"{name}: {address}"
        for name, page in pages.items()
        for address in page.resources
        if urlsplit(address).netloc
    }
    assert found == set()


def test_lists_and_tables_of_the_site_are_no_paragraphs(pages: dict[str, Elements]) -> None:
    """mkdocs wants a blank line before a list, and four spaces before a list's second paragraph."""
    wrong = [
        f"{name}: {text[:60]!r}"
        for name, page in pages.items()
        for text in page.paragraphs
        if any(line.lstrip().startswith(("- ", "* ", "| ", "```")) for line in text.splitlines())
    ]
    assert wrong == []


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    """The site's address on a server of this process."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))
    ) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_sites_search_finds_a_page_and_no_other_host_is_called(
    address: str, tmp_path: Path
) -> None:
    with chromium(tmp_path) as browser:
        tab = Tab(browser)
        tab.open(f"http://{address}/benchmarks/hopper.html")
        figures = "[...document.querySelectorAll('article img')]"
        until(lambda: tab.run(f"{figures}.every(image => image.complete)"), "figures are loaded")
        assert tab.run(f"{figures}.length") > 2
        assert tab.run(f"{figures}.every(image => image.naturalWidth > 0)")
        tab.run("document.querySelector('input.md-search__input').focus()")
        tab.write("all-gather expert placement")
        tab.wait_text(".md-search-result__list", "Ranks and drafts")
        assert "ranks.html" in tab.run(
            "[...document.querySelectorAll('.md-search-result__link')].map(a => a.href).join(' ')"
        )
        assert tab.hosts == {address} and tab.problems == []
