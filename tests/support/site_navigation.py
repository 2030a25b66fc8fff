"""Navigation of the docs site, with the pages of each folder in place of its ``*``."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.markdown import links

#: folder of the site whose pages stand for files outside docs/
REPOSITORY = "repository/"


def expanded(entries: list[Any], docs: Path) -> list[Any]:
    """Return the entries of a navigation with each ``folder/*`` replaced by the folder's pages.

    Pages that other entries name are left out there, and sections without pages altogether.

    Args:
        entries: pages, {title: page} and {title: entries}, as in mkdocs.yml.
        docs: the folder to which pages are relative.
    """
    return _expanded(entries, docs, frozenset(pages_of(entries)))


def _expanded(entries: list[Any], docs: Path, named: frozenset[str]) -> list[Any]:
    found: list[Any] = []
    for entry in entries:
        if isinstance(entry, str) and entry.endswith("/*"):
            pages = folder_pages(entry.removesuffix("/*"), docs)
            found += [page for page in pages if page not in named]
        elif isinstance(entry, dict) and isinstance(inner := next(iter(entry.values())), list):
            section = _expanded(inner, docs, named)
            found += [{next(iter(entry)): section}] if section else []
        else:
            found.append(entry)
    return found


def folder_pages(folder: str, docs: Path) -> list[str]:
    """Return the pages of a folder: README.md, then those that it links, then the others by name.

    The pages of a folder in it follow the folder's own.
    """
    names = {path.relative_to(docs).as_posix() for path in (docs / folder).rglob("*.md")}
    index = f"{folder}/README.md"
    order = [index]
    if index in names:
        text = (docs / index).read_text(encoding="utf-8")
        order += [posixpath.normpath(f"{folder}/{link.path}") for link in links(text)]
    order += sorted(names, key=lambda name: (name.count("/"), name))
    return [name for name in dict.fromkeys(order) if name in names]


def pages_of(entries: list[Any]) -> Iterator[str]:
    """Yield the pages of a navigation, in order."""
    for entry in entries:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        if isinstance(value, list):
            yield from pages_of(value)
        else:
            yield value
