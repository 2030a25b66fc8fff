"""``glowplug bench single-query``: its rows, and a short run of one that works and one that is
refused.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from glowplug.entrypoints.bench import single_query
from glowplug.entrypoints.bench.single_query import Mixture, mixtures


def test_every_mixture_appears_once_the_simplest_first() -> None:
    found = mixtures([1, 2], steps=3)
    assert len(set(found)) == len(found) == 32 and {one.steps for one in found} == {0, 3}
    assert found[0] == Mixture(1, False, 0, False, False) and found[16] == Mixture(
        2, False, 0, False, False
    )
    assert found[-1].config({"dtype": "float32"}, 1) == {
        "dtype": "float32",
        "cache": {"use": "radix"},
        "speculative": {"use": "nextn", "steps": 3},
        "parallel": [{"use": use, "size": 2} for use in ("tensor", "ep_moe", "dp_attention")],
        "executor": {"use": "multiprocess", "threads": 1},
    }


def test_one_row_runs_and_a_refused_one_gives_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [Mixture(1, True, 2, False, False), Mixture(1, True, 0, True, False)]
    monkeypatch.setattr(single_query, "mixtures", lambda ranks, steps: rows)
    parser = argparse.ArgumentParser()
    single_query.configure(parser)
    output = tmp_path / "table.json"
    words = [
        "--repeat",
        "2",
        "--max-tokens",
        "24",
        "--question",
        "What is 27 + 15?",
        "--output-file",
        str(output),
        "--set",
        "executor.use=inline",
        "--set",
        "speculative.adaptive=false",
    ]
    assert single_query.run(parser.parse_args(words)) == 0
    runs, refused = json.loads(output.read_text())["rows"]
    assert (
        runs["runs"] == "yes" and runs["same output"] == "yes" and 1.5 < runs["accept length"] <= 3
    )
    assert (
        runs["TPS@1"] > 0 and 0 < runs["TTFT ms"] < runs["latency ms"] and len(runs["rates"]) == 2
    )
    assert refused["runs"] == "refused" and "tensor" in refused["reason"]
    printed = capsys.readouterr().out
    assert "| accept length |" in printed and refused["reason"] in printed
