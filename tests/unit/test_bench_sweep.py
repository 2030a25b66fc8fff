"""``glowplug bench sweep``: settings measured one after the other, and the change in percent."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from glowplug.entrypoints import bench
from glowplug.entrypoints.bench import sweep
from glowplug.entrypoints.bench.sweep import Setting
from tests.support.bench_server import FakeServer

LOAD = "--max-concurrency 1 3 --num-prompts 2 4 --input-len 8 --output-len 4".split()
DRAFTS = ["--speculative-algorithm", "NEXTN"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Start fake servers in place of real ones; return the configurations they were given."""
    found: list[dict[str, Any]] = []

    @contextmanager
    def local(config: dict[str, Any], timeout: float) -> Iterator[Any]:
        found.append(config)
        if config.get("seed") == 13:
            raise RuntimeError("the server ended with 1")
        server = FakeServer()
        try:
            yield argparse.Namespace(base_url=server.target.base_url)
        finally:
            assert [path for path, _ in server.asked].count("/flush_cache") == 2
            server.close()

    monkeypatch.setattr(sweep, "LocalServer", local)
    return found


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    bench.configure(parser)
    return bench.run(parser.parse_args(["sweep", "--model", "embedded", *LOAD, *words]))


def test_draft_extend_is_swept_by_default(
    started: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, lines = tmp_path / "x.json", tmp_path / "x.jsonl"
    assert run(*DRAFTS, "--save", str(saved), "--output-file", str(lines)) == 0
    assert [config["graphs"]["draft_extend"] for config in started] == [False, True]
    found = json.loads(saved.read_text())
    assert [record["max_concurrency"] for record in found["results"]] == [1, 3, 1, 3]
    assert [record["completed"] for record in found["results"]] == [2, 4, 2, 4]
    assert [change["max_concurrency"] for change in found["changes"]] == [1, 3]
    assert {"output_throughput", "per_user_throughput", "mean_ttft_ms"} <= set(
        found["changes"][0]["percent"]
    )
    plans = {setting["setting"]: setting["plan"] for setting in found["settings"]}
    assert list(plans) == list(sweep.DRAFT_EXTEND) and all(plans.values())
    assert len(lines.read_text().splitlines()) == 4
    shown = capsys.readouterr()
    assert "change in percent, from 'graphs.draft_extend=false'" in shown.out
    assert "graphs.draft_extend: " in shown.err and "no effect: no step is captured" in shown.err


def test_the_servers_simulate_an_acceptance(started: list[dict[str, Any]]) -> None:
    assert run(*DRAFTS, "--vary", "", "--simulate-accept-length", "1.5") == 0
    (config,) = started
    assert config["speculative"]["simulate_accept_rates"] == [0.5] and config["benchmark"] is True


def test_a_setting_that_cannot_run_has_its_reason(
    started: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "x.json"
    settings = ["", "attention.use=fa3_mla", "seed=13;cache.use=none"]
    assert run("--vary", *settings, "--save", str(saved)) == 1
    found = json.loads(saved.read_text())
    errors = [setting["error"] for setting in found["settings"]]
    assert errors[0] is None
    assert "fa3_mla runs on cuda" in errors[1] and "fix: " in errors[1]
    assert errors[2] == "the server ended with 1"
    assert len(started) == 2 and len(found["results"]) == 2
    assert started[1]["cache"] == {"use": "none"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no such pass: choose drafts (--speculative-algorithm NEXTN)"),
        ([*DRAFTS, "--num-prompts", "5"], "as many values as each other"),
        (["--vary", "no.such=1", "other.key=2"], "unknown key"),
    ],
)
def test_options_without_a_comparison_are_refused(
    started: list[dict[str, Any]],
    words: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(*words) == 2
    assert said in capsys.readouterr().err and not started


def test_a_regression_beyond_the_limit_fails_the_sweep(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """S4's figures at concurrency 1: TPOT fell by 11.7% while TTFT rose by 11.1%."""

    def setting(name: str, ttft: float, tpot: float, output: float) -> Setting:
        record = {"max_concurrency": 1, "median_ttft_ms": ttft, "median_tpot_ms": tpot}
        return Setting(name, records=[{**record, "output_throughput": output, "failed": 0}])

    both = [setting("main", 138.9, 7.936, 123.9), setting("graphs", 154.3, 7.009, 139.7)]
    (change,) = sweep.changes(*both)
    assert change["percent"] == pytest.approx(
        {
            "median_ttft_ms": 11.09,
            "median_tpot_ms": -11.68,
            "output_throughput": 12.75,
            "per_user_throughput": 12.75,
        },
        abs=0.01,
    )
    assert not sweep._show_changes(both, None) and not sweep._show_changes(both, 12.0)
    assert sweep._show_changes(both, 10.0)
    assert "median_ttft_ms at concurrency 1 rose by 11.1%" in capsys.readouterr().err
