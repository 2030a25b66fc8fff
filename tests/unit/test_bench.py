"""The load generator against a small server whose timing and faults are known."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from glowplug.entrypoints import bench
from glowplug.entrypoints.bench import table
from glowplug.entrypoints.bench.load import datasets, metrics
from glowplug.entrypoints.bench.load.backends import (
    BACKENDS,
    Outcome,
    RawAnswer,
    Request,
    outcome_of,
    send_prompt,
)
from glowplug.entrypoints.bench.load.http_stream import ServerTarget, events, read_answer
from glowplug.entrypoints.bench.load.load import Load, drive, gaps
from glowplug.entrypoints.bench.others import drafts
from tests.support.bench_server import FakeServer


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.close()


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.configure(parser)
    return parser.parse_args(list(words))


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_every_backend_measures_what_the_server_did(server: FakeServer, name: str) -> None:
    backend = BACKENDS[name]
    prompt = datasets.BenchPrompt(
        5, 6, text="hello", ids=[1, 2, 3, 4, 5] if backend.takes_ids else None
    )
    outcome = outcome_of(
        asyncio.run(send_prompt(server.target, backend, prompt, Request("tiny"))), backend
    )
    assert outcome.ok, outcome.error
    assert outcome.output_tokens == len(outcome.arrivals) == 6
    assert outcome.prompt_tokens == 7
    assert outcome.text == "ab" * 6
    assert len(outcome.itls) == 5
    path, body = server.asked[-1]
    assert path == backend.path
    assert ("messages" in body) == path.endswith("chat/completions")


class Wire(asyncio.Transport):
    """A connection that delivers each of ``pieces`` at its time on a clock of its own."""

    def __init__(self, pieces: list[tuple[float, bytes]]) -> None:
        super().__init__()
        self.now = 100.0
        self._pieces = pieces

    def perf_counter(self) -> float:
        return self.now

    async def connect(
        self, protocol: Callable[[], asyncio.Protocol], *address: Any, **options: Any
    ) -> tuple[Wire, asyncio.Protocol]:
        self._protocol = protocol()
        self._protocol.connection_made(self)
        return self, self._protocol

    def write(self, data: bytes | bytearray | memoryview) -> None:
        asyncio.get_running_loop().call_soon(self._answer)

    def _answer(self) -> None:
        for at, piece in self._pieces:
            self.now = at
            self._protocol.data_received(piece)
        self.now += 9.0

    def close(self) -> None:
        return


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_times_are_those_of_the_events(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time is taken at the end of an event; the latency ends with the last event, whatever
    follows.
    """
    backend, times = BACKENDS[name], (100.5, 100.75, 101.75)
    wire = Wire([(100.25, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")])
    for index, at in enumerate(times):
        data = b"data: " + json.dumps(FakeServer._event(backend.path, index, 3)).encode() + b"\n\n"
        wire._pieces += [
            (at - 0.125, b"%x\r\n%b" % (len(data), data[:9])),
            (at, data[9:] + b"\r\n"),
        ]
    wire._pieces.append((102.0, b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"))
    for module in ("backends", "http_stream"):
        monkeypatch.setattr(f"glowplug.entrypoints.bench.load.{module}.time", wire)

    async def asked() -> RawAnswer:
        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", wire.connect)
        prompt = datasets.BenchPrompt(
            5, 3, text="hello", ids=[1, 2, 3, 4, 5] if backend.takes_ids else None
        )
        return await send_prompt(
            ServerTarget("http://127.0.0.1:1"), backend, prompt, Request("tiny")
        )

    outcome = outcome_of(asyncio.run(asked()), backend)
    assert outcome.ok, outcome.error
    assert (outcome.ttft, outcome.itls, outcome.latency, outcome.tpot) == (
        0.5,
        [0.25, 1.0],
        1.75,
        0.625,
    )


@pytest.mark.parametrize(
    ("fault", "said"), [("refuse", "HTTP 400"), ("cut", "[DONE]"), ("error", "engine died")]
)
def test_a_fault_fails_its_request_and_is_named(server: FakeServer, fault: str, said: str) -> None:
    request = Request("tiny", extra={"fault": fault})
    backend = BACKENDS["openai"]
    outcome = outcome_of(
        asyncio.run(
            send_prompt(server.target, backend, datasets.BenchPrompt(1, 4, text="x"), request)
        ),
        backend,
    )
    assert not outcome.ok
    assert said in outcome.error


def test_a_server_that_is_not_there_is_an_error_not_a_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = parsed("serving", "--port", "1", "--ready-check-timeout", "0")
    assert bench.run(args) == 2
    assert "no server at" in capsys.readouterr().err


def test_a_sweep_writes_lines_that_the_table_reads(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "x.jsonl"
    args = parsed(
        "serving",
        "--backend",
        "sglang",
        "--port",
        str(server.port),
        "--dataset-name",
        "random",
        "--random-input",
        "16",
        "--random-output",
        "5",
        "--random-range-ratio",
        "1",
        "--num-prompts",
        "3",
        "6",
        "--max-concurrency",
        "1",
        "3",
        "--flush-cache",
        "--output-file",
        str(lines),
        "--tag",
        "t",
        "--goodput",
        "ttft:100000",
        "--output-details",
        "--save-result",
        "--result-dir",
        str(tmp_path),
    )
    assert bench.run(args) == 0
    first, second = (json.loads(line) for line in lines.read_text().splitlines())
    assert (first["max_concurrency"], first["completed"], second["completed"]) == (1, 3, 6)
    assert server.most == 3
    assert first["total_output_tokens"] == 15
    assert (first["compile_seconds"], first["startup_seconds"]) == (1.25, {"capture": 2.0})
    assert second["per_user_throughput"] == pytest.approx(second["output_throughput"] / 3)
    assert first["request_goodput"] == pytest.approx(first["request_throughput"])
    assert [path for path, _ in server.asked].count("/flush_cache") == 2
    ids = [body["input_ids"] for path, body in server.asked if path == "/generate"]
    assert all(len(prompt) == 16 and max(prompt) < 321 for prompt in ids)
    assert len(list(tmp_path.glob("sglang-infqps-concurrency*-tiny-*.json"))) == 2
    assert "Successful requests" in capsys.readouterr().out
    assert bench.run(parsed("table", str(lines), str(lines))) == 0
    shown = capsys.readouterr().out
    assert "per_user_throughput" in shown
    assert "+0.0" in shown


def test_failed_requests_give_status_one(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    args = parsed(
        "serving",
        "--port",
        str(server.port),
        "--num-prompts",
        "3",
        "--output-len",
        "4",
        "--warmup-requests",
        "0",
        "--extra-request-body",
        '{"fault": "cut"}',
    )
    assert bench.run(args) == 1
    assert "without [DONE]" in capsys.readouterr().err


VLLM_KEYS = """
date backend model_id tokenizer_id num_prompts request_rate burstiness max_concurrency duration
completed failed total_input_tokens total_output_tokens request_throughput request_goodput
output_throughput total_token_throughput max_output_tokens_per_s max_concurrent_requests
mean_ttft_ms median_ttft_ms std_ttft_ms p99_ttft_ms mean_tpot_ms median_tpot_ms std_tpot_ms
p99_tpot_ms mean_itl_ms median_itl_ms std_itl_ms p99_itl_ms mean_e2el_ms median_e2el_ms std_e2el_ms
p99_e2el_ms input_lens output_lens ttfts itls generated_texts errors
""".split()
SGLANG_KEYS = """
tag server_info dataset_name random_input_len random_output_len random_range_ratio total_throughput
input_throughput total_output_tokens_retokenized mean_e2e_latency_ms median_e2e_latency_ms
std_e2e_latency_ms p99_e2e_latency_ms p95_itl_ms max_itl_ms concurrency accept_length
schema_version per_user_throughput
""".split()


def test_records_carry_the_keys_of_both_tools(server: FakeServer, tmp_path: Path) -> None:
    lines = tmp_path / "x.jsonl"
    args = parsed(
        "serving",
        "--backend",
        "vllm",
        "--base-url",
        f"http://127.0.0.1:{server.port}",
        "--num-prompts",
        "2",
        "--input-len",
        "4",
        "--output-len",
        "3",
        "--output-file",
        str(lines),
        "--output-details",
    )
    assert bench.run(args) == 0
    record = json.loads(lines.read_text())
    assert [key for key in VLLM_KEYS + SGLANG_KEYS if key not in record] == []


def test_a_record_has_the_acceptance_that_the_server_reports(
    server: FakeServer, tmp_path: Path
) -> None:
    """The warm-up's drafts are left out; of vLLM's servers the counters are in /metrics."""
    lines = tmp_path / "x.jsonl"
    words = f"--backend vllm --base-url {server.target.base_url} --num-prompts 3 --input-len 4"
    args = parsed("serving", *words.split(), "--output-len", "3", "--output-file", str(lines))
    assert bench.run(args) == 0
    record = json.loads(lines.read_text())
    assert record["accept_length"] == pytest.approx(2.3)
    assert record["accept_rates"] == pytest.approx([0.9, 0.4])
    assert record["draft_shapes"] == {"2/1/3": 30}


def test_the_acceptance_of_other_servers() -> None:
    """Ours reports counters, SGLang's the length since its start, and some report nothing."""
    before = {"stats": {"drafts": [{"steps": 1, "topk": 1, "tokens": 2, "accepted": [5, 5]}]}}
    after = {"stats": {"drafts": [{"steps": 1, "topk": 1, "tokens": 2, "accepted": [6, 8]}]}}
    counts = [drafts.counted_by_server(info) or () for info in (before, after)]
    assert drafts.server_acceptance(*counts, after) == {
        "accept_length": 1.75,
        "accept_rates": [0.75],
        "draft_shapes": {"1/1/2": 4},
    }
    theirs = {"internal_states": [{"avg_spec_accept_length": 2.2}]}
    found = drafts.server_acceptance((), (), theirs)
    assert found == {"accept_length": 2.2, "accept_rates": None, "draft_shapes": None}
    for info in (None, {}, {"stats": {}}, {"version": "x"}):
        assert drafts.counted_by_server(info) is None
        assert drafts.server_acceptance((), (), info)["accept_length"] is None
    assert drafts.counted_by_vllm("# nothing\nvllm:num_requests_running{} 1\n") == ()


@pytest.mark.parametrize(
    "words", [["--simulate-accept-length", "2"], ["--simulate-accept-rates", "0.5,0.5"]]
)
def test_a_load_on_a_running_server_cannot_simulate(
    words: list[str], server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.run(parsed("serving", "--base-url", server.target.base_url, *words)) == 2
    said = capsys.readouterr().err
    assert f"{words[0]}: the acceptance is simulated by the server" in said
    assert "bench versus" in said and not server.asked


def test_statistics_of_known_outcomes() -> None:
    outcomes = [
        Outcome(10, start=0.0, end=1.0, arrivals=[0.2, 0.6, 1.0], output_tokens=3),
        Outcome(20, start=0.5, end=3.5, arrivals=[1.5, 2.5, 3.5], output_tokens=3),
        Outcome(99, start=0.5, end=0.6, error="refused"),
    ]
    record = metrics.measure(outcomes, 4.0, percentiles=(50, 100), goodput={"ttft": 500.0})
    assert (record["completed"], record["failed"]) == (2, 1)
    assert (record["total_input_tokens"], record["total_output_tokens"]) == (30, 6)
    assert record["output_throughput"] == pytest.approx(1.5)
    assert record["mean_ttft_ms"] == pytest.approx(600)
    assert record["mean_tpot_ms"] == pytest.approx(700)
    assert record["p100_itl_ms"] == record["max_itl_ms"] == pytest.approx(1000)
    assert record["median_e2el_ms"] == record["median_e2e_latency_ms"] == pytest.approx(2000)
    assert record["request_goodput"] == pytest.approx(0.25)
    assert record["max_concurrent_requests"] == 2
    assert (
        record["max_output_tokens_per_s"] == 2
    )  # 0.2 and 0.6 in the first second, 1.0 and 1.5 in the next
    assert record["mean_request_output_throughput"] == pytest.approx((3 / 1 + 3 / 3) / 2)
    assert metrics.per_user_throughput(record) == pytest.approx(1.5 / (4 / 4))
    assert metrics.per_user_throughput({**record, "max_concurrency": 2}) == pytest.approx(0.75)
    assert metrics.per_user_throughput({"mean_tpot_ms": 7.0}) is None


def test_no_successful_request_still_gives_a_record() -> None:
    record = metrics.measure([Outcome(1, error="x")], 1.0)
    assert record["completed"] == 0
    assert record["mean_ttft_ms"] == 0


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_departures_keep_the_rate_and_the_shape(seed: int) -> None:
    drawn = gaps(Load(rate=50.0, burstiness=1.0, seed=seed), 4000)
    assert sum(drawn) == pytest.approx(80.0)
    mean = sum(drawn) / len(drawn)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in drawn) / len(drawn))
    assert deviation == pytest.approx(mean, rel=0.1)  # exponential gaps
    assert set(gaps(Load(), 3)) == {0.0}


def test_random_lengths_follow_the_ratio() -> None:
    rng = random.Random(7)
    assert set(datasets.random_lengths(rng, 100, 1.0, 50)) == {100}
    spread = datasets.random_lengths(rng, 100, 0.5, 500)
    assert min(spread) >= 50
    assert max(spread) <= 100
    assert len(set(spread)) > 20


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt": "one two"}\n{"conversations": [{"value": "three"}], "output_tokens": 9}\n'
    )
    prompts = datasets.custom_prompts(
        path, 3, 5, encode=lambda text: list(range(len(text.split())))
    )
    assert [(p.text, p.input_len, p.output_len) for p in prompts] == [
        ("one two", 2, 5),
        ("three", 1, 9),
        ("one two", 2, 5),
    ]
    path.write_text('{"text": "x"}\n')
    with pytest.raises(ValueError, match=":1: no"):
        datasets.custom_prompts(path, 1, 5)


@pytest.mark.parametrize("size", [1, 3, 64])
def test_events_survive_any_split(size: int) -> None:
    data = b'data: {"a": 1}\n\n: comment\n\ndata: {"b": "\xc3\xa9"}\r\n\r\ndata: [DONE]\n\n'

    pieces = [(float(start), data[start : start + size]) for start in range(0, len(data), size)]
    assert [value for _, value in events(pieces)] == [b'{"a": 1}', b'{"b": "\xc3\xa9"}']


@pytest.mark.parametrize("size", [1, 2, 5, 7, 1000])
def test_a_chunked_answer_survives_any_split_and_keeps_its_times(size: int) -> None:
    """Each chunk has the time at which its end arrived. Bytes inside a chunk that look like the end
    of the answer do not end it.
    """
    chunks = [b"data: one\n\n", b"10\r\n\r\n", b"x" * 300]
    sent = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    ends = []
    for chunk in chunks:
        sent += b"%x\r\n%b\r\n" % (len(chunk), chunk)
        ends.append((len(sent) - 1) // size)
    sent += b"0\r\n\r\n"
    pieces = [(float(at // size), sent[at : at + size]) for at in range(0, len(sent), size)]
    answer = read_answer(pieces)
    assert answer.status == 200
    assert answer.pieces == list(zip(map(float, ends), chunks, strict=True))
    for short in range(len(pieces) - 1):
        with pytest.raises(ConnectionError):
            read_answer(pieces[:short])


def test_answers_too_many_to_keep_are_read_during_the_run(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("glowplug.entrypoints.bench.load.load.UNREAD_BYTES_MAX", 0)
    prompts = [datasets.BenchPrompt(1, count, text="x") for count in (2, 5, 3)]
    outcomes, _ = asyncio.run(
        drive(server.target, BACKENDS["openai"], Request("tiny"), prompts, Load(), lambda: None)
    )
    assert [outcome.output_tokens for outcome in outcomes] == [2, 5, 3]


@pytest.mark.parametrize(
    "words",
    [
        ("serving", "--goodput", "foo:1"),
        ("serving", "--max-concurrency", "1", "2", "--num-prompts", "1", "2", "3"),
        ("serving", "--dataset-name", "custom"),
        ("serving", "--dataset-name", "sharegpt"),
        ("serving", "--request-rate", "0"),
        ("serving", "--burstiness", "0"),
        ("serving", "--ramp-up-strategy", "linear"),
        ("serving", "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "2"),
        (
            *("serving", "--ramp-up-strategy", "linear", "--request-rate", "5"),
            *("--ramp-up-start-rps", "1", "--ramp-up-end-rps", "2"),
        ),
        ("serving", "--header", "novalue"),
        ("serving", "--base-url", "ftp://x"),
    ],
)
def test_bad_options_end_with_a_message(
    server: FakeServer, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    args = parsed(
        *words,
        *(() if "--base-url" in words else ("--port", str(server.port))),
        "--warmup-requests",
        "0",
    )
    assert bench.run(args) == 2
    assert "glowplug bench serving:" in capsys.readouterr().err


def test_table_takes_records_of_other_tools() -> None:
    """Throughput per user is output throughput / concurrency, as published, not 1000 / TPOT."""
    record = {"max_concurrency": 4, "output_throughput": 376.4, "mean_tpot_ms": 10.0}
    cells = table.cells(record, list(table.COLUMNS))
    assert cells[0] == 4
    assert cells[-1] == pytest.approx(94.1)
    assert table.cells({"max_concurrency": 4, "mean_tpot_ms": 10.0}, ["per_user_throughput"]) == [
        "-"
    ]
    assert cells[1] == "-"


OURS = {
    "batch_size": 8,
    "input_len": 256,
    "output_len": 32,
    "prefill_latency": 0.25,
    "prefill_throughput": 8192.0,
    "median_decode_latency": 0.0125,
    "median_decode_throughput": 640.0,
    "prefill_ms": 250.0,
    "prefill_tokens_per_s": 8192.0,
    "decode_median_ms": 12.5,
    "decode_tokens_per_s": 640.0,
    "floor_share": 0.5,
}
SGLANGS = {key: value for key, value in OURS.items() if key not in table.BATCH_COLUMNS[3:]} | {
    "median_decode_latency": 0.025,
    "median_decode_throughput": 320.0,
}


def test_table_shows_static_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = tmp_path / "ours.json", tmp_path / "sglang.jsonl"
    ours.write_text(
        json.dumps({"engine": "glowplug", "results": [OURS, {**OURS, "batch_size": 16}]}, indent=1)
    )
    theirs.write_text("\n".join(map(json.dumps, ({**SGLANGS, "batch_size": 1}, SGLANGS))))
    assert bench.run(parsed("table", str(ours), str(theirs))) == 0
    first, second, change = capsys.readouterr().out.strip().split("\n\n")
    shown = [
        [cell.strip() for cell in row.strip("| ").split("|")] for row in first.splitlines()[3:]
    ]
    assert [row[3:] for row in shown] == [["250.000", "8192.000", "12.500", "640.000", "0.500"]] * 2
    assert [word in second for word in ("12.500", "25.000", "250.000")] == [False, True, True]
    row = [cell.strip() for cell in change.splitlines()[-1].strip("| ").split("|")]
    assert (
        row == ["8", "256", "32", "+0.0", "+0.0", "+100.0", "-50.0", "-"]
        and len(change.splitlines()) == 4
    )


def test_table_shows_each_kind_of_record_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (both := tmp_path / "x.jsonl").write_text(
        f"{json.dumps({'max_concurrency': 4, 'mean_tpot_ms': 10.0})}\n{json.dumps(OURS)}\n"
    )
    assert bench.run(parsed("table", str(both))) == 0
    assert capsys.readouterr().out.count(f"{both}\n") == 2
    assert bench.run(parsed("table", str(both), "--columns", "batch_size", "mean_tpot_ms")) == 0
    assert capsys.readouterr().out.count(f"{both}\n") == 1


@pytest.mark.parametrize(
    ("text", "more", "said"),
    [
        (
            '{"kernel": "gemm", "us": 3}',
            [],
            "record 1 is not of `bench serving` or `bench one-batch`; it has kernel, us",
        ),
        ("[3]", [], "no record"),
        ("", [], "no record"),
        ("{", [], "x.jsonl"),
        (json.dumps(OURS), ["--columns", "mean_tpot"], "no record has any of mean_tpot"),
    ],
)
def test_table_names_files_without_a_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, more: list[str], said: str
) -> None:
    (file := tmp_path / "x.jsonl").write_text(text)
    assert bench.run(parsed("table", str(file), *more)) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and said in shown.err and str(file) in shown.err
