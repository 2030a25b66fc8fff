"""Setups of eight GPUs: the record of plans, the prediction, and the program that measures them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import eight_gpus_expected, whole_v3
from tests.gpu.eight_gpus import ablation_rows, all_setups, layouts, planned
from tests.gpu.eight_gpus_expected import CountedExchange, ExchangeTimes, expected, one_exchange
from tests.gpu.eight_gpus_runs import LARGE, SMALL, Run, measure, runs
from tests.support.source_tree import ROOT
from tests.support.waiting import until

RECORD = ROOT / "docs" / "benchmarks" / "eight-gpus-plan.json"
TOKENIZER = ROOT / "models" / "embedded" / "checkpoint"


# ---- plans ---------------------------------------------------------------------------------------


def test_the_record_has_the_plans(tmp_path: Path) -> None:
    """Write it anew with ``python -m tests.gpu.whole_v3 --dry`` if a plan has changed."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))["plans"]
    assert list(record) == [setup.name for setup in all_setups()]
    for setup in all_setups():
        assert json.loads(json.dumps(planned(setup, tmp_path))) == record[setup.name], setup.name


def test_every_setup_is_admitted_and_fits() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))["plans"]
    for name, one in record.items():
        assert "refused" not in one, name
        assert sum(one["bytes_per_rank"].values()) <= one["device_bytes"], name
        assert one["kv_tokens_per_group"] > 0
        eager = "--disable-cuda-graph" in one["options"]
        assert (one["graphs"]["use"] == "eager") == eager, name
        drafts = "NEXTN" in one["options"]
        assert ("draft weights" in one["bytes_per_rank"]) == drafts, name


def test_the_published_ablation_has_sixteen_rows() -> None:
    rows = ablation_rows()
    assert len(rows) == len(set(rows)) == 16
    assert not any(word.startswith("deepseek-ai") for row in rows for word in row)


# ---- prediction ----------------------------------------------------------------------------------


def test_the_page_has_the_predicted_numbers() -> None:
    """Each table row of the page is one of the computed rows, and the page says what it is."""
    text = (ROOT / "docs" / "benchmarks" / "eight-gpus.md").read_text(encoding="utf-8")
    assert "was measured on eight GPUs" in text and "prediction" in text
    for layout in layouts(8):
        for drafts in (False, True):
            title = f"### {layout}{', one draft' if drafts else ''}\n"
            part = text.partition(title)[2].partition("\n#")[0]
            for batch in eight_gpus_expected.BATCHES:
                one = expected(layout, batch, drafts)
                row = next(line for line in part.splitlines() if line.startswith(f"| {batch} |"))
                cells = [cell.strip() for cell in row.strip("|").split("|")]
                assert cells[-1] == f"{one.tokens_per_second:,.0f}"
                assert cells[1] == f"{one.gigabytes:.1f}"


def test_the_bytes_of_one_sequence_are_those_of_its_weights() -> None:
    """One user at TP 8, by hand: 8 of 256 experts and a shared one in 58 layers, in FP8."""
    one = expected("tp 8", 1, drafts=False)
    expert = 3 * 7168 * 2048 * (1 + 4 / 128**2)
    gates = 58 * 7168 * 256 * 2
    head = 129280 * 7168 * 2 / 8
    low = 7168 * (1536 + 576)
    heads = 16 * (1536 * 192 + 512 * 256 + 128 * 7168)
    attention = 61 * (low + heads) * (1 + 4 / 128**2)
    dense = 3 * 3 * 7168 * 18432 / 8 * (1 + 4 / 128**2)
    kv = 1152 * 61 * 576 * 2
    by_hand = 58 * 9 * expert / 8 + gates + head + attention + dense + kv
    assert one.gigabytes * 1e9 == pytest.approx(by_hand, rel=1e-6)
    assert one.read_ms == pytest.approx(by_hand / 4.3e9, rel=1e-6)


def test_drafts_read_more_and_gain_tokens() -> None:
    plain, drafts = (expected("tp 8", 32, one) for one in (False, True))
    assert drafts.gigabytes > plain.gigabytes and drafts.exchange_ms > plain.exchange_ms
    assert drafts.tokens == 1.85 and plain.tokens == 1.0


def test_an_exchange_lasts_as_long_as_one_with_as_many_received_bytes() -> None:
    rows = [
        {"operation": "all_reduce", "ranks": 2, "bytes": size, "us": us}
        for size, us in ((1000, 2.0), (7000, 3.0), (8000, 8.0), (70000, 80.0))
    ]
    times = ExchangeTimes(rows, "a table")
    small = CountedExchange("all_reduce", 8, 1000, 1)
    assert one_exchange(small, times) == pytest.approx(3e-6), "one shot receives 7,000 bytes"
    large = CountedExchange("all_reduce", 8, 8000, 1)
    assert one_exchange(large, times) == pytest.approx(6e-6), "two shots receive 7,000 bytes each"
    gather = CountedExchange("all_gather", 8, 8000, 1)
    assert one_exchange(gather, times) == pytest.approx(3e-6)


