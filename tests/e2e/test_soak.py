"""``glowplug bench soak`` on a tiny model: a good run passes, and each fault is named."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from glowplug import LLM
from glowplug.entrypoints import bench
from glowplug.entrypoints.bench import soak
from glowplug.entrypoints.bench.load import soak_memory
from glowplug.entrypoints.bench.others import process_memory
from tests.support.tiny import write_config

STEP = 0.05  #: seconds that a reading moves the clock on


class Clock:
    """A stand-in for the module ``time``: only a reading and a sleep move it on, however fast the
    machine is.

    Attributes:
        slept: Called at each sleep.
    """

    def __init__(self) -> None:
        self.slept: Callable[[], None] = lambda: None
        self._now = 0.0
        self._due: list[tuple[float, Callable[[], None]]] = []

    def at(self, seconds: float, act: Callable[[], None]) -> None:
        """Call ``act`` once, as soon as the clock shows ``seconds``."""
        self._due.append((seconds, act))

    def monotonic(self) -> float:
        self._now += STEP
        for due in [due for due in self._due if due[0] <= self._now]:
            self._due.remove(due)
            due[1]()
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds
        self.slept()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    one = Clock()
    monkeypatch.setattr(soak, "time", one)
    # statistics with every step: between two reports a fast machine fills and frees pages unseen
    monkeypatch.setattr("glowplug.core.engine.engine.STATS_EVERY", 0.0)
    return one


def options(tmp_path: Path, *words: str, tokens: int = 1024) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.configure(parser)
    return parser.parse_args(
        [
            "soak",
            "--model",
            str(write_config(tmp_path, "v3")),
            "--load-format",
            "dummy",
            "--device",
            "cpu",
            "--max-running-requests",
            "16",
            "--max-total-tokens",
            str(tokens),
            "--context-length",
            "256",
            "--exact",
            "--output-file",
            str(tmp_path / "soak.json"),
            *words,
        ]
    )


def outcome(tmp_path: Path, *words: str, tokens: int = 1024) -> tuple[int, dict]:
    status = bench.run(options(tmp_path, *words, tokens=tokens))
    return status, json.loads((tmp_path / "soak.json").read_text())


def test_a_short_soak_holds(tmp_path: Path, clock: Clock) -> None:
    status, found = outcome(tmp_path, "--minutes", "0.07", "--pauses", "3")
    assert (status, found["failures"], found["answers_changed"]) == (0, [], 0)
    assert found["requests"] == sum(found["ends"].values()) > 20
    assert {"length", "given up"} <= set(found["ends"])
    # how many requests meet depends on the machine: 0.0 to 0.2 on two cores, busy and idle
    assert found["least_free_share"] < 0.5
    assert len(found["samples"]) == 4
    assert all(
        sample["pages"]["free"] == sample["pages"]["total"] == 64 for sample in found["samples"]
    )
    assert found["conditions"]["card"].startswith("cpu")
    assert (found["finished"], found["held_minutes"]) == (True, 0.0)
    assert found["minutes"] * 60 == pytest.approx(
        found["samples"][-1]["loaded"], abs=0.1
    )  # rounded


@pytest.mark.parametrize("layout", [(), ("--dp-size", "2", "--enable-dp-attention")])
def test_a_soak_of_two_ranks_counts_both(tmp_path: Path, layout: tuple[str, ...]) -> None:
    words = ("--minutes", "0.03", "--pauses", "1", "--tp-size", "2", *layout)
    status, found = outcome(tmp_path, *words, "--set", "executor.oversubscribe=true")
    assert (status, found["failures"], found["answers_changed"]) == (0, [], 0)
    assert found["requests"] > 0 and found["in_flight"] == 20
    assert found["pages"] == 64 * (1 + bool(layout))
    for sample in found["samples"]:
        assert sample["pages"]["free"] == sample["pages"]["total"] == 2 * 64
        assert sample["host"] > 2 * (100 << 20)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--disable-radix-cache",)])
def test_half_a_minute_leaves_nothing_behind(tmp_path: Path, more: tuple[str, ...]) -> None:
    status, found = outcome(
        tmp_path, "--minutes", "0.5", "--pauses", "10", "--host-growth-mib", "16", *more, tokens=512
    )
    assert (status, found["failures"], found["answers_changed"]) == (0, [], 0)
    assert found["preemptions"] > 0


def test_a_cache_that_never_was_full_is_found_when_asked_for(tmp_path: Path, clock: Clock) -> None:
    words = ("--minutes", "0.02", "--pauses", "1", "--expect-full")
    status, found = outcome(tmp_path, *words, "--in-flight", "1", tokens=2048)
    assert (status, found["was_full"], found["preemptions"]) == (1, False, 0)
    assert "was never full" in found["failures"][0] and len(found["failures"]) == 1
    status, found = outcome(tmp_path, *words, "--minutes", "0.25", tokens=320)
    assert (status, found["was_full"], found["failures"]) == (0, True, [])
    assert found["least_free_share"] <= 1 / found["pages"] and found["preemptions"] > 0


def test_conditions_of_a_full_cache(tmp_path: Path, clock: Clock) -> None:
    """A row that wants two pages of a small cache takes another's back while there is one."""
    with tiny(tmp_path) as llm:
        one = soaking(tmp_path, llm)
        for pages, left, preemptions, full in (
            (20, 0, 1, True),
            (20, 1, 1, True),
            (20, 2, 1, False),
            (20, 0, 0, False),
            (400, 4, 1, True),
            (400, 5, 1, False),
        ):
            llm.plan = replace(llm.plan, sizes=replace(llm.plan.sizes, num_pages=pages + 1))
            one.least_free, llm.stats.preemptions = left, preemptions
            assert one.result()["was_full"] == full, (pages, left, preemptions)


