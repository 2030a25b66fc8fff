"""The record of a test run is correct when the run is killed, and names the tests that are left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.source_tree import ROOT

TESTS = """
import os, signal, time
from pathlib import Path
import pytest

@pytest.fixture
def broken():
    raise RuntimeError("no card")

@pytest.fixture
def leaving():
    yield
    assert False, "left dirt"

def test_a_passes(): pass

def test_b_fails(): assert 1 == 2, "one is not two"

def test_c_is_skipped(): pytest.skip("heads")

def test_d_does_not_begin(broken): pass

def test_e_ends_badly(leaving): pass

def test_f_kills():
    if not Path("mended").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.8)

@pytest.mark.parametrize("number", [1, 2])
def test_g_comes_late(number): pass
"""


def ran(folder: Path, *words: str) -> dict[str, Any]:
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "tests.gpu.record",
            "--record",
            "found.json",
            "-q",
            "-p",
            "no:cacheprovider",
            "test_some.py",
            *words,
        ],
        cwd=folder,
        capture_output=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        check=False,
    )
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


@pytest.mark.parametrize(
    "words", [(), ("-n", "1", "--max-worker-restart", "0")], ids=["alone", "shared out"]
)
def test_a_killed_run_leaves_a_record(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    found = ran(tmp_path, *words)
    assert found["collected"] == 8 and not found["complete"] and found["skipped"] == 1
    assert found["failures"]["test_some.py::test_b_fails"].startswith(
        "call: AssertionError: one is not two"
    )
    assert (
        found["failures"]["test_some.py::test_d_does_not_begin"] == "setup: RuntimeError: no card"
    )
    assert found["failures"]["test_some.py::test_e_ends_badly"].startswith(
        "teardown: AssertionError: left dirt"
    )
    late = [f"test_some.py::test_g_comes_late[{number}]" for number in (1, 2)]
    assert found["not_run"][-2:] == late
    assert found["passed"] + found["skipped"] + found["failed"] + len(found["not_run"]) == 8
    (tmp_path / "mended").touch()
    (tmp_path / "found.json").rename(tmp_path / "before.json")
    again = ran(tmp_path, *words, "--left-by", "before.json")
    assert (
        again["complete"]
        and again["passed"] == 3
        and again["failed"] == 3
        and again["collected"] == 6
    )
    assert "pytest -p tests.gpu.record" in again["command"] and again["seconds"] >= 0
    assert (
        next(iter(again["slowest"].items())) == ("test_some.py::test_f_kills", 1)
        and len(again["slowest"]) == 6
    )
