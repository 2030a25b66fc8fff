"""``glowplug tune parallel`` with engines of known speeds: layouts, failures, table, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from glowplug.core.errors import EngineDead
from glowplug.core.facts.machine import read_sheet
from glowplug.core.facts.model_facts import HardwareFacts
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.testing.harness.fakes import TINY_V3, write_model
from glowplug.entrypoints.bench.ranks import layouts
from glowplug.entrypoints.cli.main import main
from glowplug.entrypoints.front import llm
from glowplug.kernels.launch import tuned_tables

TUNE = ["tune", "parallel", "--device", "cpu", "--tp", "2", "--context-length", "256"]
LOAD = ["--concurrency", "8", "2", "4", "--input-len", "6", "--output-len", "20", "--repeat", "3"]
#: groups -> requests -> output tokens per second
SPEEDS = {1: {2: 100.0, 4: 160.0, 8: 200.0}, 2: {2: 80.0, 4: 200.0, 8: 500.0}}


class Engines:
    """Engines of known speeds, and the clock of the command.

    Attributes:
        configs: configuration of every engine that was started.
        speeds: groups -> requests -> output tokens per second.
        early: groups of the engine whose requests end early.
        hardware: the machine; None for this one.
    """

    def __init__(self) -> None:
        self.configs: list[dict[str, Any]] = []
        self.speeds: dict[int, dict[int, float]] = SPEEDS
        self.early = 0
        self.hardware: HardwareFacts | None = None
        self.prompts: list[list[int]] = []
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def start(self, **config: Any) -> Engine:
        self.configs.append(config)
        return Engine(self, config)


class Engine:
    """An engine that takes the time of its layout's speed."""

    def __init__(self, engines: Engines, config: dict[str, Any]) -> None:
        self.plan = make_plan({"model": "embedded", **config}, hardware=engines.hardware)
        self._engines = engines
        self._groups = self.plan.mesh.get("dp", 1)
        if self._groups not in engines.speeds:
            raise EngineDead("rank 1 has no memory left")

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def generate(self, prompts: list[list[int]], params: Any, use_tqdm: bool) -> list[Any]:
        speeds = self._engines.speeds[self._groups]
        if len(prompts) not in speeds:
            raise EngineDead("rank 0 ended")
        assert params.ignore_eos and not use_tqdm
        assert {len(prompt) for prompt in prompts} == {6}
        self._engines.prompts += prompts
        self._engines.now += len(prompts) * params.max_tokens / speeds[len(prompts)]
        early = self._groups == self._engines.early
        done = SimpleNamespace(
            token_ids=[0] * (params.max_tokens - early),
            finish_reason="abort" if early else "length",
        )
        return [done] * len(prompts)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Engines:
    """Engines of known speeds; tables are kept in a folder of the test's own."""
    found = Engines()
    monkeypatch.setattr(llm, "LLM", found.start)
    monkeypatch.setattr(layouts, "time", found)
    monkeypatch.setenv(tuned_tables.VARIABLE, str(tmp_path / "tables"))
    return found


def kept(tmp_path: Path) -> list[Path]:
    return [*(tmp_path / "tables").glob("*.json")]


def auto_plan(running: int) -> Any:
    parallel = [{"use": "tensor", "size": 2}, {"use": "dp_attention", "size": "auto"}]
    scheduler = {"max_running_requests": running}
    return make_plan({"model": "embedded", "parallel": parallel, "scheduler": scheduler})


def test_the_next_plan_takes_the_table(
    engines: Engines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TUNE, *LOAD, "--save-table", "--output", str(tmp_path / "record.json")]) == 0
    shown = capsys.readouterr().out
    assert (
        "|        4 |                          160.0 |                    200.0 |  1.25 |" in shown
    )
    assert "dp_attention 2 is faster from 4 requests" in shown
    (table,) = kept(tmp_path)
    assert f"table: {table}" in shown
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["speeds"] == {
        "2": {"1": 100, "2": 80},
        "4": {"1": 160, "2": 200},
        "8": {"1": 200, "2": 500},
    }
    assert record["failed"] == {} and record["runs"] == 3
    assert auto_plan(3).mesh == {"tp": 2} and auto_plan(4).mesh == {"tp": 2, "dp": 2}
    texts = [tuple(prompt) for prompt in engines.prompts]
    half = 4 * (2 + 4 + 8)
    assert texts[:half] == texts[half:], "both layouts have the same prompts"
    assert len(set(texts[:half])) == half, "no run repeats a prompt"


