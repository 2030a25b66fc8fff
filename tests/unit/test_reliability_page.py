"""The table of faults in ``docs/reliability.md`` agrees with the tests."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from tests.support.fault_table import Fault, faults, injecting
from tests.support.source_tree import ROOT, tree

MARKS = ("slow", "gpu")


def function(file: str, name: str) -> ast.FunctionDef | None:
    path = ROOT / file
    if not path.exists():
        return None
    nodes = [one for one in ast.walk(tree(path)) if isinstance(one, ast.FunctionDef)]
    return next((one for one in nodes if one.name == name), None)


def marks(file: str, name: str) -> set[str]:
    """Return which of ``MARKS`` the test has, by decorators of its own or marks of its file."""
    found = function(file, name)
    assert found is not None
    texts = [ast.unparse(one) for one in found.decorator_list]
    texts += [
        ast.unparse(one.value)
        for one in tree(ROOT / file).body
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "pytestmark"
    ]
    # a mark of some of the parameters leaves the others to the usual run
    texts = [text for text in texts if not text.startswith("pytest.mark.parametrize")]
    return {mark for mark in MARKS if any(f"pytest.mark.{mark}" in text for text in texts)}


def test_the_page_has_rows() -> None:
    assert len(faults()) > 60
    assert len({fault.name for fault in faults()}) > 60


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: fault.name[:60])
def test_a_fault_has_a_promise_and_tests_that_run_where_it_says(fault: Fault) -> None:
    assert fault.promise and fault.tests
    for file, name in fault.tests:
        assert function(file, name) is not None, f"{file}::{name} does not exist"
        where = fault.runs.partition(";")[0]
        assert marks(file, name) == ({where} - {"cpu"}), f"{file}::{name} runs elsewhere"
    assert not fault.runs.startswith("gpu") or "; on CPUs" in fault.runs


def test_every_test_of_faults_is_on_the_page() -> None:
    written = {
        (path.relative_to(ROOT).as_posix(), node.name)
        for path in (ROOT / "tests" / "faults").glob("test_*.py")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    assert len(written) > 8
    assert written - injecting() == set()


def test_the_marker_selects_them() -> None:
    """Tests of suites in core are selected where they are inherited."""
    files = ("tests/contract/test_scheduler.py", "tests/e2e/test_disconnect.py")
    command = [sys.executable, "-m", "pytest", "--collect-only", "-m", "fault", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = set(re.findall(r"::(test_\w+)", done.stdout))
    assert {"test_abort_at_any_moment", "test_leaving_while_queued"} <= found
    assert found <= {name for _, name in injecting()}
