"""One row of an ablation in a process of its own, with a time limit; its record from the events."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from glowplug.entrypoints.bench.ablation.load import AblationLoad
from glowplug.entrypoints.bench.ablation.measure import START, failure_kind
from glowplug.entrypoints.bench.others.turns import MeasuredProgram

MODULE = "glowplug.entrypoints.bench.ablation.measure"
TIME_LIMIT = "time limit"  #: kind of the failure of a row that took too long
LOG_CHARACTERS = 1200  #: of the end of the log in the reason of a row that ended without one

Record = dict[str, Any]


def run_row(config: Mapping[str, Any], load: AblationLoad, limit: float) -> Record:
    """Measure one configuration on an engine in a process of its own, and return the results.

    ``failure`` is None, or has the phase, kind and reason of a failure; results of earlier phases
    are there all the same.

    Args:
        config: the engine's configuration, as keywords of ``LLM``.
        load: the requests.
        limit: seconds after which the process is ended.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="glowplug-ablate-") as name:
        folder = Path(name)
        job, events = folder / "job.json", folder / "events"
        job.write_text(json.dumps({"config": dict(config), "load": asdict(load)}))
        command = [sys.executable, "-m", MODULE, str(job), str(events)]
        with MeasuredProgram("the row", command, folder / "log", {}) as program:
            status = program.wait(limit)
            log = program.log_end()
        found = _events(events)
    seconds = time.monotonic() - started
    record: Record = {
        "single": None,
        "offline": [],
        "memory": None,
        "seconds": round(seconds, 2),
        "load_average": os.getloadavg()[0],
    }
    for event in found:
        _add(record, event)
    record["failure"] = _failure(found, status, log, limit)
    return record


def _events(path: Path) -> list[Record]:
    """Return the complete lines of the file of events."""
    if not path.exists():
        return []
    return [orjson.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def _add(record: Record, event: Record) -> None:
    """Add an event's results to the row's record."""
    values = {key: value for key, value in event.items() if key != "event"}
    kind = event["event"]
    if kind == "ready":
        record |= values
    elif kind in ("single", "memory"):
        record[kind] = values
    elif kind == "level":
        record["offline"].append(values)


def _failure(
    events: Sequence[Record], status: int | None, log: str, limit: float
) -> dict[str, str] | None:
    """Return phase, kind and reason of a row's failure; None if all phases ended.

    Args:
        events: the row's events.
        status: exit status of the process; None if it was ended after ``limit`` seconds.
        log: end of its log.
        limit: seconds that it had.
    """
    said = {event["event"]: event for event in events}
    if "done" in said and not status:
        return None
    phase = said.get("phase", {}).get("phase", START)
    if status is None:
        return {"phase": phase, "kind": TIME_LIMIT, "reason": f"did not end in {limit:g} s"}
    if "failed" in said:
        failed = said["failed"]
        return {"phase": phase, "kind": failed["kind"], "reason": failed["reason"]}
    how = f"killed by {_signal_name(-status)}" if status < 0 else f"ended with status {status}"
    end = log[-LOG_CHARACTERS:].strip()
    reason = f"{how}; end of its log:\n{end}" if end else how
    return {"phase": phase, "kind": failure_kind(log), "reason": reason}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
