"""Faults around a server that it must survive: overload, deadlines, faulty plugins."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from glowplug.core.protocols import OutputRequest
from tests.e2e.fake_engine import FakeExecutor
from tests.e2e.served_folder import write_served
from tests.e2e.serving import HTTP, gauge, served
from tests.e2e.test_errors import refused
from tests.e2e.test_served_model import Serving, request, send_only, serving
from tests.e2e.test_streaming import reading_nothing
from tests.support.waiting import LIMIT, until

CHAT = "/v1/chat/completions"
CAPACITY = 8  #: sequences that run or wait
OVERLOAD = 50  #: requests for each of them
#: growth of the process at most; a request of the load takes some KB while it runs
GROWTH = 64 << 20


def ask(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def test_overload_at_fifty_times_the_capacity() -> None:
    """Accepted requests are answered in full, the others with 429 and a time to wait."""
    executor = FakeExecutor(rows=CAPACITY // 2, queue_limit=CAPACITY // 2, step_seconds=0.002)
    with served(executor) as one, ThreadPoolExecutor(64) as pool:
        limits = httpx.Limits(max_connections=64)
        with httpx.Client(base_url=one.url, timeout=LIMIT, limits=limits) as client:
            client.post(CHAT, json=ask("say:x"))
            before = psutil.Process().memory_info().rss
            answers = list(
                pool.map(
                    lambda number: client.post(CHAT, json=ask(f"say:{number:04}")),
                    range(CAPACITY * OVERLOAD),
                )
            )
            grown = psutil.Process().memory_info().rss - before
        one.wait_idle()
        counted = HTTP.get(one.url + "/metrics").text
    accepted = 0
    for number, answer in enumerate(answers):
        if answer.status_code == 200:
            accepted += 1
            assert answer.json()["choices"][0]["message"]["content"] == f"{number:04}"
        else:
            assert refused(answer, 429)["code"] == "queue_full"
            assert int(answer.headers["retry-after"]) >= 1
    assert CAPACITY <= accepted < len(answers)
    assert f'status="429"}} {len(answers) - accepted}\n' in counted
    assert grown < GROWTH


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server that runs one sequence at a time, and lets others wait for a moment."""
    folder = write_served(tmp_path_factory.mktemp("narrow"))
    words = ("--max-running-requests", "1", "--set", "server.queue_timeout=0.1")
    with serving(folder, tmp_path_factory.mktemp("log") / "serve.log", *words) as one:
        yield one


def test_queue_timeout(narrow: Serving) -> None:
    """A request that waits too long is answered 503, and the one that runs goes on."""
    body = request(max_tokens=450, ignore_eos=True, stream=True)
    with send_only(narrow, body):
        until(lambda: narrow.gauge("num_requests_running"), "the first request runs")
        answer = HTTP.post(narrow.url + CHAT, json=request())
        assert refused(answer, 503)["code"] == "queue_timeout"
        assert int(answer.headers["retry-after"]) >= 1
    narrow.wait_idle()
    assert HTTP.post(narrow.url + CHAT, json=request()).status_code == 200


def test_an_engine_process_that_is_stopped_is_unhealthy_until_it_continues(
    narrow: Serving,
) -> None:
    """Requests wait meanwhile, and are answered afterwards."""
    family = narrow.process.children(recursive=True)
    engine = max(family, key=lambda process: process.memory_info().rss)
    answers: list[httpx.Response] = []
    body = request()
    waiting = threading.Thread(
        target=lambda: answers.append(HTTP.post(narrow.url + CHAT, json=body))
    )
    assert HTTP.get(narrow.url + "/health").status_code == 200
    engine.suspend()
    try:
        waiting.start()
        until(lambda: HTTP.get(narrow.url + "/health").status_code == 503, "it is unhealthy")
        for path in ("/health", "/ready"):
            assert refused(HTTP.get(narrow.url + path), 503)["code"] == "engine_dead"
    finally:
        engine.resume()
    until(lambda: HTTP.get(narrow.url + "/ready").status_code == 200, "it is ready again")
    waiting.join(LIMIT)
    assert answers[0].status_code == 200
    assert HTTP.get(narrow.url + "/health").status_code == 200


