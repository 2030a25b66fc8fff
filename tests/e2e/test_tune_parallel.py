"""``glowplug tune parallel`` on two ranks of this CPU, and an engine whose plan takes its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glowplug import LLM, SamplingParams
from glowplug.core.facts.layout_speed import fastest_size
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.entrypoints.cli.main import main
from glowplug.kernels.launch import tuned_tables

ENGINE = ["--device", "cpu", "--dtype", "float32", "--context-length", "256", "--tp", "2"]
LOAD = ["--concurrency", "1", "4", "--input-len", "8", "--output-len", "6", "--repeat", "1"]
CONFIG = {
    "model": "embedded",
    "device": "cpu",
    "dtype": "float32",
    "context_length": 256,
    "scheduler": {"max_running_requests": 4},
}
TP = {"use": "tensor", "size": 2}
AUTO = {"use": "dp_attention", "size": "auto"}


def test_an_engine_takes_the_layout_that_was_measured_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(tuned_tables.VARIABLE, str(tmp_path))
    assert main(["tune", "parallel", *ENGINE, *LOAD, "--save-table"]) == 0
    shown = capsys.readouterr().out
    (path,) = tmp_path.glob("*.json")
    assert f"table: {path}" in shown and "| requests | without dp_attention, tokens/s" in shown
    table = json.loads(path.read_text())
    found = {
        int(requests): {int(size): speed for size, speed in row.items()}
        for requests, row in table["output tokens/s"].items()
    }
    assert {requests: set(row) for requests, row in found.items()} == {1: {1, 2}, 4: {1, 2}}
    plan = make_plan(CONFIG | {"parallel": [TP, AUTO]})
    assert plan.sizes.groups == fastest_size(found, 4)
    (line,) = (one for one in plan.decisions if one.field == "parallel.1.size")
    assert line.why.startswith("measured on cpu, 2 ranks, float32, requests of 8 + 6 tokens: ")
    for row in table["output tokens/s"].values():  # as if groups had been much faster
        row["2"] = 2 * row["1"]
    path.write_text(json.dumps(table))
    assert make_plan(CONFIG | {"parallel": [TP]}).sizes.groups == 1
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    answers = []
    for parallel, groups in (([TP, AUTO], 2), ([], 1)):
        with LLM(**CONFIG, parallel=parallel) as llm:
            assert llm.plan.sizes.groups == groups
            done = llm.generate(prompts, params, use_tqdm=False)
            answers.append([list(one.token_ids) for one in done])
    assert answers[0] == answers[1]
