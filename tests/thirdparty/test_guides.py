"""The guide pages: their examples are what ``glowplug new-plugin`` writes, and their messages are
real.

``test_new_plugin`` installs the examples, runs their suites and serves with them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from glowplug.core.plugin.slots import BY_NAME
from glowplug.entrypoints.cli.plugin_template import files_of
from tests.support.guide_pages import FOLDER, Mistake, edited, message_of, read, shown

slots = pytest.mark.parametrize("slot", sorted(BY_NAME))
MISTAKES = [
    pytest.param(slot, one, id=f"{slot}-{number}-{one.phase}")
    for slot in sorted(BY_NAME)
    for number, one in enumerate(read(slot).mistakes)
]
SECTIONS = ["When it is built and called", "Members", "Example", "Its suite", "Common errors"]


def test_every_slot_has_a_guide_that_the_index_names() -> None:
    index = (FOLDER / "README.md").read_text()
    pages = {page.stem for page in FOLDER.glob("*.md")} - {"README"}
    assert pages == set(BY_NAME) == set(re.findall(r"^\| \[(\w+)\]\(\1\.md\)", index, re.MULTILINE))


@slots
def test_a_guide_has_all_sections(slot: str) -> None:
    text = (FOLDER / f"{slot}.md").read_text()
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == SECTIONS
    kinds = re.findall(r"^<!-- (\w+)", text, re.MULTILINE)
    assert kinds == ["slot", "end", "members", "end", "example", "end", "suite", "end"]
    assert text.count("```text") == len(read(slot).mistakes) >= 3


@slots
def test_a_guide_shows_what_new_plugin_writes(slot: str) -> None:
    guide = read(slot)
    written = files_of(BY_NAME[slot], guide.name)
    assert len(guide.files) == 3
    for path, text in guide.files.items():
        assert text == written[path], path


@pytest.mark.parametrize(("slot", "mistake"), MISTAKES)
def test_a_mistake_leads_to_the_message_shown(slot: str, mistake: Mistake, tmp_path: Path) -> None:
    """``python -m tests.support.guide_pages SLOT`` writes the messages of a page anew."""
    message = shown(message_of(read(slot), mistake, tmp_path), tmp_path)
    assert message.strip(), "the mistake goes unnoticed"
    assert words(message) == words(mistake.message)


def words(message: str) -> list[str]:
    """Return the words of a message without measured seconds."""
    return re.sub(r"\d+\.\d s\b", "N s", message).split()


def test_a_change_is_made_in_one_place() -> None:
    files = {"a.py": "\nx = 1\ny = 2\n", "b.py": "\nz = 3\n"}
    assert edited(files, " x = 1\n-y = 2\n+y = 4") == {**files, "a.py": "\nx = 1\ny = 4\n"}
    assert edited(files, "-z = 3") == {**files, "b.py": "\n"}