def test_the_soak_pauses_while_the_hold_file_exists(tmp_path: Path, clock: Clock) -> None:
    hold, out = tmp_path / "hold", tmp_path / "soak.json"
    seen: list[dict] = []

    def held() -> None:
        seen.append(json.loads(out.read_text()))
        if len(seen) == 5:
            hold.unlink()

    clock.slept = held
    clock.at(1.0, hold.touch)
    status, found = outcome(tmp_path, "--minutes", "0.05", "--pauses", "1", "--hold", str(hold))
    assert (status, found["failures"]) == (0, [])
    assert len(seen) == 5 and all(one == seen[0] for one in seen)
    assert seen[0]["holding"] and not seen[0]["finished"] and seen[0]["samples"]
    assert found["held_minutes"] * 60 >= 0.9 and 3.0 <= found["minutes"] * 60 + 0.05
    assert found["samples"][-1]["seconds"] >= 60 * (found["minutes"] + found["held_minutes"]) - 0.1
    assert len(found["samples"]) == len(seen[0]["samples"]) + 1 == 2 + (seen[0]["minutes"] > 0)


def test_requests_that_do_not_end_in_time_are_given_up_for_the_hold(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak, "HOLD_PATIENCE", 0.0)
    hold = tmp_path / "hold"
    with tiny(tmp_path) as llm:
        one = soak.Soak(
            llm, options(tmp_path, "--minutes", "1", "--hold", str(hold), "--abort-share", "0")
        )
        one._started = clock.monotonic()
        clock.at(1.0, hold.touch)
        assert not one._load_until(60.0)
        assert one.ends["given up"] >= 1 and not one._running and one.loaded < 30
        hold.unlink()
        one._pause()
        assert one.failures == [] and one.samples[0].pages["free"] == one.samples[0].pages["total"]


def test_each_pause_writes_the_results_so_far(tmp_path: Path, clock: Clock) -> None:
    """A killed run leaves everything up to its last pause behind."""
    left = []
    with tiny(tmp_path) as llm:
        one = soak.Soak(
            llm, options(tmp_path, "--minutes", "0.02", "--pauses", "2", "--expect-full")
        )
        one._hold = lambda: left.append(json.loads((tmp_path / "soak.json").read_text()))  # type: ignore[method-assign]
        one.run()
    assert [len(found["samples"]) for found in left] == [1, 2, 3]
    assert [found["requests"] > 0 for found in left] == [False, True, True]
    assert not any(found["finished"] or found["failures"] for found in left)


