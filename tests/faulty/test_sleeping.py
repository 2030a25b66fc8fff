"""Plugins that sleep: start and engine end after a limit that an option sets, and the message names
component, distribution, version, phase and fix.

A call in the caller's own thread cannot be ended, so the inline executor has no limit but that on
loading, which ``test_faulty_at_start.py`` tests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from glowplug import LLM, SamplingParams
from glowplug.core.errors import EngineDead
from glowplug.core.step.messages import RunningCall
from glowplug.plugins.executors import multiprocess_runtime
from glowplug.plugins.executors.ranks import start_watch
from tests.faulty.test_faulty_at_start import LEAVE_OUT, config, names_it, replace_fix, site as site
from tests.faulty.written import PLUGIN, title, write

START_SECONDS = 300.0  #: limit of a start
SLEEP = "time.sleep(600.0)"
#: fault -> (slot, what differs from a correct plugin, phase, method)
IN_A_START: dict[str, tuple[str, dict[str, str], str, str]] = {
    "a policy's constructor": (
        "policy",
        {"body": f"    def __init__(self, *given):\n        {SLEEP}"},
        "build",
        "__init__",
    ),
    "a weight source": (
        "weights",
        {"body": f"    def read(self, target):\n        {SLEEP}"},
        "weights",
        "read",
    ),
    "attention in the first step": (
        "attention",
        {"body": f"    def plan_step(self, batch, graph):\n        {SLEEP}"},
        "self-test",
        "plan_step",
    ),
}


def ranks(site: Path, slot: str, **executor: Any) -> dict[str, Any]:
    """Return the configuration of an engine whose rank, in a process, uses the component."""
    chosen = {"use": "multiprocess", "threads": 1, **executor}
    return {**config(site, slot), "executor": chosen}


def end_in(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Set the clock of starts forward once a rank is in ``call``, so that the limit has passed.

    How fast a rank comes there does not matter then.
    """

    class Watch(start_watch.StartWatch):
        def look(
            self, progress: Mapping[int, str], calls: Mapping[int, RunningCall] | None = None
        ) -> str | None:
            if call in map(str, (calls or {}).values()):
                self._clock = lambda: time.monotonic() + 2 * START_SECONDS
            return super().look(progress, calls)

    monkeypatch.setattr(multiprocess_runtime, "StartWatch", Watch)


@pytest.mark.parametrize("fault", IN_A_START)
def test_a_component_that_sleeps_in_the_start_is_named(
    site: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot, differs, phase, method = IN_A_START[fault]
    write(site, slot, **differs)
    call = f"{method} of {title(slot)}"
    end_in(monkeypatch, call)
    with pytest.raises(EngineDead) as caught:
        LLM(**ranks(site, slot, start_timeout=START_SECONDS)).close()
    names_it(
        str(caught.value),
        call,
        f"rank 0 was not ready after {START_SECONDS:.0f} s (phase {phase}",
        f"{replace_fix(slot)}, or wait longer (executor.start_timeout)",
    )


def test_a_hook_that_sleeps_in_a_rank_is_named(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plugin has a component, but not one of the plan."""
    call = f"worker_started of {PLUGIN}"
    end_in(monkeypatch, call)
    hook = f"@hookimpl\ndef worker_started(worker, plan):\n    import time\n    {SLEEP}"
    write(site, "policy", more=hook)
    chosen = {**ranks(site, "policy", start_timeout=START_SECONDS), "policy": {"use": "fcfs"}}
    with pytest.raises(EngineDead) as caught:
        LLM(**chosen).close()
    names_it(
        str(caught.value),
        call,
        f"was not ready after {START_SECONDS:.0f} s (phase build",
        f"{LEAVE_OUT}, or wait longer (executor.start_timeout)",
    )


def test_a_component_that_stops_all_progress_is_named(
    site: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a limit on the whole start, the limit is that of collectives; the log names the
    component before.
    """
    monkeypatch.setattr(start_watch, "LOG_SECONDS", 1.0)
    caplog.set_level(logging.INFO, "glowplug.engine")
    write(site, "weights", body=f"    def read(self, target):\n        {SLEEP}")
    with pytest.raises(EngineDead) as caught:
        LLM(**ranks(site, "weights"), collectives={"use": "local", "timeout": 4.0}).close()
    call = f"in read of {title('weights')}"
    names_it(
        str(caught.value),
        call,
        "no rank has made progress for 4 s; rank 0 is in phase weights",
        f"{replace_fix('weights')}, or wait longer (collectives.timeout, --dist-timeout)",
    )
    assert any(
        "starting: rank 0 weights" in line and f"rank 0 is {call}" in line
        for line in (record.getMessage() for record in caplog.records)
    )


@pytest.mark.parametrize(
    ("slot", "method", "body"),
    [
        ("policy", "order", f"    def order(self, waiting, cached):\n        {SLEEP}"),
        (
            "sampling",
            "join",
            f"    def join(self, row, params, *rest):\n        {SLEEP}",
        ),
    ],
)
def test_a_component_that_sleeps_in_a_step_is_named(
    site: Path, slot: str, method: str, body: str
) -> None:
    write(site, slot, body)
    llm = LLM(**ranks(site, slot, watchdog=5.0))
    with pytest.raises(EngineDead) as caught:
        llm.generate([[5, 9, 17]], SamplingParams(max_tokens=4))
    llm.close()
    names_it(
        str(caught.value),
        f"it waits for {method} of {title(slot)} to return",
        "phase serve: its loop has stood still for",
        f"{replace_fix(slot)}, or allow longer steps (executor.watchdog)",
    )
