"""Ruff over everything and mypy in strict mode over all but the kernels, so that `make test` is the
whole check.
"""

from __future__ import annotations

import subprocess
import sys

from tests.support.source_tree import ROOT


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr if done.returncode else ""


def test_ruff() -> None:
    assert run("ruff", "check", "--output-format=concise", ".") == ""


def test_mypy_strict() -> None:
    assert run("mypy") == ""