def test_a_client_that_reads_a_byte_at_a_time_is_dropped_alone() -> None:
    """Five bytes a second never empty the buffers: the write stays blocked, what waits for it is
    bounded, and another client is answered meanwhile.
    """
    executor = FakeExecutor(step_seconds=0.0002)
    over = threading.Event()
    with served(executor, context=1 << 20, server={"stall_timeout": 1.5}) as one:
        with reading_nothing(one) as slow:

            def read() -> None:
                while not over.is_set() and slow.recv(1):
                    time.sleep(0.2)

            reading = threading.Thread(target=read)
            reading.start()
            good = HTTP.post(one.url + "/v1/completions", json={"prompt": "say:quick"})
            assert good.json()["choices"][0]["text"] == "quick"
            connections = list(one.server._http.server_state.connections)
            waiting = [each.transport.get_write_buffer_size() for each in connections]
            assert max(waiting, default=0) < 1 << 20
            one.wait_idle()
            assert executor.stats.aborted == 1
            over.set()
            reading.join(LIMIT)
        good = HTTP.post(one.url + "/v1/completions", json={"prompt": "say:quick"})
        assert good.json()["choices"][0]["text"] == "quick"


def test_request_timeout_in_the_middle_of_a_stream() -> None:
    """The stream ends with an error event, without ``[DONE]``, and the sequence is gone."""
    with served(FakeExecutor(step_seconds=0.01), context=1 << 16) as one:
        answer = HTTP.post(
            one.url + CHAT,
            json=ask("say:x", stream=True, ignore_eos=True),
            headers={"X-Request-Timeout": "0.5"},
        )
        assert answer.status_code == 200 and '"content":"x"' in answer.text
        last = [line for line in answer.text.splitlines() if line][-1]
        assert '"code":"request_timeout"' in last and "[DONE]" not in answer.text
        one.wait_idle()


class Raising:
    """A parser factory, and its parser, that fails at an exclamation mark."""

    def start(self, request: OutputRequest) -> Raising:
        return self

    def feed(self, text: str) -> list[Any]:
        if "!" in text:
            raise ZeroDivisionError("in /home/someone/parser.py")
        return []

    def finish(self) -> list[Any]:
        return []


@pytest.mark.parametrize("stream", [True, False])
def test_an_output_parser_that_raises_fails_its_request_alone(stream: bool) -> None:
    executor = FakeExecutor(step_seconds=0.002)
    with served(executor, parsers=[Raising()]) as one:  # type: ignore[list-item]
        other: list[httpx.Response] = []
        body = ask("say:" + "x" * 100)
        thread = threading.Thread(target=lambda: other.append(HTTP.post(one.url + CHAT, json=body)))
        thread.start()
        until(lambda: executor.running, "the other request runs")
        answer = HTTP.post(one.url + CHAT, json=ask("say:ab!", stream=stream))
        assert '"code":"internal_error"' in answer.text and "[DONE]" not in answer.text
        assert answer.status_code == (200 if stream else 500) and "parser.py" not in answer.text
        thread.join(LIMIT)
        assert other[0].status_code == 200
        one.wait_idle()
        assert gauge(HTTP.get(one.url + "/metrics").text, "num_requests_running") == 0


class FaultyRoute:
    """A plugin set whose hook adds a route that raises."""

    def call_each(self, hook: str, **given: Any) -> list[Any]:
        if hook == "extend_app":
            given["app"].add_api_route("/mine", broken)
        return []


def broken() -> None:
    raise ZeroDivisionError("in /home/someone/route.py")


def test_a_plugin_route_that_raises() -> None:
    with served(plugins=FaultyRoute()) as one:
        assert refused(HTTP.get(one.url + "/mine"), 500)["code"] == "internal_error"
        assert HTTP.post(one.url + CHAT, json=ask("say:x")).status_code == 200


def test_a_trace_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopping the trace names the reason; the server goes on."""
    (tmp_path / "file").touch()
    (tmp_path / "model").mkdir()
    folder = write_served(tmp_path / "model")
    monkeypatch.setenv("GLOWPLUG_PROFILE_DIR", str(tmp_path / "file" / "traces"))
    with serving(folder, tmp_path / "log") as one:
        assert HTTP.post(one.url + "/start_profile").status_code == 200
        assert HTTP.post(one.url + CHAT, json=request()).status_code == 200
        error = refused(HTTP.post(one.url + "/stop_profile"))
        assert "could not be written" in error["message"]
        assert HTTP.post(one.url + CHAT, json=request()).status_code == 200
