"""Cost per step of the checks around components, and the number of hook calls while serving.

``python -m tests.hotpath.check_costs --output docs/benchmarks/check-costs-cpu.json`` serves a small
model in this process, in rounds of three kinds that take turns: with the watch for stalled requests
as shipped, and twice with its methods of each step bypassed. Their order rotates. Members and words
of components are checked while they are built, and a failure is attributed after an exception, so
this watch is all that runs in each step. A round decodes one request, one token per step, where
the host's work weighs most.

- "us": median microseconds of a step of each kind, by wall clock and of the engine's thread.
- "ratio": quartiles of checked over bypassed, turn by turn.
- "noise": quartiles of the ratio of the two bypassed rounds.
- "calls": microseconds of the watch's own calls in a step, measured alone.
- "hook_calls": calls of pluggy's hooks during all rounds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pluggy
import torch

import glowplug
from glowplug import LLM, SamplingParams
from glowplug.core.engine.stalls import StallWatch
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.step.messages import StepOutput
from tests.support.tiny import write_config

STEPS = 400  #: tokens of a round, and of its steps
TURNS = 30
KINDS = ("checked", "bypassed", "bypassed again")
CALLS = 20000
PROMPT = [5, 6, 7]


@contextmanager
def bypassed() -> Iterator[None]:
    """Replace the checks of each step by methods that do nothing."""

    def nothing(self: object, *given: Any) -> None:
        return None

    with (
        mock.patch.object(StallWatch, "moved", nothing),
        mock.patch.object(StallWatch, "still", nothing),
        mock.patch.object(StallWatch, "stepped", nothing),
    ):
        yield


def seconds_of_threads() -> dict[int, float]:
    """Return the processor seconds of each Python thread so far, by identifier."""
    return {
        thread.ident: time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.ident is not None
    }


def one_round(llm: LLM, checked: bool) -> tuple[float, float]:
    """Serve one request; return microseconds of a step, wall and of the engine's thread.

    The engine's thread is the one that took most processor time.
    """
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    with bypassed() if not checked else mock.MagicMock():
        before, began = seconds_of_threads(), time.perf_counter()
        (answer,) = llm.generate([PROMPT], params)
        wall, after = time.perf_counter() - began, seconds_of_threads()
    assert len(answer.token_ids) == STEPS
    spent = max(after[ident] - before.get(ident, 0.0) for ident in after)
    return 1e6 * wall / STEPS, 1e6 * spent / STEPS


def turns(llm: LLM) -> dict[str, Any]:
    """Return the medians of all kinds of rounds, and the quartiles of their ratios."""
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for number in range(TURNS):
        for place in range(len(KINDS)):
            kind = KINDS[(number + place) % len(KINDS)]
            found[kind].append(one_round(llm, kind == "checked"))
    report: dict[str, Any] = {}
    for place, clock in enumerate(("wall", "thread")):
        times = {kind: [both[place] for both in found[kind]] for kind in KINDS}
        report[clock] = {
            "us": {kind: round(median(times[kind]), 2) for kind in KINDS},
            "ratio": ratios(times["checked"], times["bypassed"]),
            "noise": ratios(times["bypassed again"], times["bypassed"]),
        }
    return report


def ratios(own: list[float], other: list[float]) -> list[float]:
    """Return the quartiles of the ratios of two lists, element by element."""
    return [round(one, 4) for one in quantiles([a / b for a, b in zip(own, other)])]


def calls() -> float:
    """Return the microseconds of the watch's calls in one step of 64 rows, measured alone."""
    rows = np.arange(64)
    batch: Any = SimpleNamespace(samples=np.ones(64, bool), rows=rows, epochs=rows)
    result: Any = SimpleNamespace(counts=np.ones(64, np.int32), bad=np.zeros(64, bool))
    plan: Any = None
    watch = StallWatch(plan, plan, plan)
    output = StepOutput(ids=list(range(64)), tokens=[0] * 64)
    began = time.perf_counter()
    for _ in range(CALLS):
        watch.moved()
        watch.stepped(batch, result, output)
    return 1e6 * (time.perf_counter() - began) / CALLS


def measured() -> dict[str, Any]:
    """Return all results."""
    hooks: list[str] = []
    original, original_each = pluggy.HookCaller.__call__, PluginSet.call_each

    def counting(self: pluggy.HookCaller, **given: Any) -> Any:
        hooks.append(self.name)
        return original(self, **given)

    def counting_each(self: PluginSet, hook: str, **given: Any) -> Any:
        hooks.append(hook)
        return original_each(self, hook, **given)

    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            model=str(write_config(Path(folder), "v3")),
            weights={"use": "random"},
            executor={"use": "inline"},
            skip_tokenizer=True,
            device="cpu",
            context_length=STEPS + 64,
            memory={"kv_tokens": 2 * STEPS},
        )
        with (
            llm,
            mock.patch.object(pluggy.HookCaller, "__call__", counting),
            mock.patch.object(PluginSet, "call_each", counting_each),
        ):
            one_round(llm, True)
            found = {"seconds": turns(llm), "hook_calls": len(hooks)}
    return {**found, "calls_us": round(calls(), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout
    load = [round(one, 2) for one in os.getloadavg()]
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "glowplug": glowplug.__version__,
    }
    about = {
        "command": "python -m tests.hotpath.check_costs " + " ".join(sys.argv[1:]),
        "date": datetime.date.today().isoformat(),
        "commit": commit.strip(),
        "versions": versions,
        "host": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "threads": torch.get_num_threads(),
        "load_before": load,
        "what": " ".join((__doc__ or "").split()),
        "steps": STEPS,
        "turns": TURNS,
    }
    output.write_text(json.dumps({**about, **measured()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
