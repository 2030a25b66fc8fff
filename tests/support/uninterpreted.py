"""Python in a process of its own, in which Triton compiles and does not interpret."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.source_tree import ROOT


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run ``python words`` in the repository's root with its packages, and keep standard output and
    error.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=False,
        env=environment | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
    )


def printed(*words: str) -> str:
    """Return the output of ``python words``, which has to succeed."""
    done = run(*words)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
