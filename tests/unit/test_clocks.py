"""No test fails because the machine is busy: only tests marked ``timing`` compare a clock with a
bound.
"""

from __future__ import annotations

import ast
from functools import cache

import pytest

from tests.support.clock_uses import compared, modules_of, short_waits
from tests.support.source_tree import ROOT, name_of, tree

#: files that compare a clock with a bound -> reason
WITH_A_CLOCK = {
    "tests/support/waiting.py",  # the one place that gives up waiting for an event
    "tests/plugins/sleepy_tuner.py",  # a tuner that takes a given number of seconds
    "tests/e2e/fake_engine.py",  # an engine whose requests have deadlines
    "tests/e2e/two_hosts.py",  # a tool that measures how long a fault takes to be found
    "tests/gpu/matrix_run.py",  # tools that run for hours on a GPU
    "tests/gpu/record.py",
    "tests/gpu/sanitize.py",
}


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax trees of the tests by dotted module."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    return {name_of(path).removesuffix(".py").replace("/", "."): tree(path) for path in files}


def path_of(module: str) -> str:
    return module.replace(".", "/") + ".py"


def test_only_tests_marked_timing_compare_clocks() -> None:
    known = modules_of(trees())
    found = {path_of(name): list(compared(one, known[name])) for name, one in trees().items()}
    assert {
        name: lines for name, lines in found.items() if lines and name not in WITH_A_CLOCK
    } == {}
    assert {name for name in WITH_A_CLOCK if not found[name]} == set(), (
        "an exception that is not needed"
    )


def test_waits_have_limits_that_only_end_hangs() -> None:
    found = {path_of(name): list(short_waits(one)) for name, one in trees().items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


PACE = (
    "import time\ndef pace():\n"
    "    start = time.process_time()\n    return time.process_time() - start\n"
)


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        ("start = time.monotonic()\n assert time.monotonic() - start < 2", True),
        (
            "start = time.perf_counter_ns()\n took = time.perf_counter_ns() - start\n"
            " assert 1 < took",
            True,
        ),
        ("assert now() < 5", True),
        (
            "seconds = []\n for _ in range(3):\n  seconds.append(time.time())\n"
            " assert min(seconds) < 1",
            True,
        ),
        ("while time.monotonic() < end:\n  pass", True),
        ("one.began = time.monotonic()\n assert one.began <= 3", True),
        ("assert pace() < 1", True),
        ("took: float = max(pace(), 1)\n assert (took, 1) == pytest.approx((2, 3))", True),
        ("assert loop.time() > 3", True),
        ("assert clock.monotonic() < 2", False),
        ("one = Outcome(3, time.time())\n assert one.same < 4", False),
        ("start = time.monotonic()\n assert len(found) < 3", False),
        ("note(time.time())\n assert found == [1]", False),
        ("assert pytest.approx(1) == 1.0 and 3 < 4", False),
    ],
)
def test_comparisons_of_clocks_are_found(lines: str, wrong: bool) -> None:
    head = (
        "import time\nfrom time import monotonic as now\nimport pytest\n"
        "from tests.support.pace import pace\n"
    )
    for mark, expected in (("", wrong), ("@pytest.mark.slow\n@pytest.mark.timing\n", False)):
        module = ast.parse(f"{head}{mark}def test_one():\n {lines}\n")
        known = modules_of({"tests.support.pace": ast.parse(PACE), "tests.one": module})
        assert bool(list(compared(module, known["tests.one"]))) == expected
    whole = ast.parse(f"{head}pytestmark = [pytest.mark.timing]\ndef test_one():\n {lines}\n")
    assert not list(compared(whole, known["tests.one"]))


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("thread.join(5)", True),
        ("process.communicate(timeout=6)", True),
        ("event.wait(0.5)", True),
        ("subprocess.run(words, timeout=3)", True),
        ("asyncio.timeout(1.0)", True),
        ("thread.join()", False),
        ("thread.join(LIMIT)", False),
        ("','.join(words)", False),
        ("table.join(one)", False),
        ("event.wait(60)", False),
        ("gloo(timeout=1.0)", False),
    ],
)
def test_short_waits_are_found(line: str, wrong: bool) -> None:
    assert bool(list(short_waits(ast.parse(f"def test_one():\n {line}\n")))) == wrong
