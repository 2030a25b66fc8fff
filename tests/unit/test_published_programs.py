"""Programs and options under the names that SGLang publishes."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from glowplug.entrypoints.bench.load.local_server import LocalServer
from glowplug.entrypoints.cli.main import main
from tests.support.source_tree import ROOT

#: module -> words of the command that it runs
PROGRAMS = {
    "launch_server": ["serve"],
    "bench_one_batch": ["bench", "one-batch"],
    "bench_one_batch_server": ["bench", "one-batch-server"],
    "bench_offline_throughput": ["bench", "offline"],
    "bench_serving": ["bench", "serving"],
    "bench_speculative": ["bench", "speculative"],
    "export_deepseek_nextn": ["export-nextn"],
    "tuning_fused_moe_triton": ["tune", "fused_moe_triton"],
    "tuning_block_wise_fp8": ["tune", "block_wise_fp8"],
}
V3 = str(ROOT / "models" / "shapes" / "deepseek-v3.json")
LITE = str(ROOT / "models" / "shapes" / "deepseek-v2-lite.json")


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_published_program_is_a_command(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process has the command's own command line, from which it starts further processes."""
    words = PROGRAMS[name]
    monkeypatch.setattr(sys, "argv", ["program", "--help"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_module(f"glowplug.{name}", run_name="__main__")
    assert caught.value.code == 0
    assert sys.argv[1:] == [*words, "--help"]
    shown = [word for word in words if words[0] != "tune" or word == "tune"]
    assert f"usage: glowplug {' '.join(shown)} " in " ".join(capsys.readouterr().out.split())


def test_a_published_program_runs_nothing_when_it_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Spawned ranks import the main module."""
    monkeypatch.setattr(sys, "argv", ["program", "--no-such-option"])
    for name in PROGRAMS:
        runpy.run_module(f"glowplug.{name}", run_name="__mp_main__")
    assert sys.argv == ["program", "--no-such-option"]


# ---- one batch over HTTP -------------------------------------------------------------------------

BATCH = ["--batch-size", "1", "3", "--input", "9", "--output", "4"]


def one_batch_server(*words: str) -> int:
    return main(["bench", "one-batch-server", *words])


def test_one_batch_is_measured_on_a_server_that_is_started_and_on_a_running_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "lines.jsonl"
    output = ["--result-filename", str(lines), "--run-name", "here"]
    assert one_batch_server("--model", "embedded", *BATCH, *output) == 0
    assert "overall_throughput" in capsys.readouterr().out
    with LocalServer({"model": "embedded"}) as server:
        running = ["--model", "None", "--base-url", server.base_url, "--skip-warmup"]
        assert one_batch_server(*running, *BATCH, *output) == 0
        assert one_batch_server(*running, "--input", "1000000", *output) == 2
        assert "POST /generate answered 400" in capsys.readouterr().err
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [one["batch_size"] for one in records] == [1, 3, 1, 3]
    for one in records:
        assert one["run_name"] == "here" and (one["input_len"], one["output_len"]) == (9, 4)
        tokens = one["batch_size"] * 4
        assert one["output_throughput"] == pytest.approx(tokens / one["latency"])
        assert one["overall_throughput"] == pytest.approx(13 * one["batch_size"] / one["latency"])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--model", "None"], "needs --base-url"),
        (
            ["--base-url", "http://127.0.0.1:1", "--tp", "2"],
            "its parallel cannot be set: leave the engine options out",
        ),
        (["--base-url", "http://127.0.0.1:1"], "refused"),
        (["--batch-size", "0"], "must be at least 1"),
        (["--facts", "1xh200"], "the engine runs on this machine"),
        (["--plugin", "tests.plugins.sleepy_tuner"], "start the server by glowplug serve"),
    ],
)
def test_one_batch_on_a_server_says_why_it_cannot_be_measured(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert one_batch_server(*words) == 2
    assert reason.lower() in capsys.readouterr().err.lower()


# ---- the offline engine --------------------------------------------------------------------------


def offline(tmp_path: Path, *words: str) -> dict[str, object]:
    out = tmp_path / "out.jsonl"
    out.unlink(missing_ok=True)
    given = ["--model-path", "embedded", "--repeat", "1", "--skip-warmup", "--backend", "engine"]
    assert main(["bench", "offline", *given, "--result-filename", str(out), *words]) == 0
    record: dict[str, object] = json.loads(out.read_text())
    return record


def test_offline_throughput_of_random_prompts_and_of_a_file(tmp_path: Path) -> None:
    words = "--dataset-name random --random-input 7 --random-output 3 --num-prompts 2".split()
    found = offline(tmp_path, *words)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (14, 6)
    (file := tmp_path / "prompts.jsonl").write_text(
        '{"prompt": "What is 17 + 25?", "output_tokens": 5}\n{"prompt": "Sort: 9 4 7"}\n'
    )
    of_file = ["--dataset-name", "custom", "--dataset-path", str(file)]
    found = offline(tmp_path, *of_file, "--random-output", "2", "--num-prompts", "3")
    assert found["total_output_tokens"] == 5 + 2 + 5 and found["failed"] == 0
    ends = offline(
        tmp_path, *of_file, "--random-output", "64", "--num-prompts", "2", "--disable-ignore-eos"
    )
    assert int(str(ends["total_output_tokens"])) < 5 + 64 and ends["failed"] == 0


def test_a_file_of_prompts_needs_its_two_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "offline", "--dataset-name", "custom"]) == 2
    assert "need each other" in capsys.readouterr().err


# ---- tuning --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "label", "dtype"),
    [
        (f"fused_moe_triton --model {V3} --tp-size 8 --dtype fp8_w8a8", "E=256,N=256", "fp8_w8a8"),
        (f"fused_moe_triton --model {V3} --tp-size 8", "E=256,N=256", "fp8_w8a8"),
        (f"moe --model {V3} --tp-size 8 --dtype fp8_w8a8", "E=256,N=256", "fp8_w8a8"),
        (f"fused_moe_triton --model {LITE} -tp 2 --dtype fp8_w8a8", "E=64,N=768", "fp8_w8a8"),
        (f"fused_moe_triton --model {LITE} --dtype auto", "E=64,N=1408", "float32"),
        (f"fused_moe_triton --model {LITE} --dtype bfloat16", "E=64,N=1408", "bfloat16"),
        ("block_wise_fp8", "N=7168,K=2304", "fp8_w8a8"),
        ("block_wise_fp8 --tp-size 16 --out-dtype half", "N=7168,K=1152", "fp8_w8a8"),
        (
            f"block_wise_fp8 --model {LITE} --block-n 128 --block-k 128",
            "N=21888,K=2048",
            "fp8_w8a8",
        ),
    ],
)
def test_a_tuning_scripts_options_lead_to_its_tables(
    words: str, label: str, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*words.split(), "--device", "cpu", "--batch-size", "1", "64", "--list"]
    assert main(["tune", *given]) == 0
    tables = capsys.readouterr().out
    found = [line for line in tables.splitlines() if line.startswith(label)]
    assert found and all(f"dtype={dtype}" in line and " of 2 in " in line for line in found), tables


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (f"fused_moe_triton --model {V3} --tp-size 8 --dtype fp8_w8a8 --tune", "measures on cuda"),
        (f"fused_moe_triton --model {V3} --dtype int8_w8a8", "in this format have no tables"),
        ("block_wise_fp8 --input-type int8", "glowplug tune int8-gemm"),
        ("block_wise_fp8 --block-k 64", "blocks have 128 rows and columns"),
        ("block_wise_fp8 --tune --list", "contradict each other"),
        ("speculative --block-n 128", "speculative has no option --block-n: leave it out"),
    ],
)
def test_a_tuning_scripts_option_is_refused_with_the_reason(
    words: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *words.split(), "--device", "cpu"]) == 2
    assert reason in capsys.readouterr().err
