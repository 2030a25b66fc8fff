"""Every life-cycle hook of a plugin is called once and in its phase, with every executor."""

from __future__ import annotations

import gc
import importlib
import logging
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from glowplug import LLM, SamplingParams
from glowplug.core.errors import EngineDead, PluginLoadError
from glowplug.core.startup.memory_gauge import HostGauge
from tests.support.tiny import write_config

PLUGIN = """
from pathlib import Path
from glowplug.core.plugin.hookspecs import hookimpl

LOG = Path(__file__).with_name("calls.txt")

def note(text):
    with LOG.open("a") as log:
        log.write(text + "\\n")

class Observer:
    def step(self, batch, output):
        note(f"step of {batch.num_rows}")

@hookimpl
def contribute_defaults(facts):
    note("contribute_defaults")
    return {"seed": 41}

@hookimpl
def check_plan(context):
    note("check_plan")
    return []

@hookimpl
def plan_ready(plan):
    note(f"plan_ready {plan.seed}")

@hookimpl
def step_observers(worker, plan):
    note(f"step_observers {worker.rank}")
    return [Observer()]

@hookimpl
def worker_started(worker, plan):
    note(f"worker_started {worker.device}")

@hookimpl
def worker_stopping(worker):
    note(f"worker_stopping {worker.rank}")
"""


@pytest.mark.parametrize("executor", ["inline", "multiprocess"])
def test_every_hook_fires_once_in_its_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    name = f"life_cycle_{executor}"
    (tmp_path / f"{name}.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    folder = write_config(tmp_path / "model", "v3")
    with LLM(
        model=str(folder),
        plugins=[name],
        weights={"use": "random"},
        skip_tokenizer=True,
        context_length=64,
        memory={"kv_tokens": 256},
        executor={"use": executor},
    ) as llm:
        assert llm.plan.seed == 41
        done = llm.generate(
            [[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        )
        assert len(done[0].token_ids) == 6
    calls = (tmp_path / "calls.txt").read_text().splitlines()
    steps = [call for call in calls if call == "step of 1"]
    others = [call for call in calls if not call.startswith("step of")]
    assert others == [
        "contribute_defaults",
        "check_plan",
        "plan_ready 41",
        "step_observers 0",
        "worker_started cpu",
        "worker_stopping 0",
    ]
    assert len(steps) >= 6 and calls[-1] == "worker_stopping 0"


def test_a_hook_that_fails_in_a_rank_names_its_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "life_fails.py").write_text(
        "from glowplug.core.plugin.hookspecs import hookimpl\n\n@hookimpl\n"
        "def worker_started(worker):\n    1 / 0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    folder = write_config(tmp_path / "model", "llama")
    with pytest.raises(
        (PluginLoadError, EngineDead), match="life_fails.*worker_started failed: ZeroDivisionError"
    ):
        LLM(
            model=str(folder),
            plugins=["life_fails"],
            weights={"use": "random"},
            skip_tokenizer=True,
            context_length=64,
            memory={"kv_tokens": 256},
        )


class Device(HostGauge):
    """A device that records how much of ``watched`` is left when memory is given back, and may have
    failed.
    """

    measures = True

    def __init__(self, watched: weakref.ref[object], fails: bool) -> None:
        self.watched, self.fails = watched, fails
        self.left: list[object] = [self]

    def settle(self) -> None:
        self.left = [self.watched()]
        if self.fails:
            raise RuntimeError("an illegal memory access was encountered")


@pytest.fixture
def no_collector() -> Iterator[None]:
    """The automatic garbage collector is off; explicit calls still collect."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_that_ends_leaves_nothing_on_its_device(
    fails: bool,
    tmp_path: Path,
    no_collector: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The next engine in this process has the memory, although the parts of the first refer to one
    another.
    """
    llm = LLM(
        model=str(write_config(tmp_path, "v3")),
        weights={"use": "random"},
        skip_tokenizer=True,
        context_length=64,
        memory={"kv_tokens": 256},
    )
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2, ignore_eos=True))
    device = Device(weakref.ref(llm._executor._engine.runner.model), fails)  # type: ignore[attr-defined]
    monkeypatch.setattr("glowplug.core.startup.memory_gauge.gauge_of", lambda name: device)
    with caplog.at_level(logging.WARNING, "glowplug"):
        llm.close()
    assert device.left == [None]
    assert ("illegal memory access" in caplog.text) == fails
    llm.close()