def test_without_save_table_nothing_is_kept(engines: Engines, tmp_path: Path) -> None:
    assert main([*TUNE, *LOAD]) == 0
    assert kept(tmp_path) == []


def test_options_of_the_engine_reach_both_layouts(engines: Engines, tmp_path: Path) -> None:
    file = tmp_path / "engine.toml"
    file.write_text('[[parallel]]\nuse = "dp_attention"\nsize = "auto"\n')
    words = ["--config", str(file), "--load-format", "dummy", "--cuda-graph-bs", "2", "4"]
    words += ["--ep-size", "2", "--mem-fraction-static", "0.7", "--tp", "2"]
    words += ["--model", str(write_model(tmp_path / "model", TINY_V3))]
    engines.hardware = read_sheet("8xh200")
    assert main(["tune", "parallel", *LOAD, *words]) == 0
    plain, groups = engines.configs
    ranks = [{"use": "tensor", "size": 2}, {"use": "ep_moe", "size": 2}]
    assert plain.pop("parallel") == ranks
    assert groups.pop("parallel") == [*ranks, {"use": "dp_attention", "size": 2}]
    assert plain == groups
    assert plain["weights"] == {"use": "random"} and plain["memory"] == {"static_fraction": 0.7}
    assert plain["graphs"]["batch_sizes"] == [2, 4]
    assert plain["scheduler"] == {"max_running_requests": 8} and plain["skip_tokenizer"]


def test_a_layout_that_does_not_start_is_recorded(
    engines: Engines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engines.speeds = {2: SPEEDS[2]}
    words = ["--save-table", "--output", str(tmp_path / "record.json")]
    assert main([*TUNE, *LOAD, *words]) == 2
    said = capsys.readouterr()
    reason = "start: rank 1 has no memory left"
    assert f"without dp_attention, failed at {reason}" in said.out
    assert "nothing was compared" in said.out and kept(tmp_path) == []
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["failed"] == {"1": reason}
    assert record["speeds"] == {"2": {"2": 80}, "4": {"2": 200}, "8": {"2": 500}}


def test_a_layout_that_ends_early_keeps_what_was_measured(
    engines: Engines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engines.speeds = {1: SPEEDS[1], 2: {2: 80.0, 4: 200.0}}
    assert main([*TUNE, *LOAD, "--save-table"]) == 1
    said = capsys.readouterr()
    assert "dp_attention 2, failed at 8 requests: rank 0 ended" in said.out
    assert (
        "|        8 |                          200.0 |                        - |     - |"
        in said.out
    )
    (table,) = kept(tmp_path)
    assert json.loads(table.read_text())["measured"]["failed"] == {"2": "8 requests: rank 0 ended"}
    assert auto_plan(8).mesh == {"tp": 2, "dp": 2}


def test_requests_that_end_early_are_no_measurement(
    engines: Engines, capsys: pytest.CaptureFixture[str]
) -> None:
    engines.early = 2
    assert main([*TUNE, *LOAD]) == 2
    assert "requests ended before 16 tokens: abort" in capsys.readouterr().out


def test_a_refused_layout_is_recorded_beside_another(
    engines: Engines, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TUNE, *LOAD, "--groups", "3", "2"]) == 1
    said = capsys.readouterr()
    assert "2 tensor ranks cannot be divided evenly among 3 groups" in said.out
    assert "dp_attention 2 is faster from 4" in said.out and "dp_attention 3 was not" in said.out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--max-minutes", "3"], "parallel has no option --max-minutes"),
        (["--rows", "3"], "parallel has no option --rows"),
        (["--steps", "3"], "parallel has no option --steps"),
        (["--tp", "1"], "compares layouts of several ranks: give --tp N"),
        (["--groups", "1"], "--groups needs numbers from 2 on"),
        (["--concurrency", "0"], "are at least 1"),
        (["--max-running-requests", "128"], "--concurrency 256 exceeds scheduler.max_running_req"),
        (["--facts", "8xh200"], "not on a fact sheet's"),
    ],
)
def test_options_that_cannot_be_used_are_refused(
    words: list[str], reason: str, engines: Engines, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["tune", "parallel", "--device", "cpu"]
    assert main([*base, *([] if "--tp" in words else ["--tp", "2"]), *words]) == 2
    assert reason in capsys.readouterr().err and engines.configs == []


def test_other_tuners_have_none_of_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    for tuner in ("speculative", "dense"):
        assert main(["tune", tuner, "--concurrency", "4"]) == 2
        assert "has no option --concurrency" in capsys.readouterr().err
    assert main(["tune"]) == 0
    assert "parallel     the concurrent requests" in capsys.readouterr().out