def says(tmp_path: Path, body: str) -> process_memory.ProcessMemory:
    """Write a stand-in for the driver's tool that runs ``body``."""
    tool = tmp_path / "tool"
    tool.write_text(f"#!{sys.executable}\nimport os, sys\n{body}\n")
    tool.chmod(0o755)
    return process_memory.ProcessMemory((str(tool),))


def test_memory_of_this_process_and_those_below_it(tmp_path: Path) -> None:
    body = (
        "print('1, 5000'); print(f'{os.getppid()}, 700'); print(f'{os.getppid()}, 20')\n"
        "print('No running processes found')"
    )
    memory = says(tmp_path, body)
    assert memory.bytes() == 720 << 20 and memory.missing == ""
    assert os.getpid() in process_memory.family(os.getppid())
    assert os.getppid() not in process_memory.family(os.getpid())


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("print('1, 5000')", "none of this process's ids"),
        ("print(f'{os.getppid()}, [N/A]')", "does not report the memory"),
        ("sys.exit(9)", "exit status 9"),
        ("", "none of this process's ids"),
    ],
)
def test_without_figures_of_the_driver_the_device_is_judged(
    tmp_path: Path, body: str, reason: str
) -> None:
    memory = says(tmp_path, body)
    assert memory.bytes() is None and reason in memory.missing
    assert process_memory.ProcessMemory((str(tmp_path / "none"),)).bytes() is None


def test_memory_of_others_on_the_card_is_not_judged(tmp_path: Path, clock: Clock) -> None:
    with tiny(tmp_path) as llm:
        one = soaking(tmp_path, llm)
        one.samples[-1].device_used += 999 << 20
        assert one.result()["failures"] == ["device_used memory grew by 999.0 MiB"]
        one.memory.missing = "no driver"
        assert one.result()["device_memory"] == "the whole device's: no driver"
        for sample in one.samples:
            sample.device_process = 7 << 30
        found = one.result()
        assert (found["failures"], found["device_memory"]) == ([], "this process's")
        one.samples[-1].device_process = 8 << 30
        assert one.result()["failures"] == ["device_process memory grew by 1024.0 MiB"]


def soaking(tmp_path: Path, llm: LLM) -> soak.Soak:
    args = options(tmp_path, "--minutes", "0.02", "--pauses", "2")
    one = soak.Soak(llm, args)
    one.run()
    return one


def tiny(tmp_path: Path) -> LLM:
    return LLM(
        model=str(write_config(tmp_path, "v3")),
        weights={"use": "random"},
        device="cpu",
        skip_tokenizer=True,
        memory={"kv_tokens": 1024},
        context_length=256,
        scheduler={"max_running_requests": 8},
    )


def test_a_lost_page_is_found(tmp_path: Path, clock: Clock) -> None:
    with tiny(tmp_path) as llm:
        scheduler = llm._executor._engine.scheduler  # type: ignore[attr-defined]
        scheduler.pages.take(1)
        assert "pages accounted for" in " ".join(soaking(tmp_path, llm).failures)


def test_an_answer_that_changes_is_found(tmp_path: Path, clock: Clock) -> None:
    with tiny(tmp_path) as llm:
        one = soaking(tmp_path, llm)
        assert one.failures == []
        one._answers[0] = one._answers[0][::-1]
        one._pause()
        assert one.answers_changed == 1 and "answers differ" in one.failures[0]


def test_growing_memory_is_found(tmp_path: Path, clock: Clock) -> None:
    with tiny(tmp_path) as llm:
        one = soaking(tmp_path, llm)
        assert one.result()["failures"] == []
        one.samples[-1].device_claimed += 40 << 20
        assert one.result()["failures"] == ["device_claimed memory grew by 40.0 MiB"]
        assert soak_memory.growth(one.samples)["device_claimed"] == 40.0


def test_an_engine_that_dies_is_a_failure_not_a_traceback(tmp_path: Path, clock: Clock) -> None:
    with tiny(tmp_path) as llm:
        runner = llm._executor._engine.runner  # type: ignore[attr-defined]
        runner.launch = lambda batch: 1 / 0
        assert "ZeroDivisionError" in soaking(tmp_path, llm).failures[0]
