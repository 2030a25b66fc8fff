"""A client that disconnects ends its sequence, streaming or not, running or queued; and so does an
abort.

The engine's count of aborted sequences shows the end: without it, each sequence would run for most
of a minute.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.fake_engine import FakeExecutor
from tests.e2e.serving import HTTP, Served, gauge, served
from tests.support.waiting import LIMIT, until

MOST = 8000  #: tokens of a request at most, at 5 ms and more each
LONG = {"max_tokens": MOST, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(FakeExecutor(step_seconds=0.005, rows=2), context=8192) as one:
        yield one


def ends_aborted(server: Served, count: int, before: int) -> None:
    """Wait until nothing runs. ``count`` sequences must have been aborted since the count was
    ``before``.
    """
    server.wait_idle()
    assert server.executor.stats.aborted - before == count


def open_request(server: Served, path: str, body: dict[str, Any]) -> socket.socket:
    """Return a raw connection that has sent its request and read nothing."""
    connection = socket.create_connection((server.host, server.port), timeout=LIMIT)
    raw = json.dumps(body).encode()
    connection.sendall(
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(raw)}\r\n\r\n".encode()
        + raw
    )
    return connection


def wait_for(server: Served, name: str, value: float) -> None:
    until(
        lambda: gauge(HTTP.get(server.url + "/metrics").text, name) == value, f"{name} is {value}"
    )


CALLS = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "say:x"}], **LONG}),
    "completions": ("/v1/completions", {"prompt": "say:x", **LONG}),
    "generate": (
        "/generate",
        {"text": "say:x", "sampling_params": {"max_new_tokens": MOST, "ignore_eos": True}},
    ),
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("route", CALLS)
def test_leaving_frees_the_sequence(server: Served, route: str, stream: bool) -> None:
    path, body = CALLS[route]
    before = server.executor.stats.aborted
    connection = open_request(server, path, {**body, "stream": stream})
    wait_for(server, "num_requests_running", 1)
    connection.close()
    ends_aborted(server, 1, before)


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_ends_every_choice(server: Served, stream: bool) -> None:
    before = server.executor.stats.aborted
    connection = open_request(
        server, CALLS["chat"][0], {**CALLS["chat"][1], "n": 4, "stream": stream}
    )
    wait_for(server, "num_requests_running", 2)
    wait_for(server, "num_requests_waiting", 2)
    connection.close()
    ends_aborted(server, 4, before)


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_while_queued(server: Served, stream: bool) -> None:
    before = server.executor.stats.aborted
    running = [open_request(server, *CALLS["chat"]) for _ in range(2)]
    wait_for(server, "num_requests_running", 2)
    queued = open_request(server, CALLS["chat"][0], {**CALLS["chat"][1], "stream": stream})
    wait_for(server, "num_requests_waiting", 1)
    queued.close()
    wait_for(server, "num_requests_waiting", 0)
    wait_for(server, "num_requests_running", 2)
    assert server.executor.stats.aborted - before == 1
    for connection in running:
        connection.close()
    ends_aborted(server, 3, before)


def test_leaving_with_a_reset_or_a_half_close(server: Served) -> None:
    for how in ("reset", "shutdown"):
        before = server.executor.stats.aborted
        connection = open_request(server, CALLS["chat"][0], {**CALLS["chat"][1], "stream": True})
        wait_for(server, "num_requests_running", 1)
        if how == "reset":
            connection.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00"
            )
        connection.close()
        ends_aborted(server, 1, before)


def test_leaving_before_the_body_is_complete(server: Served) -> None:
    connection = socket.create_connection((server.host, server.port))
    connection.sendall(
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: 99\r\n\r\n{"
    )
    connection.close()
    assert HTTP.get(server.url + "/health").status_code == 200


@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_leavers_leave_nothing(server: Served, count: int) -> None:
    """Clients leave before the first token, in the middle and at the end."""
    server.wait_idle()
    files = psutil.Process().num_fds()
    for i in range(count):
        body = {**CALLS["chat"][1], "max_tokens": 3, "stream": bool(i % 2)}
        connection = open_request(server, CALLS["chat"][0], body)
        time.sleep(0.001 * (i % 20))
        connection.close()
    server.wait_idle()
    until(lambda: not server.context.jobs.running, "the last job is over")
    assert not server.context.client._mail and not server.context.client._requests
    until(lambda: psutil.Process().num_fds() <= files, "every connection is closed")


def abort(server: Served, **body: Any) -> None:
    assert HTTP.post(server.url + "/abort_request", json=body).json()["success"] is True


def test_abort_by_id_ends_all_choices_and_repeats_harmlessly(server: Served) -> None:
    answers: list[httpx.Response] = []
    body = {**CALLS["chat"][1], "n": 2, "request_id": "mine"}
    thread = threading.Thread(
        target=lambda: answers.append(HTTP.post(server.url + CALLS["chat"][0], json=body))
    )
    thread.start()
    wait_for(server, "num_requests_running", 2)
    abort(server, rid="unknown")
    wait_for(server, "num_requests_running", 2)
    abort(server, rid="mine")
    abort(server, rid="mine")
    thread.join(LIMIT)
    assert [choice["finish_reason"] for choice in answers[0].json()["choices"]] == [
        "abort",
        "abort",
    ]
    server.wait_idle()
    abort(server, rid="mine")


def test_abort_all_ends_streams_visibly(server: Served) -> None:
    texts: list[str] = []
    body = {**CALLS["chat"][1], "stream": True}
    threads = [
        threading.Thread(
            target=lambda: texts.append(HTTP.post(server.url + CALLS["chat"][0], json=body).text)
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    wait_for(server, "num_requests_running", 2)
    abort(server, abort_all=True)
    for thread in threads:
        thread.join(LIMIT)
    assert len(texts) == 2 and all('"finish_reason":"abort"' in text for text in texts)
    server.wait_idle()


def test_flush_is_refused_while_something_runs(server: Served) -> None:
    connection = open_request(server, *CALLS["chat"])
    wait_for(server, "num_requests_running", 1)
    answer = HTTP.post(server.url + "/flush_cache")
    assert answer.status_code == 400 and "running" in answer.json()["error"]["message"]
    connection.close()
    server.wait_idle()
    assert HTTP.post(server.url + "/flush_cache").json()["success"] is True
