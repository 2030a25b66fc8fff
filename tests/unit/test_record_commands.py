"""Programs that the records name exist, or docs/benchmarks/README.md says what replaced them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.source_tree import ROOT

RECORDS = ROOT / "docs" / "benchmarks"
MODULE = re.compile(r"python3? -m (tests\.[\w.]+\w)")


def exists(module: str) -> bool:
    return (ROOT / f"{module.replace('.', '/')}.py").is_file()


def moved() -> dict[str, str]:
    """Return the modules that took the place of others, by the name in the records."""
    page = (RECORDS / "README.md").read_text()
    return dict(re.findall(r"^\| `(tests\.[\w.]+)` \| `(tests\.[\w.]+)` \|$", page, re.MULTILINE))


@pytest.mark.parametrize(
    "path", sorted(RECORDS.glob("*.json")), ids=lambda path: getattr(path, "stem", "")
)
def test_a_records_program_exists_or_the_page_names_its_place(path: Path) -> None:
    named = set(MODULE.findall(path.read_text()))
    assert sorted(one for one in named if not exists(moved().get(one, one))) == []


def test_only_modules_that_are_gone_are_said_to_have_moved() -> None:
    named = {one for path in RECORDS.glob("*.json") for one in MODULE.findall(path.read_text())}
    assert moved() and moved().keys() == {one for one in named if not exists(one)}
    assert all(exists(one) for one in moved().values())
