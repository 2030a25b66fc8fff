"""``glowplug run-batch``: files in OpenAI's batch format, without a server."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.errors import EngineDead
from glowplug.entrypoints.batch.files import OutputFile, read_input
from glowplug.entrypoints.batch.local_app import LocalApp
from glowplug.entrypoints.batch.run import BatchRun, Totals
from glowplug.entrypoints.cli.main import main
from glowplug.entrypoints.front.client import EngineClient
from glowplug.entrypoints.server.app import create_app
from tests.e2e.fake_engine import FakeExecutor, make_plan, make_tokenizer

Line = dict[str, Any]


def line(custom_id: str, text: str = "", url: str = "/v1/completions", **body: Any) -> Line:
    prompt = f"say:{text or custom_id}"
    given = {"messages": [{"role": "user", "content": prompt}]} if "chat" in url else {}
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": url,
        "body": {"max_tokens": 20, **(given or {"prompt": prompt}), **body},
    }


def write(path: Path, *lines: Line | str) -> Path:
    texts = [one if isinstance(one, str) else json.dumps(one) for one in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


def read(path: Path) -> list[Line]:
    return [json.loads(one) for one in path.read_text().splitlines()]


def answers(path: Path) -> dict[str, str]:
    """Return the text of each good answer by its id."""
    found = {}
    for one in read(path):
        if one["response"] is not None and one["response"]["status_code"] == 200:
            choice = one["response"]["body"]["choices"][0]
            found[one["custom_id"]] = choice["text"] if "text" in choice else choice["message"]
    return found


def run(
    source: Path,
    target: Path,
    executor: FakeExecutor | None = None,
    *,
    resume: bool = False,
    in_flight: int = 8,
    finished: Callable[[], None] = lambda: None,
    batches: list[BatchRun] | None = None,
    **config: Any,
) -> Totals:
    """Run a batch over the fake engine. ``batches`` gets the batch when it begins."""

    async def whole() -> Totals:
        plan, tokenizer = make_plan(**config), make_tokenizer()
        engine = executor or FakeExecutor()
        client = EngineClient(plan, tokenizer, tokenizer.eos_ids)
        app = LocalApp(create_app(plan, client, tokenizer))

        def start() -> FakeExecutor:
            engine.start(plan)
            return engine

        try:
            await client.start(start)
            with OutputFile(target, resume) as output:
                batch = BatchRun(app, read_input(source), output, finished)
                if batches is not None:
                    batches.append(batch)
                return await batch.run(in_flight, 5.0)
        finally:
            await client.close()
            app.context.texts.close()
            app.context.grammars.close()

    return asyncio.run(whole())


def test_every_line_has_an_answer_or_an_error(tmp_path: Path) -> None:
    source = write(
        tmp_path / "in",
        line("one"),
        line("two", url="/v1/chat/completions"),
        "",
        "no json",
        "[1]",
        {"method": "POST"},
        line("one"),
        {**line("get"), "method": "GET"},
        line("embed", url="/v1/embeddings"),
        {**line("body"), "body": [1]},
        line("stream", stream=True),
        line("wrong", max_tokens=-1),
        line("other", model="gpt-9"),
    )
    target = tmp_path / "out"
    totals = run(source, target, server={"api_key": "k"})
    assert (totals.answered, totals.failed, totals.interrupted) == (2, 10, False)
    lines = read(target)
    assert all(one.keys() == {"id", "custom_id", "response", "error"} for one in lines)
    assert len({one["id"] for one in lines}) == len(lines) == 12
    errors = [
        (one["custom_id"], one["error"]["code"], one["error"]["message"].partition(":")[0])
        for one in lines
        if one["error"] is not None
    ]
    assert sorted(errors, key=lambda found: int(found[2].split()[1])) == [
        (None, "invalid_json", "line 4"),
        (None, "invalid_json", "line 5"),
        (None, "invalid_custom_id", "line 6"),
        ("one", "duplicate_custom_id", "line 7"),
        ("get", "invalid_method", "line 8"),
        ("embed", "invalid_url", "line 9"),
        ("body", "invalid_body", "line 10"),
        ("stream", "unsupported_parameter", "line 11"),
    ]
    by_id = {one["custom_id"]: one["response"] for one in lines if one["response"]}
    assert by_id["one"]["body"]["choices"][0]["text"] == "one"
    assert by_id["two"]["body"]["choices"][0]["message"]["content"] == "two"
    assert {name: by_id[name]["status_code"] for name in by_id} == {
        "one": 200,
        "two": 200,
        "wrong": 400,
        "other": 404,
    }
    assert by_id["wrong"]["body"]["error"]["param"] == "max_tokens"
    assert all(one["request_id"] for one in by_id.values())


def test_requests_in_flight_are_bounded_and_the_input_is_read_as_they_finish(
    tmp_path: Path,
) -> None:
    most = 0

    def watched() -> bool:
        nonlocal most
        most = max(most, len(executor.running) + len(executor.waiting))
        return False

    executor = FakeExecutor(held=watched)
    source = write(tmp_path / "in", *(line(f"id{number}") for number in range(40)))
    assert run(source, tmp_path / "out", executor, in_flight=3).answered == 40 and most == 3
    assert answers(tmp_path / "out") == {f"id{number}": f"id{number}" for number in range(40)}


def test_a_full_queue_delays_requests_and_fails_none(tmp_path: Path) -> None:
    executor = FakeExecutor(rows=1, queue_limit=1)
    source = write(tmp_path / "in", *(line(f"id{number}") for number in range(6)))
    assert run(source, tmp_path / "out", executor, in_flight=6).answered == 6


def test_a_dead_engine_loses_no_finished_line_and_a_resumed_run_does_the_others(
    tmp_path: Path,
) -> None:
    executor, done = FakeExecutor(), 0

    def finished() -> None:
        nonlocal done
        done += 1
        if done == 5:
            executor.die()

    source = write(tmp_path / "in", *(line(f"id{number}") for number in range(30)))
    target = tmp_path / "out"
    with pytest.raises(EngineDead, match="killed by signal 9"):
        run(source, target, executor, in_flight=2, finished=finished)
    kept = read(target)
    assert 5 <= len(kept) < 30 and all(one["response"]["status_code"] == 200 for one in kept)
    totals = run(source, target, resume=True)
    assert (totals.skipped, totals.answered) == (len(kept), 30 - len(kept))
    assert read(target)[: len(kept)] == kept and len(answers(target)) == 30


def test_a_resumed_run_repeats_errors_and_drops_a_torn_line(tmp_path: Path) -> None:
    source = write(tmp_path / "in", line("good"), line("fault", "fail:nan"), line("refused", n=0))
    target = tmp_path / "out"
    assert run(source, target).failed == 2
    by_id = {one["custom_id"]: one["id"] for one in read(target)}
    with target.open("a") as file:
        file.write('{"id": "batch_req_torn", "custom_id": "go')
    write(source, line("good"), line("fault", "mended"), line("refused", n=0), "bad")
    totals = run(source, target, resume=True)
    assert (totals.skipped, totals.answered, totals.failed) == (2, 1, 1)
    again = {one["custom_id"]: one["id"] for one in read(target)}
    assert len(read(target)) == 4 and again.keys() == {*by_id, None}
    assert again["good"] == by_id["good"] and again["refused"] == by_id["refused"]
    assert again["fault"] != by_id["fault"] and answers(target)["fault"] == "mended"


@pytest.mark.parametrize("resume", [False, True])
def test_a_foreign_output_file_is_refused_and_unchanged(tmp_path: Path, resume: bool) -> None:
    target = tmp_path / "out"
    target.write_text("precious\n")
    with pytest.raises(ValueError, match="--resume" if not resume else "no line of a batch"):
        OutputFile(target, resume)
    assert target.read_text() == "precious\n"


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    with OutputFile(tmp_path / "out", False), pytest.raises(ValueError, match="another run"):
        OutputFile(tmp_path / "out", False)


def test_a_signal_finishes_what_is_in_flight(tmp_path: Path) -> None:
    batches: list[BatchRun] = []
    signals: list[int] = []

    def held() -> bool:
        """Hold all sequences until the batch has received the signal."""
        if len(executor.running) == 4 and not signals:
            signals.append(signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        return not batches[0].totals.interrupted

    executor = FakeExecutor(held=held)
    source = write(tmp_path / "in", *(line(f"id{number}") for number in range(20)))
    totals = run(source, tmp_path / "out", executor, in_flight=4, batches=batches)
    assert totals.interrupted and totals.answered == 4 and len(answers(tmp_path / "out")) == 4


@pytest.fixture
def own_logging() -> Iterator[None]:
    """Restore the loggers that the command sets up, whose handlers write to a captured stream."""
    loggers = [logging.getLogger(name) for name in ("glowplug", "uvicorn", "uvicorn.error")]
    before = [(one.handlers, one.level, one.propagate, one.filters[:]) for one in loggers]
    yield
    for one, (handlers, level, propagate, filters) in zip(loggers, before):
        one.handlers = handlers
        one.setLevel(level)
        one.propagate = propagate
        one.filters = filters


@pytest.mark.usefixtures("own_logging")
def test_the_command_answers_a_file_with_the_embedded_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(
        tmp_path / "in",
        line("sum", url="/v1/chat/completions", temperature=0)
        | {"body": {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "max_tokens": 9}},
        "broken",
    )
    words = ["run-batch", "-i", str(source), "-o", str(tmp_path / "out"), "--model", "embedded"]
    words += ["--set", "memory.kv_tokens=4096", "--set", "executor.use=inline"]
    assert main(words) == 3
    assert answers(tmp_path / "out").keys() == {"sum"} and len(read(tmp_path / "out")) == 2
    said = capsys.readouterr()
    assert said.out == "" and "1 answered, 1 failed" in said.err
    assert main(words) == 2 and "--resume" in capsys.readouterr().err
    write(source, line("sum", url="/v1/chat/completions"))
    assert main([*words, "--resume"]) == 0
    assert "0 answered, 0 failed, 1 answered earlier" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (["-i", "https://example.org/in.jsonl"], "no outbound connections"),
        (["-i", "/nonexistent"], "/nonexistent is no file"),
        (["--max-in-flight", "0"], "at least one request"),
        (["--facts", "cpu"], "another machine"),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: list[str], reason: str
) -> None:
    source = write(tmp_path / "in", line("a"))
    words = ["run-batch", "-i", str(source), "-o", str(tmp_path / "out"), *change]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert reason in said and "fix: " in said and not (tmp_path / "out").exists()
