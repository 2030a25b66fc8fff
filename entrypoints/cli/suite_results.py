"""Results of the conformance suites of installed components. Imports no torch.

Each suite runs in a process of its own, so that a component which hangs, crashes or changes
global state affects no other one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from glowplug.core.errors import GlowplugError

SUITE_SECONDS = 120.0  #: default time limit of the suite of one component
RUNNER = "glowplug.core.testing.run_suite"
#: the runner with this process's module path, so that it finds the same plugins
PROGRAM = f"""
import runpy, sys
sys.path[:] = {{path!r}}
runpy.run_module({RUNNER!r}, run_name="__main__")
"""
NO_SUITE = {"result": "no suite", "failures": []}


def add_results(entries: list[dict[str, Any]], seconds: float) -> None:
    """Run the suite of each component, and add its result to the component as ``suite``.

    The result is "passed", "failed n of m", "no suite" (the suite needs inputs of the author),
    "needs GPU", "cannot run here" or "no result after n s"; ``failures`` has a line for each
    failed test.

    Args:
        entries: result of ``available``.
        seconds: time limit of each component.

    Raises:
        GlowplugError: pytest is not installed.
    """
    if find_spec("pytest") is None:
        raise GlowplugError("--suites needs pytest. Fix: pip install 'glowplug[test]'")
    for entry in entries:
        for part in entry["components"]:
            part["suite"] = _result(entry, part, seconds)


def _result(entry: Mapping[str, Any], part: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    if part["needs_gpu"]:
        return {"result": "needs GPU", "failures": []}
    if part["why_not"]:
        return {"result": "cannot run here", "failures": [part["why_not"]]}
    keys = ("name", "target", "distribution", "version")
    plugin = {key: entry[key] for key in keys}
    return _run({"slot": part["slot"], "name": part["name"], "plugin": plugin}, seconds)


def _run(asked: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Run the suite of one component in a process, and return its result."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(path=sys.path), json.dumps(asked)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"result": f"no result after {seconds:g} s", "failures": []}
    finally:
        _end(process)
    try:
        found = json.loads(out.splitlines()[-1])
    except (IndexError, ValueError):
        last = (err.strip().splitlines() or [""])[-1]
        return {"result": "failed", "failures": [f"exit status {process.returncode}: {last}"]}
    return _summary(found)


def _summary(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of a suite that has ended."""
    if not found["suite"]:
        return NO_SUITE
    failed = found["failed"]
    total = found["passed"] + len(failed)
    result = f"failed {len(failed)} of {total}" if failed or not total else "passed"
    return {"result": result, "failures": failed}


def _end(process: subprocess.Popen[str]) -> None:
    """Kill what is left of a process and of those that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.communicate()


def cell(entry: Mapping[str, Any]) -> str:
    """Return the results of a plugin's components as a cell of a table."""
    parts = entry["components"]
    if len(parts) == 1:
        result: str = parts[0]["suite"]["result"]
        return result
    return ", ".join(f"{part['name']}: {part['suite']['result']}" for part in parts) or "no suite"


def failures(entry: Mapping[str, Any]) -> list[str]:
    """Return a line for each failed test of a plugin's components."""
    return [
        f"{part['slot']} {part['name']}: {line}"
        for part in entry["components"]
        for line in part["suite"]["failures"]
    ]
