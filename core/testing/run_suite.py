"""Run of the conformance suite of one component's slot, in a process of its own.

``python -m glowplug.core.testing.run_suite '{"slot": .., "name": .., "plugin": {..}}'`` prints
one line of JSON: the number of tests that passed, and the failed ones with their first lines.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.plugin.loading import PluginSource, Registration
from glowplug.core.plugin.registry import PluginSet, built_in_plugins
from glowplug.core.testing.installed_suites import suite_of

HERE = "glowplug.core.testing.run_suite"
#: the module that pytest collects
MODULE = """from {here} import class_for

TestInstalled = class_for({asked!r})
"""


class ResultCounter:
    """A plugin of pytest that counts results.

    Attributes:
        passed: number of tests that passed.
        failed: failed tests, each with the first line of its failure.
    """

    def __init__(self) -> None:
        self.passed = 0
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and report.when == "call":
            self.passed += 1
        if report.failed:
            name = report.nodeid.rpartition("::")[2]
            crash = getattr(report.longrepr, "reprcrash", None)
            self.failed.append(f"{name}: {str(crash.message if crash else report.longrepr)[:200]}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(str(report.longrepr).strip().splitlines()[-1])


def registration(asked: dict[str, Any]) -> Registration:
    """Return the component, of a plugin that is loaded beside the built-in ones."""
    source = PluginSource(**asked["plugin"])
    plugins = PluginSet([*(PluginSource(name, name) for name in built_in_plugins()), source])
    found = plugins.find(asked["slot"], asked["name"])
    assert found is not None, f"{source.label} has no {asked['slot']} {asked['name']!r}"
    return found


def class_for(asked: dict[str, Any]) -> type | None:
    """Return the class of the suite's tests on a component; None if there is none."""
    return suite_of(asked["slot"], registration(asked))


def result(asked: dict[str, Any]) -> dict[str, Any]:
    """Run the suite, and return its result: "suite", "passed" and "failed"."""
    try:
        if class_for(asked) is None:
            return {"suite": False}
    except Exception as error:
        return {"suite": True, "passed": 0, "failed": [f"{type(error).__name__}: {error}"]}
    counter = ResultCounter()
    with tempfile.TemporaryDirectory(prefix="glowplug-suite-") as folder:
        module = Path(folder) / "test_installed.py"
        module.write_text(MODULE.format(here=HERE, asked=asked))
        options = [
            "-q",
            "-m",
            "not gpu",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            folder,
            "-c",
            "/dev/null",
        ]
        with contextlib.redirect_stdout(sys.stderr):
            pytest.main([*options, str(module)], plugins=[counter])
    return {"suite": True, "passed": counter.passed, "failed": counter.failed}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(result(json.loads(sys.argv[1]))) + "\n")
