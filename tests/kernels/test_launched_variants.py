"""No request waits for a compiler: what serving launches, warm-up and captures have launched before."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]


def test_warm_up_reaches_every_variant() -> None:
    """In a process of its own, where Triton does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-m", "tests.kernels.launched_variants"], cwd=ROOT, text=True,
                          env=environment | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"tokens": {}, "rows": {}}
