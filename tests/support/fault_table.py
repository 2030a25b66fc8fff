"""The table of faults in ``docs/reliability.md``: each fault with its promise and its tests."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from tests.support.source_tree import ROOT

PAGE = ROOT / "docs" / "reliability.md"
TEST = re.compile(r"`([\w/.]+\.py)::(test_\w+)`")


@dataclass(frozen=True)
class Fault:
    """One row of the table.

    Attributes:
        name: the fault.
        promise: the promised outcome.
        tests: (file, name of the function) of each test that injects the fault.
        runs: "cpu", "slow" or "gpu", the last with its replacement on CPUs.
    """

    name: str
    promise: str
    tests: tuple[tuple[str, str], ...]
    runs: str


@cache
def faults() -> tuple[Fault, ...]:
    """Return the rows of all tables of the page."""
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and cells[0] != "fault":
            tests = tuple((file, name) for file, name in TEST.findall(cells[2]))
            found.append(Fault(cells[0], cells[1], tests, cells[3].rstrip(" |")))
    return tuple(found)


@cache
def injecting() -> frozenset[tuple[str, str]]:
    """Return (file, name of the function) of all tests of the page."""
    return frozenset(test for fault in faults() for test in fault.tests)
