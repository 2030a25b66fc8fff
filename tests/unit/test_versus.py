"""``glowplug bench versus`` with stand-ins for its peers: command lines, outputs and turns."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from glowplug.entrypoints.bench.others import own_load, turns
from glowplug.entrypoints.bench.others.peer_engines import (
    ENGINES,
    ComparedDrafts,
    ServedRun,
    StaticRun,
    interpreters,
)
from glowplug.entrypoints.bench.others.turns import MeasuredProgram, in_turns
from glowplug.entrypoints.cli.main import main
from tests.support.source_tree import ROOT
from tests.support.waiting import LIMIT, until

#: stand-in for an interpreter with SGLang: its tools' options, their output and files, and the
#: times of their work
SGLANG = """#!{python}
import json, os, pathlib, runpy, sys, time
words = sys.argv[1:]
if words[0] == "-c":
    print("version 0.0.1")
elif words[1] == "sglang.bench_one_batch":
    import argparse
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--model-path", "--result-filename", "--mem-fraction-static", "--tp-size"):
        parser.add_argument(name)
    for name in ("--batch-size", "--input-len", "--output-len", "--cuda-graph-bs",
                 "--piecewise-cuda-graph-tokens"):
        parser.add_argument(name, type=int, nargs="+")
    args = parser.parse_args(words[2:])
    print("Warmup ...", flush=True)
    trace = pathlib.Path({trace!r})
    while "go sglang" not in trace.read_text():
        time.sleep(0.01)
    with trace.open("a", buffering=1) as file:
        for _ in range(10):
            file.write("sglang works\\n")
    with open(args.result_filename, "a") as file:
        for number, batch in enumerate(args.batch_size):
            file.write(json.dumps({{"batch_size": batch, "input_len": args.input_len[0],
                                   "median_decode_latency": (0.004 if number % 2 else 0.008),
                                   "prefill_throughput": 50.0 * batch}}) + "\\n")
elif words[1] == "sglang.launch_server":
    with pathlib.Path({trace!r}).open("a") as file:
        for name in sorted(os.environ):
            if name.startswith("SGLANG_SIMULATE"):
                print(name, os.environ[name], file=file)
    sys.path.insert(0, {root!r})
    port = words[words.index("--port") + 1]
    sys.argv = ["fake_server", port, "1.0", "/nonexistent", "/nonexistent"]
    runpy.run_module("tests.e2e.fake_server", run_name="__main__")
"""

#: stand-in for vLLM; only the engine's steps move its clock on
VLLM = """
import pathlib, time
now = 0.0
time.perf_counter = lambda: now
trace = pathlib.Path({trace!r})
# as transformers imports a package of a name that a file of ours has, too
from kernels import THEIRS
class SamplingParams:
    def __init__(self, **given):
        self.tokens = given["max_tokens"]
class Engine:
    def step(self):
        global now
        while {waits} and "go vllm" not in trace.read_text():
            time.sleep(0.01)
        now += 0.03 if self.first else 0.01
        self.first = False
        with trace.open("a") as file:
            file.write("vllm works\\n")
class LLM:
    def __init__(self, model, **settings):
        assert settings["max_num_seqs"] == 2 and settings["enforce_eager"] and settings["seed"] == 0
        self.llm_engine = Engine()
    def generate(self, prompts, params, use_tqdm):
        assert all(len(prompt["prompt_token_ids"]) == 12 for prompt in prompts)
        largest = max(max(prompt["prompt_token_ids"]) for prompt in prompts)
        assert largest < 2048, "the embedded model's vocabulary"
        self.llm_engine.first = True
        for _ in range(params.tokens):
            self.llm_engine.step()
