"""The reference pages have every type that an author of plugins meets, and each of its fields."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from types import FunctionType, ModuleType
from typing import Any

import pytest

from glowplug.core import api, protocols
from glowplug.core.layers import decoder, linear, mha, moe
from glowplug.core.plugin.slots import SLOTS
from glowplug.core.step.batch import Batch
from glowplug.core.step.messages import Stats
from glowplug.core.step.request import SamplingParams, Sequence
from glowplug.entrypoints.front.llm import LLM
from tests.support.source_tree import ROOT

DOCS = ROOT / "docs"
PAGES = sorted((DOCS / "reference").glob("*.md"))
TEXT = "\n".join(page.read_text() for page in PAGES)
HEADINGS = set(re.findall(r"^### `(\w+)`$", TEXT, re.MULTILINE))
PROTOCOLS = {slot.protocol for slot in SLOTS}


def helpers() -> ModuleType:
    """Return ``docs/docstrings.py``."""
    sys.path.insert(0, str(DOCS))
    try:
        import docstrings
    finally:
        sys.path.remove(str(DOCS))
    return docstrings


def section(name: str) -> str:
    """Return the section of a type."""
    return TEXT.partition(f"\n### `{name}`\n")[2].partition("\n### ")[0]


def test_every_public_name_has_a_section() -> None:
    """Constants and aliases are rows of a table; slots' protocols are in hooks.md."""
    for name in api.__all__:
        value = getattr(api, name)
        documented = name in HEADINGS or f"| `{name}` |" in TEXT
        assert documented, name
        assert isinstance(value, (type, FunctionType)) <= (name in HEADINGS), name
    kinds = {
        name
        for name, value in vars(protocols).items()
        if isinstance(value, type) and value.__module__.startswith(protocols.__name__)
    }
    assert len(kinds) > 40 and kinds - HEADINGS == PROTOCOLS


@pytest.mark.parametrize("thing", [Batch, Sequence, Stats, SamplingParams, protocols.Limits])
def test_every_field_has_its_row(thing: Any) -> None:
    annotations = [name for name in inspect.get_annotations(thing) if not name.startswith("_")]
    rows = re.findall(r"^\| `(\w+)` \|", section(thing.__name__), re.MULTILINE)
    assert rows == annotations and len(rows) > 5


def test_every_slot_has_its_offers_and_options() -> None:
    page = (DOCS / "reference" / "components.md").read_text()
    assert re.findall(r"^## Slot `(\w+)`$", page, re.MULTILINE) == [slot.name for slot in SLOTS]
    assert {slot.offers for slot in SLOTS} <= HEADINGS


def test_every_row_has_a_description() -> None:
    """A field without one gets it at its source: an Attributes section, or ``#:``."""
    bare = [
        f"{page.name}: {line}"
        for page in PAGES
        for line in page.read_text().splitlines()
        if re.search(r"^\| `.*\|  \|$", line)
    ]
    assert bare == []


@pytest.mark.parametrize("module", [decoder, linear, mha, moe])
def test_layers_have_their_constructors(module: ModuleType) -> None:
    found = [
        node
        for node in ast.parse(inspect.getsource(module)).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert found
    for node in found:
        assert node.name in HEADINGS
        own = [one for one in node.body if getattr(one, "name", "") == "__init__"]
        assert bool(own) <= (f"\n{node.name}(" in section(node.name)), node.name


def test_the_offline_api_has_every_public_member() -> None:
    text = section("LLM")
    for name, value in vars(LLM).items():
        if not name.startswith("_"):
            called = inspect.isfunction(value)
            assert (f"\n{name}(" if called else f"`LLM.{name}") in text, name


def test_a_docstring_is_read_in_parts() -> None:
    found = helpers().parse(
        """Do it.

        More of it.

        Args:
            one, two: numbers
                on two lines.
            **more: further ones.

        Returns:
            The sum.
        """
    )
    assert found.text == "Do it.\n\nMore of it."
    assert found.entries("Args") == {
        "one": "numbers on two lines.",
        "two": "numbers on two lines.",
        "more": "further ones.",
    }
    assert found.sections[1] == ("Returns", "The sum.")


def test_the_index_names_every_page() -> None:
    """``docs/README.md`` links each page, or the README of its folder does."""
    index = (DOCS / "README.md").read_text()
    linked = {(DOCS / target).resolve() for target in re.findall(r"\]\(([^)#:]+)\)", index)}
    pages = {page for page in DOCS.rglob("*.md") if page != DOCS / "README.md"}
    folders = {page.parent for page in pages if page.name == "README.md"}
    assert sorted(page for page in pages - linked if page.parent not in folders) == []
