"""A rank that dies, hangs or cannot load: the engine ends quickly with the reason and leaves
nothing behind.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from glowplug import LLM, SamplingParams
from glowplug.core.errors import EngineDead, GlowplugError
from tests.support.tiny import write_config
from tests.support.waiting import until

LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


def engine(folder: Path, **config: Any) -> LLM:
    base: dict[str, Any] = {
        "weights": {"use": "random"},
        "skip_tokenizer": True,
        "device": "cpu",
        "executor": {"use": "multiprocess"},
    }
    return LLM(model=str(folder), **{**base, **config})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("faults"), "v3")


def gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().split(")")[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_killed_in_mid_decode(folder: Path, number: int) -> None:
    llm = engine(folder)
    (pid,) = llm._executor.pids  # type: ignore[attr-defined]
    threading.Timer(0.3, os.kill, (pid, number)).start()
    with pytest.raises(EngineDead, match=r"rank 0 ended \(exit code -\d+\) in phase serve"):
        while True:
            llm.generate([[5, 6, 7]] * 4, LONG)
    assert gone(pid), "nothing is left to wait for when the engine is closed"
    llm.close()
    with pytest.raises(EngineDead):
        llm.generate([[5]], LONG)


def test_stopped_rank_is_found_silent(folder: Path) -> None:
    llm = engine(folder, executor={"use": "multiprocess", "watchdog": 6.0})
    (pid,) = llm._executor.pids  # type: ignore[attr-defined]
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(EngineDead, match="rank 0 has been silent for"):
        llm.generate([[5, 6, 7]], LONG)
    llm.close()
    assert gone(pid)


def test_a_rank_that_cannot_load_reports_the_reason(folder: Path, tmp_path: Path) -> None:
    empty = write_config(tmp_path / "empty", "v3")
    with pytest.raises(GlowplugError) as caught:
        engine(empty, weights={"use": "safetensors"})
    assert "safetensors" in str(caught.value)


def test_closing_ends_the_process(folder: Path) -> None:
    llm = engine(folder)
    (pid,) = llm._executor.pids  # type: ignore[attr-defined]
    assert llm.generate([[5, 6]], SamplingParams(max_tokens=2))[0].finish_reason in (
        "length",
        "stop",
    )
    llm.close()
    llm.close()
    assert gone(pid)


def test_parent_death_ends_the_rank(folder: Path) -> None:
    import subprocess
    import sys

    code = (
        f"import sys; from glowplug import LLM\n"
        f"if __name__ == '__main__':\n"
        f"    llm = LLM(model={str(folder)!r}, weights={{'use': 'random'}}, skip_tokenizer=True,"
        f" executor={{'use': 'multiprocess'}})\n"
        f"    print(llm._executor.pids[0], flush=True)\n"
        f"    import time; time.sleep(600)\n"
    )
    script = folder / "parent.py"
    script.write_text(code)
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(["src", *sys.path])},
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    until(lambda: gone(pid), "the rank has gone")
