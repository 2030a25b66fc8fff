"""The program that measures one rank of a whole V3 on one GPU, without a GPU."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from glowplug.entrypoints import bench
from glowplug.entrypoints.bench.ranks.exchange_times import EXCHANGE
from tests.gpu import lone_rank, whole_v3
from tests.gpu.eight_gpus import SHAPES, layouts
from tests.gpu.eight_gpus_expected import expected
from tests.gpu.eight_gpus_runs import LARGE, Run
from tests.support.source_tree import ROOT

PLANS = ROOT / "docs" / "benchmarks" / "eight-gpus-plan.json"


def options(words: tuple[str, ...]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.configure(parser)
    return parser.parse_args(list(words[3:]))


def test_a_dry_run_states_what_a_rank_holds(tmp_path: Path) -> None:
    output = tmp_path / "dry.json"
    assert lone_rank.main(["--dry", "--output", str(output)]) == 0
    found = json.loads(output.read_text())["layouts"]
    plans = json.loads(PLANS.read_text())["plans"]
    assert list(found) == list(layouts(8))
    for name, one in found.items():
        planned = plans[f"deepseek-v3, {name}"]
        assert one["plan"]["bytes_per_rank"] == planned["bytes_per_rank"]
        assert list(one["predicted"]) == ["1", "8", "32", "128"]
        assert one["predicted"]["32"]["expected_ms"] == expected(name, 32, False).expected_ms
    assert found["dp 8, ep 8"]["host_ms"] > found["tp 8"]["host_ms"] > 0


def test_the_runs_are_of_one_rank_with_random_weights(tmp_path: Path) -> None:
    found = dict(lone_rank.alone_runs(tmp_path, LARGE, 8, 3))
    for name, layout in layouts(8).items():
        args = options(found[name].words)
        assert (args.alone, args.batch_size) == (3, [1, 8, 32, 128])
        words = " ".join(found[name].words)
        assert "--load-format dummy" in words and " ".join(layout.ours()) in words


def measured_here(run: Run, folder: Path, limit: float) -> dict[str, Any]:
    """Run a command in this process, in place of ``measure``."""
    assert bench.run(options(run.words)) == 0
    return {"state": "done", "command": "", "result": json.loads(run.result.read_text())}


def test_steps_of_all_ranks_follow_from_those_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With measured exchanges and, without any, with the prediction; a missing one is named."""
    monkeypatch.setattr(whole_v3, "measure", measured_here)
    layers = json.loads((SHAPES / "tiny-v3.json").read_text())["num_hidden_layers"]
    rows = [
        {"operation": name, "ranks": 2, "bytes": 1 << 20, "us": 50.0}
        for name in ("all_reduce", "all_gather", "reduce_scatter")
    ]
    times = tmp_path / "times.json"
    output = tmp_path / "record.json"
    common = ["--small", "--ranks", "2", "--folder", str(tmp_path), "--output", str(output)]

    def steps(*words: str) -> dict[str, list[dict[str, Any]]]:
        assert lone_rank.main([*common, *words]) == 0
        record = json.loads(output.read_text())
        assert all(run["result"]["results"][0]["alone"] for run in record["runs"].values())
        found: dict[str, list[dict[str, Any]]] = record["steps"]
        return found

    times.write_text(json.dumps({"rows": rows, "date": "today", "card": "none"}))
    found = steps("--exchange-times", str(times))
    assert len(found["tp 2"]) == 2
    for step in found["tp 2"]:
        # the embedding, two sums in each of the model's layers, and the keys of the next tokens
        exchanges = 1 + 2 * layers + 1
        assert step["exchange_ms"] * 1e3 == pytest.approx(50 * exchanges)
        assert step["step_ms"] == pytest.approx(
            step["alone_ms"] + step["exchange_ms"] + step["host_ms"]
        )
        assert step["tokens_per_s"] == pytest.approx(step["batch"] / step["step_ms"] * 1e3)
    assert "has no expert exchange of 2 ranks" in found["dp 2, ep 2"][0]["error"]
    rows.append({"operation": EXCHANGE, "ranks": 2, "tokens": 1, "us": 70.0})
    times.write_text(json.dumps({"rows": rows, "date": "today", "card": "none"}))
    assert "error" not in steps("--exchange-times", str(times))["dp 2, ep 2"][0]
    predicted = steps()
    assert all(0 < step["exchange_ms"] < 1 for one in predicted.values() for step in one)