"""


@pytest.fixture
def peers(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Path]:
    """Interpreters of the stand-ins, and the file in which they note their work and this process
    their turns.

    With the parameter True each stand-in works only after its turn has come.
    """
    trace, site = tmp_path / "trace", tmp_path / "site"
    trace.touch()

    def noted(name: str) -> Callable[..., None]:
        method = getattr(MeasuredProgram, name)

        def note(self: MeasuredProgram, *given: float) -> None:
            with trace.open("a") as file:
                file.write(f"{name} {self.name}\n")
            method(self, *given)

        return note

    for name in ("go", "end"):
        monkeypatch.setattr(MeasuredProgram, name, noted(name))
    monkeypatch.setattr(turns, "SETTLING_SECONDS", 0.1)
    monkeypatch.setattr(own_load, "WARM_PROMPTS", 4)
    (site / "vllm").mkdir(parents=True)
    waits = getattr(request, "param", False)
    (site / "vllm" / "__init__.py").write_text(VLLM.format(trace=str(trace), waits=waits))
    (site / "kernels.py").write_text("THEIRS = True\n")
    (site / "vllm-0.0.2.dist-info").mkdir()
    (site / "vllm-0.0.2.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm\nVersion: 0.0.2\n"
    )
    sglang, vllm = tmp_path / "sglang", tmp_path / "vllm"
    sglang.write_text(SGLANG.format(python=sys.executable, trace=str(trace), root=str(ROOT)))
    vllm.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec {sys.executable} "$@"\n')
    for script in (sglang, vllm):
        script.chmod(0o755)
    return {"sglang": sglang, "vllm": vllm, "trace": trace}


@pytest.mark.parametrize("peers", [True], indirect=True)
def test_static_batches_side_by_side(
    peers: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    out = tmp_path / "out"
    status = main(
        [
            "bench",
            "versus",
            "--model",
            "embedded",
            "--batch-size",
            "1",
            "2",
            "--input-len",
            "12",
            "--output-len",
            "20",
            "--repeat",
            "1",
            "--peer",
            f"sglang={peers['sglang']}",
            "--peer",
            f"vllm={peers['vllm']}",
            "--together",
            "--output-dir",
            str(out),
            "--options",
            "glowplug=--device cpu",
            "--options",
            "sglang.static=--mem-fraction-static 0.5",
            "--options",
            "vllm.static=--engine '{\"enforce_eager\": true}'",
        ]
    )
    said = capsys.readouterr()
    assert status == 0, said.err
    record = json.loads((out / "static.json").read_text())
    steps = record["tables"]["decode step, ms"]
    assert [row["point"] for row in steps] == [1, 2]
    for row in steps:
        assert row["sglang"] == 4.0  # the second of two runs of a shape
        assert (
            row["vllm"] == 10.0 and row["glowplug"] > 0
        )  # without the first step of its prompt, which is longer
        assert row["times_best_peer"] == pytest.approx(4.0 / row["glowplug"])
    assert record["conditions"]["versions"] == {
        "glowplug": "0.1.0",
        "sglang": "0.0.1",
        "vllm": "0.0.2",
    }
    assert "one-batch" not in record["conditions"]["command"] and "card" in record["conditions"]
    assert "--mem-fraction-static 0.5" in record["conditions"]["commands"]["sglang, static"]
    assert record["conditions"]["order"].startswith("all loaded at once")
    assert (out / "static.md").read_text().strip() in said.out
    turn, worked = "", []
    for first, second in (line.split() for line in peers["trace"].read_text().splitlines()):
        if first in ("go", "end"):
            turn = second if first == "go" else ""
        else:
            assert first == turn, "the others wait while one is measured"
            worked.append(first)
    assert set(worked) == {"sglang", "vllm"}


def test_servers_one_after_another(
    peers: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    out = tmp_path / "out"
    status = main(
        [
            "bench",
            "versus",
            "--model",
            "embedded",
            "--batch-size",
            "--serving",
            "1",
            "2",
            "--num-prompts",
            "2",
            "4",
            "--input-len",
            "8",
            "--serving-output-len",
            "6",
            "--peer",
            f"sglang={peers['sglang']}",
            "--options",
            "glowplug=--device cpu",
            "--offline",
            "--output-dir",
            str(out),
        ]
    )
    said = capsys.readouterr()
    assert status == 0, said.err
    record = json.loads((out / "serving.json").read_text())
    rates = record["tables"]["serving, output tokens/s"]
    assert [row["point"] for row in rates] == [1, 2] and all(
        row["glowplug"] and row["sglang"] for row in rates
    )
    assert all(0 < row["share_of_floor"] < 1 for row in rates)
    assert (
        record["tables"]["serving beside the offline engine, output tokens/s"][0][
            "share_of_offline"
        ]
        > 0
    )
    assert [line["completed"] for line in record["runs"]["sglang"]] == [2, 4]
    assert (
        record["conditions"]["requests"] == {"1": 2, "2": 4} and not (out / "static.json").exists()
    )


def test_servers_with_a_simulated_acceptance(
    peers: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All engines get the same drafts and the same accept length; ours has it, on a server and
    without one.
    """
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    out = tmp_path / "out"
    words = "--serving 2 --num-prompts 6 --input-len 8 --serving-output-len 80 --offline"
    status = main(
        [
            *("bench", "versus", "--model", "embedded", *words.split()),
            *("--draft-steps", "3", "--simulate-accept-length", "2.6"),
            *("--peer", f"sglang={peers['sglang']}", "--options", "glowplug=--device cpu"),
            *("--output-dir", str(out)),
        ]
    )
    assert status == 0, capsys.readouterr().err
    record = json.loads((out / "serving.json").read_text())
    assert record["conditions"]["drafts"] == {"steps": 3, "accept_length": 2.6}
    (ours,) = record["runs"]["glowplug"]
    assert ours["accept_length"] == pytest.approx(2.6, abs=0.15)
    assert ours["accept_rates"] == pytest.approx([1.0, 0.6, 0.0], abs=0.15)
    offline = json.loads((out / "offline-glowplug.jsonl").read_text())
    assert offline["accept_length"] == pytest.approx(2.6, abs=0.15)
    (row,) = record["tables"]["serving, output tokens/s"]
    assert 0 < row["share_of_floor"] < 1
    given = dict(
        line.split()
        for line in peers["trace"].read_text().splitlines()
        if line.startswith("SGLANG_")
    )
    assert given == {
        "SGLANG_SIMULATE_ACC_LEN": "2.6",
        "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
        "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
    }
    commands = record["conditions"]["commands"]
    assert "--speculative-num-draft-tokens 4" in commands["sglang, serving"]


