"""A script without a main guard that starts ranks in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.source_tree import ROOT

SCRIPT = """
from glowplug import LLM

{guard}
    with LLM("embedded", executor={{"use": "multiprocess"}}, parallel={parallel}) as llm:
        print("tokens", len(llm.generate([[5, 6, 7]])[0].token_ids))
"""
TWO = [{"use": "tensor", "size": 2}]


def run(folder: Path, guard: str, parallel: object) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT.format(guard=guard, parallel=parallel))
    return subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        check=False,
    )


@pytest.mark.parametrize("parallel", [TWO, []])
def test_a_script_without_a_main_guard_is_told_so(tmp_path: Path, parallel: object) -> None:
    done = run(tmp_path, "if True:", parallel)
    assert done.returncode == 1 and done.stdout == ""
    last = done.stderr.strip().splitlines()[-1]
    assert 'put the code of the script under if __name__ == "__main__":' in last
    assert "in phase spawn" in last and "bootstrapping" not in done.stderr


def test_a_guarded_script_runs(tmp_path: Path) -> None:
    done = run(tmp_path, 'if __name__ == "__main__":', TWO)
    assert done.returncode == 0 and done.stdout.startswith("tokens ")
