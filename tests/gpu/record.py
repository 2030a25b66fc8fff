"""The results of a test run as a file that is valid at any moment: ``pytest -p tests.gpu.record
--record FILE``.

``make gpu-test`` writes it. The record of a run that is cut short has its results, its failures and
the tests that were not reached; ``--left-by FILE`` runs only the latter two.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

SLOWEST = 20  #: number of tests whose seconds are kept
EVERY = 2.0  #: seconds between two writes; failures are written at once


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("record")
    group.addoption(
        "--record",
        type=Path,
        metavar="FILE",
        help="keep what was found in this file, as it is found",
    )
    group.addoption(
        "--left-by",
        type=Path,
        metavar="FILE",
        help="only what that record did not reach, or saw fail",
    )


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--record")
    if path is not None and not hasattr(
        config, "workerinput"
    ):  # of the processes that share the tests, the first one
        config.pluginmanager.register(Record(path, config))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    path = config.getoption("--left-by")
    if path is None:
        return
    wanted = left_by(path)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in wanted])
    items[:] = [item for item in items if item.nodeid in wanted]


def left_by(path: Path) -> set[str]:
    """Return the tests that the record did not reach or saw fail; it reads records of combinations,
    too.
    """
    found = json.loads(path.read_text(encoding="utf-8"))
    return {*found["not_run"], *found["failures"]}


class Record:
    """Outcomes by test; the worst of a test's phases counts."""

    def __init__(self, path: Path, config: pytest.Config) -> None:
        from glowplug.entrypoints.bench.others.conditions import conditions_apart

        words = " ".join(map(str, config.invocation_params.args))
        self._path, self._started, self._written = path, time.monotonic(), 0.0
        self._said = conditions_apart() | {"command": f"pytest {words}"}
        self._tests: dict[
            str, str
        ] = {}  #: test -> passed, failed, skipped or "" where it has not been reached
        self._failures: dict[str, str] = {}
        self._seconds: Counter[str] = Counter()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._expect(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._expect(ids)

    def _expect(self, ids: Iterable[str]) -> None:
        for test in ids:
            self._tests.setdefault(test, "")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        before = self._tests.get(report.nodeid, "")
        self._seconds[report.nodeid] += report.duration
        if report.failed:
            self._tests[report.nodeid] = "failed"
            self._failures[report.nodeid] = _why(report)
        elif before != "failed" and (report.skipped or report.when == "call"):
            self._tests[report.nodeid] = report.outcome
        if report.failed or time.monotonic() > self._written + EVERY:
            self._write()

    def pytest_sessionfinish(self) -> None:
        self._write()

    def _write(self) -> None:
        from glowplug.entrypoints.bench.others.report import write_json

        self._written = time.monotonic()
        counts = Counter(self._tests.values())
        left = [test for test, outcome in self._tests.items() if not outcome]
        found: dict[str, Any] = self._said | {
            "collected": len(self._tests),
            **{each: counts[each] for each in ("passed", "failed", "skipped")},
            "complete": not left,
            "seconds": round(time.monotonic() - self._started),
            "failures": self._failures,
            "not_run": left,
            "slowest": {test: round(spent) for test, spent in self._seconds.most_common(SLOWEST)},
        }
        write_json(self._path, found)


def _why(report: pytest.TestReport) -> str:
    """Return one line with the reason of a failure."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    return f"{report.when}: {text.strip().partition(chr(10))[0][:300]}"
