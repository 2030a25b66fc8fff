"""``bench serving`` and ``bench offline`` on a small file in ShareGPT's published format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.facts.model_folder import embedded_path
from glowplug.core.text.tokenizer import Tokenizer
from glowplug.entrypoints.bench.load.local_server import LocalServer
from glowplug.entrypoints.cli.main import main

EMBEDDED = embedded_path()
TALKS = [
    ("What is 17 + 25? Please show the sum.", "The sum of 17 and 25 is 42."),
    ("Sort these numbers: 9 4 7 1", "1, 4, 7, 9 are the numbers in order."),
    ("hi", "This prompt is too short for the published filter."),
    ("Reverse this list: cup, pen, nail", "nail, pen, cup is the reversed list."),
    ("word " * 900, "This prompt is longer than the engine's context."),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with five conversations of two and three turns, and one without an answer."""
    entries = [
        {
            "id": f"talk_{number}",
            "conversations": [
                {"from": "human", "value": question},
                {"from": "gpt", "value": answer},
                *([{"from": "human", "value": "Thank you."}] if number == 1 else []),
            ],
        }
        for number, (question, answer) in enumerate(TALKS)
    ]
    entries.append({"id": "cut", "conversations": [{"from": "human", "value": "No answer."}]})
    path = tmp_path / "ShareGPT_V3_unfiltered_cleaned_split.json"
    path.write_text(json.dumps(entries))
    return path


def options(file: Path, output: Path) -> list[str]:
    """Return the options of a run that leaves out what exceeds the engine's context."""
    dataset = ["--dataset-name", "sharegpt", "--dataset-path", str(file), "--no-oversample"]
    limits = ["--sharegpt-context-len", "256", "--disable-shuffle", "--num-prompts", "9"]
    return [*dataset, *limits, "--output-file", str(output)]


def lengths() -> list[tuple[int, int]]:
    """Return the tokens of prompt and answer of the conversations that pass the filters."""
    tokenizer = Tokenizer.from_folder(EMBEDDED)
    fitting = [TALKS[number] for number in (0, 1, 3)]
    return [
        (len(tokenizer.encode(prompt)), len(tokenizer.encode(answer, add_special_tokens=False)))
        for prompt, answer in fitting
    ]


def test_a_server_gets_the_conversations_of_the_file(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "serving.jsonl"
    words = ["--tokenizer", str(EMBEDDED), "--max-concurrency", "2", "--request-rate", "50"]
    with LocalServer({"model": "embedded", "device": "cpu"}, threads=1) as server:
        given = ["bench", "serving", "--base-url", server.base_url, *words]
        assert main([*given, "--output-details", *options(file, output)]) == 0
        chat = ["--backend", "glowplug-chat", "--sharegpt-output-len", "5"]
        assert main([*given, *chat, *options(file, output)]) == 0
    whole, short = (json.loads(line) for line in output.read_text().splitlines())
    sizes = lengths()
    assert whole["dataset_name"] == "sharegpt" and whole["completed"] == whole["num_prompts"] == 3
    assert sorted(zip(whole["input_lens"], whole["output_lens"])) == sorted(sizes)
    assert whole["total_output_tokens"] == sum(answer for _, answer in sizes)
    assert whole["total_output_tokens_retokenized"] > 0 and whole["max_concurrent_requests"] <= 2
    assert short["total_output_tokens"] == 15
    assert short["total_input_tokens"] > whole["total_input_tokens"], "the chat template adds some"
    assert "Successful requests:" in capsys.readouterr().out


def test_the_offline_engine_gets_the_conversations_of_the_file(file: Path, tmp_path: Path) -> None:
    output = tmp_path / "offline.jsonl"
    engine = ["bench", "offline", "--model", "embedded", "--device", "cpu", "--repeat", "1"]
    assert main([*engine, "--skip-warmup", *options(file, output)]) == 0
    found: dict[str, Any] = json.loads(output.read_text())
    assert found["num_prompts"] == 3 and found["failed"] == 0
    assert found["total_input_tokens"] == sum(prompt for prompt, _ in lengths())
    assert found["total_output_tokens"] == sum(answer for _, answer in lengths())
    rate = found["num_prompts"] / found["duration"]
    assert found["request_throughput"] == pytest.approx(rate)


def test_a_file_that_is_missing_is_an_error(tmp_path: Path) -> None:
    missing = options(tmp_path / "none.json", tmp_path / "x.jsonl")
    engine = ["bench", "offline", "--model", "embedded", "--device", "cpu"]
    assert main([*engine, *missing]) == 2
