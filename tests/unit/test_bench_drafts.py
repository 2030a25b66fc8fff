"""Benchmarks in this process record the acceptance of drafts and can simulate one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.plugin.registry import load_plugins
from glowplug.entrypoints import bench
from glowplug.entrypoints.bench.others import drafts
from glowplug.entrypoints.bench.others.floor import step_bytes
from glowplug.entrypoints.bench.others.in_process import BatchTimes
from glowplug.entrypoints.bench.others.step_floor import draft_step_bytes, nextn_reads
from tests.support.tiny import write_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(
        tmp_path_factory.mktemp("v3"), "v3", vocab_size=64, num_nextn_predict_layers=1
    )


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.configure(parser)
    return parser.parse_args(list(words))


def record(folder: Path, tmp_path: Path, *words: str) -> dict[str, Any]:
    """Run a benchmark of a random model with three drafts, and return its only record."""
    lines = tmp_path / "lines.jsonl"
    base = f"--model {folder} --device cpu --dtype float32 --set weights.use=random"
    chain = (
        "--speculative-algorithm NEXTN --speculative-num-steps 3 --set speculative.adaptive=false"
    )
    command, *rest = words
    given = [*base.split(), *chain.split(), "--output-file", str(lines), *rest]
    assert bench.run(parsed(command, *given)) == 0
    (found,) = map(json.loads, lines.read_text().splitlines())
    return dict(found)


SHAPE = "--batch-size 4 --input-len 8 --output-len 160 --repeat 2"
LOAD = "--num-prompts 6 --input-len 8 --output-len 120 --repeat 1"


@pytest.mark.parametrize("command", ["one-batch " + SHAPE, "offline " + LOAD])
def test_a_simulated_length_is_the_recorded_one(folder: Path, tmp_path: Path, command: str) -> None:
    words = [*command.split(), "--simulate-accept-length", "2.6"]
    found = record(folder, tmp_path, *words)
    assert found["accept_length"] == pytest.approx(2.6, abs=0.1)
    assert found["accept_rates"] == pytest.approx([1.0, 0.6, 0.0], abs=0.1)
    assert list(found["draft_shapes"]) == ["3/1/4"]


def test_rates_by_position_and_tokens_of_a_step(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The floor of a step includes the passes of the draft."""
    words = [*("one-batch " + SHAPE).split(), "--simulate-accept-rates", "1,0.5,1"]
    found = record(folder, tmp_path, *words, "--bandwidth", "0.01")
    assert found["accept_rates"] == pytest.approx([1.0, 0.5, 0.5], abs=0.1)
    # a step gains the accepted drafts as well
    tokens = found["decode_tokens_per_s"] * found["decode_median_ms"] / 1e3 / 4
    assert tokens == pytest.approx(found["accept_length"], rel=0.12)
    facts = load_plugins(entry_points=False).read_model(str(folder)).facts
    of_step = draft_step_bytes(
        facts, DraftShape.chain(3), 4, 8, nextn_reads(facts), element=4, kv_element=4
    )
    plain = step_bytes(facts, 4, 8, element=4, kv_element=4)
    assert found["floor_gb"] * 1e9 == pytest.approx(of_step.total)
    allowed = found["accept_length"] * plain.total / of_step.total
    assert found["allowed_speedup"] == pytest.approx(allowed)
    assert "allowed_speedup" in capsys.readouterr().out


def test_the_model_s_own_acceptance_is_recorded(folder: Path, tmp_path: Path) -> None:
    found = record(folder, tmp_path, *("offline " + LOAD).split())
    assert 1 <= found["accept_length"] < 1.5 and len(found["accept_rates"]) == 3


def test_without_drafts_the_keys_are_empty(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    words = f"offline --model embedded --device cpu --output-file {lines} --num-prompts 2"
    assert bench.run(parsed(*words.split(), "--output-len", "4", "--repeat", "1")) == 0
    found = json.loads(lines.read_text())
    keys = ("accept_length", "accept_rates", "draft_shapes")
    assert [found[key] for key in keys] == [None] * 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--simulate-accept-length", "0.5"], "an accept length is at least 1"),
        (
            ["--simulate-accept-length", "2", "--simulate-accept-rates", "0.5"],
            "not both",
        ),
        (["--simulate-accept-length", "3"], "rates for 2 positions"),
    ],
)
@pytest.mark.parametrize("command", ["one-batch", "offline"])
def test_impossible_lengths_are_refused(
    folder: Path, command: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = f"--model {folder} --device cpu --set weights.use=random"
    chain = "--speculative-algorithm NEXTN --speculative-num-steps 1"
    assert bench.run(parsed(command, *base.split(), *chain.split(), *words)) == 2
    assert said in capsys.readouterr().err


def test_rates_are_probabilities() -> None:
    for text in ("", "1.5", "0.5,x", "-0.1"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected probabilities"):
            drafts._rates(text)
    assert drafts._rates("0.8,0.5") == (0.8, 0.5)


def test_the_tokens_of_settling_steps_do_not_count() -> None:
    times = BatchTimes(2, 8, 99, 1.0, (1.0,) * 20, 99.0, (8,) * 4 + (3,) * 16)
    assert times.decode_throughput == pytest.approx(3.0)


def test_a_soak_records_the_acceptance_of_its_run(folder: Path, tmp_path: Path) -> None:
    result = tmp_path / "soak.json"
    base = f"--model {folder} --device cpu --dtype float32 --set weights.use=random"
    chain = "--speculative-algorithm NEXTN --speculative-num-steps 2"
    base += " --set speculative.adaptive=false"
    words = f"{base} {chain} --minutes 0.02 --pauses 1 --context-length 128 --output-file {result}"
    assert bench.run(parsed("soak", *words.split())) == 0
    found = json.loads(result.read_text())
    verified = found["draft_shapes"]["2/1/3"]
    assert 2 * verified == found["drafted_tokens"] > 0
    assert found["accept_length"] == pytest.approx(1 + found["accepted_tokens"] / verified)