# ---- measurement ---------------------------------------------------------------------------------


def writing(result: Path) -> str:
    """Return a program that writes a result."""
    return f"open({str(result)!r}, 'w').write('{{\"tokens\": 7}}')"


def script(folder: Path, text: str, limit: float = 60.0, name: str = "one") -> Run:
    return Run(name, ("-c", text), folder / f"{name}.json", limit)


def test_a_run_leaves_its_result(tmp_path: Path) -> None:
    found = measure(script(tmp_path, writing(tmp_path / "one.json")), tmp_path, 60.0)
    assert found["state"] == "done" and found["result"] == {"tokens": 7} and "log" not in found


def test_a_run_that_fails_leaves_its_log(tmp_path: Path) -> None:
    run = script(tmp_path, "print('the reason'); raise SystemExit(3)")
    found = measure(run, tmp_path, run.limit)
    assert (found["state"], found["status"], found["log"]) == ("failed", 3, ["the reason"])


def test_a_run_ends_at_its_limit_with_the_processes_that_it_started(tmp_path: Path) -> None:
    child = "import time; time.sleep(600)"
    text = (
        f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', {child!r}]); "
        "print(p.pid, flush=True); time.sleep(600)"
    )
    found = measure(script(tmp_path, text), tmp_path, 2.0)
    assert found["state"] == "limit"
    (pid,) = map(int, found["log"])
    until(lambda: ended(pid), f"the end of process {pid}")


def ended(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


def test_sigterm_ends_the_run_too(tmp_path: Path) -> None:
    run = script(tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    text = (
        "from pathlib import Path; from tests.gpu.eight_gpus_runs import Run, measure; "
        f"measure(Run({run.name!r}, {run.words!r}, Path({str(run.result)!r}), 60.0), "
        f"Path({str(tmp_path)!r}), 60.0)"
    )
    path = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    log = tmp_path / "logs" / f"{tmp_path.name}-one.log"
    with subprocess.Popen(
        [sys.executable, "-c", text], env={**os.environ, "PYTHONPATH": path}
    ) as program:
        until(lambda: log.exists() and log.read_text().strip(), "the start of the run")
        program.terminate()
        assert program.wait(60.0) == 128 + signal.SIGTERM
    pid = int(log.read_text())
    until(lambda: ended(pid), f"the end of process {pid}")


def test_runs_that_are_done_are_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed one is, and so is one whose command has changed."""
    made = [
        script(tmp_path, writing(tmp_path / "good.json"), name="good"),
        script(tmp_path, "raise SystemExit(1)", name="bad"),
    ]
    measured: list[str] = []

    def counted(run: Run, folder: Path, limit: float) -> dict[str, Any]:
        measured.append(run.name)
        return measure(run, folder, limit)

    monkeypatch.setattr(whole_v3, "runs", lambda *given: made)
    monkeypatch.setattr(whole_v3, "measure", counted)
    output = tmp_path / "record.json"
    words = ["--small", "--folder", str(tmp_path), "--output", str(output)]
    assert whole_v3.main(words) == 1
    assert whole_v3.main(words) == 1
    assert measured == ["good", "bad", "bad"]
    assert json.loads(output.read_text())["runs"]["good"]["result"] == {"tokens": 7}
    made[0] = script(tmp_path, f"{made[0].words[1]}; print()", name="good")
    assert whole_v3.main([*words, "--only", "g*"]) == 0
    assert measured[3:] == ["good"]


def test_eight_gpus_have_runs_of_every_kind(tmp_path: Path) -> None:
    found = {run.name: run for run in runs(tmp_path, 8, LARGE, TOKENIZER, "/opt/python")}
    assert len(found) == 2 + 6 * 2 + 16
    served = " ".join(found["deepseek-v3, dp 8, ep 8, nextn, serving"].words)
    for words in (
        "--serving 1 32 256 1024 --input-len 1024",
        "--draft-steps 1 --simulate-accept-length 1.85",
        "--peer sglang=/opt/python",
        "--dp-size 8",
    ):
        assert words in served
    static = found["deepseek-v3, tp 8, nextn, static"].words
    assert "--simulate-accept-length" in static and "128" in static
    sizes = found["all-reduce, 8 ranks"].words
    assert "4096" in sizes and str(8 << 20) in sizes
    assert len(list(runs(tmp_path, 4, LARGE, TOKENIZER, None))) == 2 + (6 + 3) * 2 + 16


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "all-reduce, 2 ranks",
        "tiny-v3, tp 2, ep 2, nextn, static",
        "tiny-v3, dp 2, ep 2, serving",
        "tiny-v3, tp 2, nextn, serving",
        "S0 row 11, tiny-v3, 2 GPUs",
    ],
)
def test_runs_work_with_a_tiny_model_on_two_ranks_of_a_cpu(name: str, tmp_path: Path) -> None:
    (run,) = (one for one in runs(tmp_path, 2, SMALL, TOKENIZER, None) if one.name == name)
    found = measure(run, tmp_path, 600.0)
    assert found["state"] == "done", found.get("log")
    assert found["result"]
