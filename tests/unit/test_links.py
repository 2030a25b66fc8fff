"""Links of all Markdown pages of the repository, and pages of the docs site's navigation."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.markdown import anchors, dead_links, links
from tests.support.site_navigation import REPOSITORY, expanded, folder_pages, pages_of
from tests.support.source_tree import ROOT

DOCS = ROOT / "docs"
#: folders without pages of the repository
SKIPPED = {"__pycache__", "node_modules", "build", "dist", "scratch", "results", "profiles"}


def markdown_pages() -> Iterator[Path]:
    """Yield every Markdown file of the repository. Links to folders are not followed."""
    for folder, folders, files in os.walk(ROOT):
        folders[:] = sorted(
            name
            for name in folders
            if name not in SKIPPED
            and (not name.startswith(".") or name == ".ci")
            and not (Path(folder) / name / "pyvenv.cfg").exists()
        )
        yield from (Path(folder) / name for name in sorted(files) if name.endswith(".md"))


def navigation() -> list[Any]:
    config = yaml.safe_load((DOCS / "site" / "mkdocs.yml").read_text(encoding="utf-8"))
    return expanded(config["nav"], DOCS)


def test_links_lead_somewhere() -> None:
    """Files, folders, images and anchors, of each page from the top to the sample packages."""
    pages = list(markdown_pages())
    assert {ROOT / "README.md", DOCS / "ranks.md"} <= set(pages)
    assert len(pages) > 45 and sum(len(links(page.read_text())) for page in pages) > 200
    assert list(dead_links(ROOT, pages)) == []


PLANTED = [
    ("[a](none.md)", "none.md: no such file"),
    ("[a](other.md#nowhere)", "other.md#nowhere: no such anchor"),
    ("[a](#nowhere)", "#nowhere: no such anchor"),
    ("[a](other.md#first-1 'title')", "other.md#first-1: no such anchor"),
    ("![a](plot.svg)", "plot.svg: no such file"),
    ("[![a](plot.svg)](other.md)", "plot.svg: no such file"),
    ("[a `b]`](<none.md>)", "none.md: no such file"),
    ('<img width="3" src="plot.svg">', "plot.svg: no such file"),
    ("[a]: none.md\n", "none.md: no such file"),
    ("[a](/other.md)", "/other.md: an absolute path"),
    ("[a](../../outside.md)", "../../outside.md: outside the repository"),
    ("[a](code.py#L3)", "code.py#L3: no such line"),
    ("[a](folder#first)", "folder#first: an anchor of a folder"),
]


@pytest.mark.parametrize(("text", "fault"), PLANTED, ids=[text for text, _ in PLANTED])
def test_a_planted_dead_link_is_found(tmp_path: Path, text: str, fault: str) -> None:
    page = repository(tmp_path) / "page.md"
    page.write_text(f"# Title\n\n{text}\n")
    assert list(dead_links(tmp_path, [page])) == [f"docs/page.md:3: {fault}"]


SOUND = """# `use = "none"`

[a](other.md#first), [b](#use--none), [c](#use--none-1), [d](other.md#an-id "title")
[a link of](other.md#third-link-and-snake_case) two words; [e](folder), [f](code.py#L1-L2)
<https://example.org> [g](https://example.org/none.md) [h](mailto:a@b.org)
`[code](none.md)`, ``[`code`](none.md)``

## use = "none"

```md
[code](none.md#nowhere)
# No heading
```
<!-- [left out](none.md) -->
"""


def test_sound_links_and_code_are_no_faults(tmp_path: Path) -> None:
    page = repository(tmp_path) / "page.md"
    page.write_text(SOUND)
    assert list(dead_links(tmp_path, [page])) == []
    assert anchors(SOUND) == {"use--none", "use--none-1"}


def repository(folder: Path) -> Path:
    """Write a small repository into ``folder`` and return its docs folder."""
    docs = folder / "docs"
    (docs / "folder").mkdir(parents=True)
    (docs / "code.py").write_text("a = 1\nb = 2")
    (docs / "other.md").write_text(
        '# First\n\n<a id="an-id"></a>\n\n## *Third* [link](code.py) and `snake_case`\n'
    )
    return docs


def test_every_page_is_in_the_navigation_once() -> None:
    named = list(pages_of(navigation()))
    assert len(named) == len(set(named))
    for name in named:
        place = ROOT / name.removeprefix(REPOSITORY) if name.startswith(REPOSITORY) else DOCS / name
        assert place.is_file(), f"docs/site/mkdocs.yml: {name}: no such page"
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert pages - set(named) == set(), "add these pages to docs/site/mkdocs.yml"


def test_a_folder_in_the_navigation_stands_for_its_pages(tmp_path: Path) -> None:
    guide = tmp_path / "guide"
    (guide / "more").mkdir(parents=True)
    for name in ("alpha", "beta", "gamma", "more/delta"):
        (guide / f"{name}.md").write_text(f"# {name}\n")
    plain = ["guide/alpha.md", "guide/beta.md", "guide/gamma.md", "guide/more/delta.md"]
    assert folder_pages("guide", tmp_path) == plain
    (guide / "README.md").write_text("[first](gamma.md#x), [then](alpha.md), [no](../none.md)")
    entries = [{"Guide": ["guide/*"]}, {"Absent": ["none/*"]}, {"Beta": "guide/beta.md"}]
    pages = [f"guide/{name}.md" for name in ("README", "gamma", "alpha", "more/delta")]
    assert expanded(entries, tmp_path) == [{"Guide": pages}, {"Beta": "guide/beta.md"}]
