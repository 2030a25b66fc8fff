"""``glowplug bench speculative`` and ``glowplug tune speculative`` with the embedded model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.draft_costs import DraftCosts
from glowplug.core.plugin.draft_shape import NO_DRAFTS, DraftShape
from glowplug.entrypoints.bench.others.draft_settings import drafting_config, settings
from glowplug.entrypoints.cli.main import main
from glowplug.entrypoints.cli.tune_speculative import choices_of, costs_of

ENGINE = ["--device", "cpu", "--dtype", "float32", "--context-length", "256"]
SMALL = ["--num-prompts", "2", "--output-len", "8"]
PROMPTS = [{"prompt": "What is 2 + 3?"}, {"prompt": "Reverse the word tree."}]


@pytest.fixture
def prompts(tmp_path: Path) -> list[str]:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in PROMPTS))
    return ["--prompts", str(path)]


def test_combinations_are_those_of_the_published_script() -> None:
    """But chains verify all their drafts, and trees all branches of a pass."""
    found = settings((0, 1, 3), (0, 1, 4), (0, 2, 4, 8, 64))
    assert [str(shape) for shape in found] == ["0/1/1", "1/1/2", "1/4/4", "3/1/4", "3/4/4", "3/4/8"]
    assert settings((3,), (1,), (2,)) == []


def test_drafts_of_one_size_for_a_configuration() -> None:
    config = {"speculative": {"use": "ngram", "cost_table": "x", "prompt_lookup_max": 3}}
    made = drafting_config({**config, "scheduler": {"chunk_size": 9}}, DraftShape(3, 4, 8), 2)
    assert made["speculative"] == {
        "use": "ngram",
        "prompt_lookup_max": 3,
        "steps": 3,
        "topk": 4,
        "draft_tokens": 8,
        "adaptive": False,
    }
    assert made["scheduler"] == {"chunk_size": 9, "max_running_requests": 2}
    assert drafting_config(config, NO_DRAFTS, 1)["speculative"] == {"use": "none"}
    rates = (0.9, 0.5, 0.1)
    simulated = drafting_config(config, DraftShape.chain(2), 1, rates)
    assert simulated["speculative"]["simulate_accept_rates"] == [0.9, 0.5]
    assert simulated["benchmark"] is True
    assert drafting_config(config, NO_DRAFTS, 1, rates)["speculative"] == {"use": "none"}


def test_bench_records_every_combination(
    tmp_path: Path, prompts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "output.jsonl"
    command = ["bench", "speculative", *ENGINE, *SMALL, *prompts, "--output", str(output)]
    command += ["--trust-remote-code", "--batch-size", "2", "--steps", "0", "1", "16"]
    command += ["--topk", "0", "1", "--num_draft_tokens", "0", "2", "17"]
    assert main(command) == 1, "16 steps are refused, the others are measured"
    records: list[dict[str, Any]] = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(one["steps"], one["topk"], one["num_draft_tokens"]) for one in records] == [
        (0, 0, 0),
        (1, 1, 2),
        (16, 1, 17),
    ]
    plain, chain, refused = records
    assert "speculative.steps" in refused["error"] and "speed" not in refused
    assert plain["accept_length"] == 1 and 1 <= chain["accept_length"] <= 2
    for one in (plain, chain):
        assert one["batch_size"] == 2 and one["completion_tokens"] == 8
        assert one["tokens_per_s"] > 0 and one["step_time"] > 0
        assert one["speed"] == pytest.approx(one["tokens_per_s"] / 2, rel=0.01)
    assert "accept_length" in capsys.readouterr().out
    output.unlink()
    chosen = ["--start", "1", "--end", "2", "--simulate-accept-rates", "1,0.5"]
    assert main([*command, *chosen]) == 0
    (again,) = map(json.loads, output.read_text().splitlines())
    assert (again["steps"], again["accept_length"]) == (1, 2.0), "every first draft is accepted"
    assert main([*command, "--simulate-accept-length", "0.5"]) == 2
    assert main([*command, "--start", "3"]) == 2


def test_f18_tune_writes_a_table_that_an_engine_takes(
    tmp_path: Path, prompts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "costs.json"
    command = ["tune", "speculative", *ENGINE, *SMALL, *prompts, "--output", str(output)]
    command += ["--batch-size", "1", "2", "--steps", "2", "--topk", "1", "--num-draft-tokens", "3"]
    assert main(command) == 0
    assert "fastest drafts" in capsys.readouterr().out
    stored = json.loads(output.read_text())
    assert {(one["batch_size"], one["draft_tokens"]) for one in stored["measured"]} == {
        (rows, tokens) for rows in (1, 2) for tokens in (1, 2, 3)
    }
    assert set(stored["fastest"]) == {"1", "2"}
    drafts = {"use": "nextn", "steps": 2, "cost_table": str(output)}
    plan = make_plan({"model": "embedded", "device": "cpu", "speculative": drafts})
    assert plan.draft_costs == DraftCosts.read(str(output))
    # finished measurements are kept: the next run starts no engine
    assert main(command) == 0
    assert "tokens/s, accept" not in capsys.readouterr().out
    assert json.loads(output.read_text()) == stored
    assert main([*command, "--output-len", "9"]) == 2
    assert "measured with other options" in capsys.readouterr().err


def test_tune_simulates_an_acceptance(
    tmp_path: Path, prompts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Another acceptance is another measurement."""
    output = tmp_path / "costs.json"
    command = ["tune", "speculative", *ENGINE, *SMALL, *prompts, "--output", str(output)]
    command += ["--batch-size", "1", "--steps", "1", "--topk", "1", "--num-draft-tokens", "2"]
    assert main([*command, "--simulate-accept-length", "2.6"]) == 0
    lengths = [one["accept_length"] for one in json.loads(output.read_text())["measured"]]
    assert lengths == [1.0, 2.0], "one draft gains two tokens at most"
    capsys.readouterr()
    assert main(command) == 2
    assert "measured with other options" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["speculative", "--rows", "4"], "speculative has no option --rows"),
        (["speculative", "--ray"], "speculative has no option --ray"),
        (["speculative", "--batch-size", "0"], "a number below 1"),
        (["speculative", "--topk", "1", "--steps", "3", "--num-draft-tokens", "2"], "no size"),
        (["dense", "--steps", "1"], "a tuner of kernels has no option --steps"),
        (
            ["dense", "--simulate-accept-length", "2"],
            "a tuner of kernels has no option --simulate-accept-length",
        ),
    ],
)
def test_options_of_other_tuners_are_refused(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *words]) == 2
    assert reason in capsys.readouterr().err


def test_the_fastest_size_and_the_costs_follow_from_the_records() -> None:
    chain = DraftShape.chain(1)
    records = {
        (rows, shape): {"tokens_per_s": speed, "step_seconds": seconds}
        for rows, shape, speed, seconds in (
            (4, chain, 9.0, 0.5),
            (1, NO_DRAFTS, 3.0, 0.3),
            (1, chain, 5.0, 0.6),
            (4, NO_DRAFTS, 10.0, 0.4),
        )
    }
    assert choices_of(records) == {1: chain, 4: NO_DRAFTS}
    costs = costs_of(records)
    found = costs.of(chain)
    assert found is not None and found.rows == (1, 4)
    assert found.seconds == (0.6, 0.6), "more rows cost no less"
