"""The table of former limits in ``docs/contracts.md``: each row has a test that runs."""

from __future__ import annotations

import ast
import re
from typing import NamedTuple

import pytest

from glowplug.core.plugin.slots import SLOTS
from tests.thirdparty.packages import FOLDER, ROOT

HEADING = "### Limits that are gone\n"
ROW = re.compile(r"\| (\w+) \| (.+) \| \[(\w+)\]\(\.\./tests/thirdparty/(\w+\.py)\) \|")
SURFACES = {"routes", "commands"}  #: parts of the server and the command line, which are no slots
#: slots of which hooks had limits
LIMITED = {"attention", "speculative", "model", "quantization", "policy", "cache", "outputs"}
#: marks of tests that the usual run leaves out
LEFT_OUT = ("gpu", "slow", "skip")


class Limit(NamedTuple):
    """A row of the table."""

    slot: str
    what: str
    test: str
    file: str


def section() -> list[str]:
    """Return the lines of the table, without its head."""
    text = (ROOT / "docs" / "contracts.md").read_text().partition(HEADING)[2]
    lines = [line for line in text.partition("\n#")[0].splitlines() if line.startswith("|")]
    return lines[2:]


LIMITS = [Limit(*row.groups()) for line in section() if (row := ROW.fullmatch(line))]


def test_every_row_can_be_read() -> None:
    assert len(LIMITS) == len(section()) > 20
    assert len({limit.what for limit in LIMITS}) == len(LIMITS)


def test_every_part_that_had_limits_has_rows() -> None:
    assert {slot.name for slot in SLOTS} >= LIMITED
    assert {limit.slot for limit in LIMITS} == LIMITED | SURFACES


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.what)
def test_a_limit_has_a_test_that_runs(limit: Limit) -> None:
    tree = ast.parse((FOLDER / limit.file).read_text())
    tests = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert limit.test in tests and limit.test.startswith("test_")
    marks = [ast.unparse(one) for one in tests[limit.test].decorator_list]
    marks += [
        ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    assert not [
        mark for mark in marks if mark.startswith(tuple(f"pytest.mark.{m}" for m in LEFT_OUT))
    ]


def test_every_file_of_limits_is_in_the_table() -> None:
    files = {path.name for path in FOLDER.glob("test_limits_*.py")}
    assert files and files <= {limit.file for limit in LIMITS}