def test_drafts_in_the_words_of_each_engine() -> None:
    run = ServedRun("/m", 7, 8, 512, drafts=ComparedDrafts(1, 1.85))
    words = {name: engine.server(run) for name, engine in ENGINES.items()}
    after = words["vllm"].index("--speculative-config") + 1
    assert json.loads(words["vllm"][after]) == {
        "method": "mtp",
        "num_speculative_tokens": 1,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 1.85,
    }
    assert (
        words["sglang"][-8:]
        == (
            "--speculative-algorithm NEXTN --speculative-num-steps 1 --speculative-eagle-topk 1 "
            "--speculative-num-draft-tokens 2"
        ).split()
    )
    assert "speculative.simulate_accept_rates=[0.85]" in words["glowplug"]
    own = ServedRun("/m", 7, 8, 512, drafts=ComparedDrafts(2))
    for name, engine in ENGINES.items():
        text = " ".join(engine.server(own))
        assert "simulate" not in text and "synthetic" not in text and "peculative" in text, name
        assert engine.draft_environment(ComparedDrafts(2)) == {}
        assert "peculative" not in " ".join(engine.server(ServedRun("/m", 7, 8, 512)))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--simulate-accept-length", "2", "--serving", "1"], "give --draft-steps as well"),
        (
            ["--draft-steps", "1", "--simulate-accept-length", "2.5", "--serving", "1"],
            "gains 1 to 2 tokens",
        ),
        (["--draft-steps", "0", "--serving", "1"], "--draft-steps must be at least 1"),
        (["--draft-steps", "2"], "nothing to measure"),
        (
            ["--draft-steps", "2", "--batch-size", "1", "--serving", "1"],
            "static batches are measured without drafts",
        ),
        (
            ["--peer", "tgi=/usr/bin/python3"],
            "expected NAME=PYTHON, with each of sglang, vllm at most once",
        ),
        (["--peer", "vllm=/nowhere/python"], "No such file or directory"),
        (["--peer", f"sglang={sys.executable}"], "sglang is not installed there"),
        (["--options", "vllm.speed=--fast"], "expected NAME=WORDS or NAME.KIND=WORDS"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--batch-size"], "nothing to measure"),
        (["--batch-size", "0"], "at least 1"),
        (["--floor-card", "TI-83"], "TI-83: bandwidth and matrix rate"),
        (["--serving", "1", "8", "--num-prompts", "4"], "one value for each value of --serving"),
    ],
)
def test_options_without_a_comparison_are_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "bench",
                "versus",
                "--model",
                "embedded",
                "--output-dir",
                str(tmp_path / "out"),
                *words,
            ]
        )
        == 2
    )
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("together", "script", "said"),
    [
        (True, "echo out of memory; exit 3", "sglang ended with 3 while it was loading:"),
        pytest.param(
            *(False, "echo out of memory; exit 3", "sglang ended with 3 while it was loading:"),
            marks=pytest.mark.slow,  # 5 s; the one before fails so, the next one is alone, too
        ),
        (False, 'echo "Warmup ..."; echo out of memory; exit 4', "sglang ended with 4:"),
    ],
)
def test_an_engine_that_fails_is_left_out(
    together: bool,
    script: str,
    said: str,
    peers: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    peers["sglang"].write_text(f'#!/bin/sh\n[ "$1" = -c ] && echo version 1 && exit\n{script}\n')
    words = [
        "bench",
        "versus",
        "--model",
        "embedded",
        "--peer",
        f"sglang={peers['sglang']}",
        "--batch-size",
        "2",
        "--peer",
        f"vllm={peers['vllm']}",
        "--options",
        "vllm.static=--engine '{\"enforce_eager\": true}'",
        "--input-len",
        "12",
        "--output-len",
        "12",
        "--repeat",
        "1",
        *["--together"][:together],
    ]
    assert (
        main([*words, "--output-dir", str(tmp_path / "out"), "--options", "glowplug=--device cpu"])
        == 1
    )
    error = capsys.readouterr().err
    assert said in error and "out of memory" in error
    record = json.loads((tmp_path / "out" / "static.json").read_text())
    (row,) = record["tables"]["decode step, ms"]
    assert row["glowplug"] > 0 and row["vllm"] > 0 and "sglang" not in row
    assert record["conditions"]["failed"] == {"sglang": said}


def test_a_tool_without_figures_has_failed(
    peers: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    peers["sglang"].write_text(
        '#!/bin/sh\n[ "$1" = -c ] && echo version 1 && exit\n'
        'echo "Warmup ..."; while [ "$1" != --result-filename ]; do shift; done; : > "$2"\n'
    )
    assert (
        main(
            [
                "bench",
                "versus",
                "--model",
                "embedded",
                "--peer",
                f"sglang={peers['sglang']}",
                "--batch-size",
                "1",
                "--input-len",
                "8",
                "--output-len",
                "6",
                "--repeat",
                "1",
                "--options",
                "glowplug=--device cpu",
                "--output-dir",
                str(tmp_path / "out"),
            ]
        )
        == 1
    )
    assert "static-sglang.json has no result" in capsys.readouterr().err
    assert (tmp_path / "out" / "static.json").exists()


def test_without_ours_there_is_nothing_to_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    assert (
        main(
            [
                "bench",
                "versus",
                "--model",
                "embedded",
                "--batch-size",
                "1",
                "--options",
                "glowplug=--set attention.use=nobody",
                "--output-dir",
                str(tmp_path / "out"),
            ]
        )
        == 1
    )
    error = capsys.readouterr().err
    assert (
        "glowplug ended with" in error
        and "glowplug was not measured, so there is nothing to compare" in error
    )
    assert not (tmp_path / "out" / "static.json").exists()


def looping(tmp_path: Path, name: str) -> MeasuredProgram:
    code = (
        "import os, pathlib, subprocess, sys, time\nprint(os.getpid())\n"  # with a child of its own
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid)\nwhile True:\n"
        f"    pathlib.Path({str(tmp_path / name)!r}).write_text(str(time.time()))\n"
        "    time.sleep(0.01)"
    )
    return MeasuredProgram(
        name,
        [sys.executable, "-c", code],
        tmp_path / f"{name}.log",
        {},
        lambda log: log.count("\n") >= 2,
    )


def test_programs_stand_still_until_their_turn_and_leave_nothing(tmp_path: Path) -> None:
    import psutil

    def state(pid: int) -> str:
        try:
            return str(psutil.Process(pid).status())
        except psutil.NoSuchProcess:
            return psutil.STATUS_DEAD

    def family(name: str) -> list[int]:
        return [int(pid) for pid in (tmp_path / f"{name}.log").read_text().split()]

    gone, had = {psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE}, []
    for turn in in_turns(
        [lambda name=name: looping(tmp_path, name) for name in ("one", "two")], True, LIMIT
    ):
        other = {"one": "two", "two": "one"}[turn.name]
        still = gone if other in had else {psutil.STATUS_STOPPED}
        until(
            lambda other=other, still=still: {*map(state, family(other))} <= still,
            f"{other} stands still",
        )
        before = (tmp_path / turn.name).read_text()
        until(
            lambda turn=turn, before=before: (tmp_path / turn.name).read_text() not in ("", before),
            f"{turn.name} works",
        )
        had.append(turn.name)
    assert had == ["one", "two"]
    until(lambda: {state(pid) for name in had for pid in family(name)} <= gone, "all have gone")


def test_a_program_that_does_not_load_is_named(tmp_path: Path) -> None:
    never = in_turns(
        [
            lambda: MeasuredProgram(
                "late",
                [sys.executable, "-c", "import time; time.sleep(60)"],
                tmp_path / "log",
                {},
                lambda log: False,
            )
        ],
        False,
        0.5,
    )
    with pytest.raises(RuntimeError, match="late was not loaded after 0.5 s"):
        next(never).check()


def test_command_lines_name_the_shapes() -> None:
    run = StaticRun("/m", (1, 8), 512, 64, 1000, 3, Path("/out/x.json"))
    words = {name: engine.static(run) for name, engine in ENGINES.items()}
    assert words["sglang"][words["sglang"].index("--batch-size") + 1 :][:4] == ["1", "1", "8", "8"]
    assert all("512" in found and "64" in found for found in words.values())
    served = ServedRun("/m", 31000, 256, 4096)
    assert all(
        {"31000", "256", "4096", "/m"} <= set(engine.server(served)) for engine in ENGINES.values()
    )
    assert list(interpreters(["vllm=/x/python"])) == ["glowplug", "vllm"]
