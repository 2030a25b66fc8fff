"""One row of an ablation, measured in this process: ``python -m ...measure JOB EVENTS``.

JOB is a JSON file with the engine's configuration and the load. Each result is appended to EVENTS
as soon as it is there, so that a crash or a time limit leaves the earlier ones.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glowplug.core.errors import PlanRefused
from glowplug.entrypoints.bench.ablation.load import AblationLoad, measure_level, measure_single
from glowplug.entrypoints.bench.others import report
from glowplug.entrypoints.bench.others.process_memory import ProcessMemory

if TYPE_CHECKING:
    from glowplug.core.plan.plan import EnginePlan
    from glowplug.entrypoints.front.llm import LLM

START, SINGLE = "start", "single query"  #: phases of a row; the others are the levels
OUT_OF_MEMORY = "out of memory"
CACHE_LINE = "kv cache"  #: line of the memory budget


def level_phase(concurrency: int) -> str:
    """Return the name of the phase that measures one concurrency."""
    return f"concurrency {concurrency}"


def failure_kind(text: str) -> str:
    """Return "out of memory" if an error's text or log says so, else "failed"."""
    return OUT_OF_MEMORY if "out of memory" in text.lower() else "failed"


def main(words: list[str]) -> int:
    """Measure one row; return 0, or 1 if the engine failed (the last event has the reason)."""
    job, events = (Path(word) for word in words)
    given = json.loads(job.read_text(encoding="utf-8"))
    return AblationRun(events, AblationLoad(**_tuples(given["load"]))).run(given["config"])


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with tuples in place of JSON's lists."""
    return {key: tuple(one) if isinstance(one, list) else one for key, one in values.items()}


class AblationRun:
    """The measurement of one row.

    Args:
        events: file for the results.
        load: the requests.
    """

    def __init__(self, events: Path, load: AblationLoad) -> None:
        self._events = events
        self._load = load
        self._phase = START

    def run(self, config: Mapping[str, Any]) -> int:
        """Start an engine and measure every phase; return the exit status."""
        try:
            self._measure(config)
        except PlanRefused as refused:
            self._say("failed", phase=self._phase, kind="refused", reason=str(refused))
            return 1
        except Exception as error:  # any failure is the row's result
            text = f"{type(error).__name__}: {error}"
            self._say("failed", phase=self._phase, kind=failure_kind(text), reason=text)
            return 1
        return 0

    def _measure(self, config: Mapping[str, Any]) -> None:
        """Measure every phase.

        Raises:
            Exception: the engine failed in ``self._phase``.
        """
        from glowplug.entrypoints.front.llm import LLM

        self._begin(START)
        started = time.perf_counter()
        with LLM(**config) as llm:
            self._say("ready", **_start_figures(llm, time.perf_counter() - started))
            self._begin(SINGLE)
            if self._load.queries:
                self._say("single", **measure_single(llm, self._load))
            for concurrency, count in zip(self._load.levels, self._load.prompts, strict=True):
                self._begin(level_phase(concurrency))
                self._say("level", **measure_level(llm, self._load, concurrency, count))
            self._say("memory", **_memory(llm))
        self._say("done")

    def _begin(self, phase: str) -> None:
        self._phase = phase
        self._say("phase", phase=phase)

    def _say(self, event: str, **values: Any) -> None:
        report.append_line(self._events, {"event": event, **values})


def _start_figures(llm: LLM, seconds: float) -> dict[str, Any]:
    """Return the figures of a start: plan, duration, phases."""
    info = llm.control("info")
    return {
        "fingerprint": llm.plan.fingerprint,
        "start_seconds": seconds,
        "startup_seconds": info.get("startup_seconds"),
        "kv_tokens": info.get("max_total_num_tokens"),
        "chosen": {choice.slot: choice.name for choice in llm.plan.choices},
        "dtype": llm.plan.dtype,
    }


def _memory(llm: LLM) -> dict[str, Any]:
    """Return the memory of the first rank in bytes, and that of all processes on the device.

    ``engine`` are all lines of the budget without the KV cache, as measured, or as planned where
    there is no measurement.
    """
    lines = llm.control("info").get("memory") or {}
    device = ProcessMemory().bytes() if llm.plan.device == "cuda" else None
    return {
        "lines": lines,
        "engine": sum(_bytes_of(one) for name, one in lines.items() if name != CACHE_LINE),
        "kv_cache": _planned(llm.plan, CACHE_LINE),
        "device_processes": device,
        **{f"rank_{name}": value for name, value in llm.control("memory").items()},
    }


def _bytes_of(line: Mapping[str, Any]) -> int:
    measured = line.get("measured")
    return int(measured if measured is not None else line.get("planned") or 0)


def _planned(plan: EnginePlan, name: str) -> int:
    return sum(line.bytes for line in plan.budget if line.name == name)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
