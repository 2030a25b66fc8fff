"""The request log: a line for each request with its counts and times, refusals with the reason,
never a prompt.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from glowplug.core.config.operation_options import LogOptions
from glowplug.entrypoints.server.logs import JsonLine, OneLine, printable
from tests.e2e.fake_engine import FakeExecutor
from tests.e2e.serving import Served, served
from tests.support.source_tree import ROOT
from tests.support.waiting import LIMIT, until

KEY, ADMIN = "client-key", "admin-key"
SECRET = "Xylophon-4711"  #: in every prompt here
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Lines(logging.Handler):
    """The lines of the server's loggers, in both formats."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.human: list[str] = []
        self.fields: list[dict[str, Any]] = []
        self.levels: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "glowplug.request":
            self.levels.append(record.levelname)
            self.fields.append(json.loads(JsonLine().format(record)))
        self.human.append(OneLine().format(record))

    def requests(self, count: int) -> list[dict[str, Any]]:
        """Return the first ``count`` requests that are no polls of the test's own; wait for the
        lines, which are written late.
        """

        def found() -> list[dict[str, Any]]:
            return [one for one in self.fields if one["route"] not in ("/ready", "/metrics")]

        until(lambda: len(found()) >= count, f"{count} lines")
        return found()


@pytest.fixture
def lines() -> Iterator[Lines]:
    logger, handler = logging.getLogger("glowplug"), Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture
def server(lines: Lines) -> Iterator[Served]:
    with served(context=512) as one:
        yield one


def chat(text: Any = SECRET, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


def raw(server: Served, request: bytes) -> None:
    """Send bytes, and read until the server closes."""
    with socket.create_connection((server.host, server.port), 10) as connection:
        connection.sendall(request)
        with suppress(ConnectionResetError):  # the server may close before it has read all
            while connection.recv(65536):
                pass


# ---- answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_has_its_counts_and_times(server: Served, lines: Lines, stream: bool) -> None:
    answer = httpx.post(
        server.url + COMPLETIONS,
        headers={"x-request-id": "abc-1"},
        json={
            "prompt": "say:hello",
            "max_tokens": 3,
            "n": 2,
            "stream": stream,
            "cache_salt": "warm",
        },
    )
    (one,) = lines.requests(1)
    assert (
        one["id"] == answer.headers["x-request-id"] == "abc-1"
        and one["logger"] == "glowplug.request"
    )
    assert (one["method"], one["route"], one["status"]) == ("POST", COMPLETIONS, 200)
    length = len("say:hello")
    assert (one["prompt_tokens"], one["output_tokens"]) == (length, 6), (
        "a shared prompt counts once"
    )
    assert (one["stream"], one["finish_reason"]) == (stream, "length")
    assert 0 < one["first_token_seconds"] <= one["seconds"]
    assert one["client"].startswith("127.0.0.1:") and "error" not in one and "rid" not in one
    line = lines.human[-1]
    assert line.startswith("INFO ") and f"POST {COMPLETIONS} 200 id=abc-1 client=127.0.0.1:" in line
    assert f" in={length} out=6 cached=0 first=" in line and " finish=length" in line
    assert line.endswith(" stream") == stream


def test_tokens_found_in_the_prefix_cache_and_an_id_of_the_body_s_own(
    server: Served, lines: Lines
) -> None:
    ids = [65] * 40
    httpx.post(
        server.url + COMPLETIONS,
        json={
            "prompt": [ids, ids[:20]],
            "max_tokens": 1,
            "n": 2,
            "cache_salt": "warm",
            "request_id": "mine",
        },
    )
    (one,) = lines.requests(1)
    assert (one["prompt_tokens"], one["cached_tokens"], one["output_tokens"]) == (60, 32 + 16, 4)
    assert one["rid"] == "mine" and " rid=mine " in lines.human[-1]


def test_each_finish_reason_is_named_once(server: Served, lines: Lines) -> None:
    httpx.post(
        server.url + COMPLETIONS, json={"prompt": ["say:a", "say:abcdefgh"], "max_tokens": 4}
    )
    assert set(lines.requests(1)[0]["finish_reason"].split(",")) == {"stop", "length"}


def test_requests_that_generate_nothing_have_no_counts(server: Served, lines: Lines) -> None:
    httpx.get(server.url + "/v1/models")
    (one,) = lines.requests(1)
    assert (one["route"], one["status"]) == ("/v1/models", 200) and "prompt_tokens" not in one
    assert " in=" not in lines.human[-1] and " total=" in lines.human[-1]


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "more", "status", "code", "words"),
    [
        ("POST", CHAT, {"json": chat(temperature="hot")}, 400, None, "temperature"),
        (
            "POST",
            CHAT,
            {"content": b'{"messages": ', "headers": {"content-type": "application/json"}},
            400,
            "invalid_json",
            "not valid JSON",
        ),
        ("POST", CHAT, {"json": chat(SECRET * 100)}, 400, "context_length_exceeded", "512 tokens"),
        ("POST", CHAT, {"json": chat(model="other")}, 404, "model_not_found", "'other'"),
        ("GET", "/v1/files", {}, 404, None, "Not Found"),
        ("GET", CHAT, {}, 405, None, "Method Not Allowed"),
        (
            "POST",
            CHAT,
            {"json": chat(SECRET * 1000)},
            413,
            "body_too_large",
            "larger than 4096 bytes",
        ),
        (
            "POST",
            CHAT,
            {"content": b"messages=x"},
            415,
            "unsupported_media_type",
            "application/json",
        ),
        ("POST", CHAT, {"json": chat("fail:nan")}, 500, "nan_logits", "NaN in the logits"),
        (
            "POST",
            CHAT,
            {"json": chat("hang:"), "headers": {"x-request-timeout": "0.05"}},
            504,
            "request_timeout",
            "out of time",
        ),
    ],
)
def test_a_refusal_has_its_reason(
    lines: Lines,
    method: str,
    path: str,
    more: dict[str, Any],
    status: int,
    code: str | None,
    words: str,
) -> None:
    with served(context=512, server={"max_body_bytes": 4096}) as server:
        answer = httpx.request(method, server.url + path, **more)
        (one,) = lines.requests(1)
    assert answer.status_code == one["status"] == status
    assert (one["route"], one["code"]) == (path, code) and words in one["error"]
    assert one["id"] == answer.headers["x-request-id"]
    assert lines.levels[-1] == ("WARNING" if status >= 500 else "INFO")


def test_missing_and_wrong_keys_are_logged_without_them(lines: Lines) -> None:
    with served(
        server={"api_key": KEY, "admin_api_key": ADMIN, "open_routes": ["/ready"]}
    ) as server:
        httpx.get(server.url + "/v1/models")
        httpx.get(server.url + "/v1/models", headers={"authorization": "Bearer wrong-key"})
        httpx.post(server.url + "/flush_cache", headers={"authorization": f"Bearer {KEY}"})
        httpx.get(server.url + "/metrics")
        found = lines.requests(3)
        assert [(one["status"], one["code"]) for one in found] == [
            (401, "invalid_api_key"),
            (401, "invalid_api_key"),
            (403, "admin_key_required"),
        ]
        metrics = [
            level for one, level in zip(lines.fields, lines.levels) if one["route"] == "/metrics"
        ]
        assert metrics == ["INFO"], "a poll that is refused is shown"
    assert not any(secret in "".join(lines.human) for secret in (KEY, ADMIN, "wrong-key"))


def test_a_full_queue_is_logged(lines: Lines) -> None:
    with served(FakeExecutor(queue_limit=0)) as server:
        assert httpx.post(server.url + CHAT, json=chat()).status_code == 429
        (one,) = lines.requests(1)
    assert (one["status"], one["code"], one["output_tokens"]) == (429, "queue_full", 0)
    assert one["prompt_tokens"] > 0 and one["first_token_seconds"] is None


def test_a_server_that_loads_or_drains_is_logged(lines: Lines) -> None:
    loaded = threading.Event()
    with served(FakeExecutor(loaded=loaded), ready=False) as server:
        httpx.post(server.url + CHAT, json=chat())
        assert lines.requests(1)[0]["code"] == "starting"
        loaded.set()


def test_bytes_that_are_no_request_are_logged_with_the_peer(server: Served, lines: Lines) -> None:
    raw(server, b"\x16\x03\x01 not HTTP\r\n\r\n")
    raw(server, b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: " + b"b" * (1 << 17))
    found = lines.requests(2)
    assert [(one["status"], one["code"]) for one in found] == [
        (400, "invalid_http"),
        (431, "headers_too_large"),
    ]
    assert all(one["client"].startswith("127.0.0.1:") for one in found)


def test_our_own_bugs_are_logged_by_type(
    server: Served, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise ZeroDivisionError(SECRET)

    monkeypatch.setattr("glowplug.entrypoints.server.native.tokenize._card", broken)
    assert httpx.get(server.url + "/v1/models").status_code == 500
    (one,) = lines.requests(1)
    assert (one["status"], one["code"], one["error"]) == (
        500,
        "internal_error",
        "ZeroDivisionError",
    )


def test_a_stream_that_fails_half_way_is_a_warning(server: Served, lines: Lines) -> None:
    httpx.post(server.url + CHAT, json=chat("fail:nan", stream=True))
    (one,) = lines.requests(1)
    assert (one["status"], one["code"], one["output_tokens"], one["finish_reason"]) == (
        200,
        "nan_logits",
        2,
        "error",
    )
    assert lines.levels[-1] == "WARNING"


# ---- clients that leave --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stream", "text", "status"),
    [(True, "say:" + "a" * 400, 200), (True, "hang:", 499), (False, "say:" + "a" * 400, 499)],
)
def test_a_client_that_leaves_is_logged_as_such(
    lines: Lines, stream: bool, text: str, status: int
) -> None:
    with served(FakeExecutor(step_seconds=0.005)) as server:
        body = json.dumps(chat(text, stream=stream)).encode()
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}"
        )
        with socket.create_connection((server.host, server.port), 10) as connection:
            connection.sendall(head.encode() + b"\r\n\r\n" + body)
            if status == 200:
                read = b""
                while b"data: " not in read:  # the headers may come alone
                    part = connection.recv(65536)
                    assert part, read
                    read += part
            else:
                while not server.executor.running:
                    time.sleep(0.005)
        (one,) = lines.requests(1)
        server.wait_idle()
    assert one["client_left"] and one["status"] == status and one["finish_reason"] is None
    assert one["prompt_tokens"] > 0 and (one["output_tokens"] > 0 or text == "hang:" or not stream)
    assert any(" client left" in line for line in lines.human)
    assert "ERROR" not in lines.levels and "WARNING" not in lines.levels


# ---- privacy and forgery -------------------------------------------------------------------------


def test_no_prompt_appears_at_any_level(lines: Lines) -> None:
    with served(context=512) as server:
        bodies: list[tuple[str, Any]] = [
            (CHAT, chat()),
            (CHAT, chat(stream=True)),
            (CHAT, chat(SECRET * 100)),
            (CHAT, chat(stop=7)),
            (CHAT, {"messages": SECRET}),
            (CHAT, {"messages": [{"role": SECRET, "content": SECRET}]}),
            (CHAT, chat([{"type": "text", "text": 5, "x": SECRET}])),
            (COMPLETIONS, {"prompt": SECRET}),
            (COMPLETIONS, {"prompt": {"a": SECRET}}),
            (COMPLETIONS, {"prompt": "fail:nan" + SECRET}),
            (COMPLETIONS, {"prompt": [SECRET, 5]}),
            ("/generate", {"text": SECRET, "sampling_params": {"max_new_tokens": -1}}),
            ("/generate", {"text": "hang:" + SECRET, "rid": "r"}),
            ("/tokenize", {"prompt": SECRET, "messages": []}),
        ]
        with httpx.Client(
            base_url=server.url, timeout=10.0, headers={"x-request-timeout": "0.2"}
        ) as client:
            for path, body in bodies:
                client.post(path, json=body)
            client.post(
                CHAT,
                content=json.dumps(chat()).encode()[:-3],
                headers={"content-type": "application/json"},
            )
        lines.requests(len(bodies) + 1)
    assert SECRET not in "".join(lines.human) and SECRET not in json.dumps(lines.fields)


def test_a_template_s_own_words_stay_out(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates may quote the messages in their errors; the client reads them, the log has only the
    code.
    """
    monkeypatch.setattr(
        "tests.e2e.fake_engine.TEMPLATE", "{{ raise_exception('no ' + messages[0].content) }}"
    )
    with served() as server:
        answer = httpx.post(server.url + CHAT, json=chat())
        (one,) = lines.requests(1)
    assert SECRET in answer.text
    assert (one["status"], one["code"], one["error"]) == (400, "template_error", "")
    assert SECRET not in "".join(lines.human)


@pytest.mark.parametrize("stream", [True, False])
def test_the_traceback_of_a_request_has_its_id(
    server: Served,
    lines: Lines,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    stream: bool,
) -> None:
    def broken(self: Any, delta: Any) -> None:
        if delta.output_tokens > 1:
            raise RuntimeError("a fault of the server")

    monkeypatch.setattr("glowplug.entrypoints.server.generate.job.Meter.observe", broken)
    with httpx.Client(base_url=server.url, headers={"x-request-id": "my-own-1"}) as client:
        client.post(COMPLETIONS, json={"prompt": "say:abcdef", "stream": stream})
    lines.requests(1)
    found: set[str] = set()
    for _ in range(1000):  # the HTTP server logs it after the response
        shown = [*lines.human, *(OneLine().format(record) for record in caplog.records)]
        found = {line for line in shown if "a fault of the server" in line}
        if found:
            break
        time.sleep(0.01)
    (traceback,) = found
    assert "id=my-own-1" in traceback or "request id: my-own-1" in traceback


def test_a_line_about_a_request_has_its_id_in_both_formats() -> None:
    record = logging.makeLogRecord({"msg": "a stream failed", "name": "x", "id": "a\x1b1"})
    assert OneLine().format(record).endswith("a stream failed id=a\\x1b1")
    assert json.loads(JsonLine().format(record))["id"] == "a\x1b1"


FORGERIES = [
    "x\nINFO 01-01 00:00:00 [glowplug.request] POST / 200",
    "x\r\nforged",
    "\x1b[2J",
    "\x9b2J",
    "a\u2028b",
    "a\x00b",
    "a\u202eb",
    'a" status=200 "',
]


@pytest.mark.parametrize("text", FORGERIES)
def test_nothing_that_a_client_sends_forges_a_line(server: Served, lines: Lines, text: str) -> None:
    with httpx.Client(base_url=server.url) as client:
        client.post(CHAT, json=chat(model=text))
        client.get("/" + quote(text))
        client.post(COMPLETIONS, json={"prompt": "a", "logit_bias": {text: 1}})
    lines.requests(3)
    for line in lines.human:
        assert line.isprintable(), line
        outside = re.sub(r'"(?:[^"\\]|\\.)*"', "", line)  # quoted text is one value
        assert not re.search(r"\] POST / 200|forged|status=200", outside), line
    assert all(
        printable(str(value)) == str(value) for one in lines.fields for value in one.values()
    )


def test_an_id_that_could_forge_is_replaced(server: Served, lines: Lines) -> None:
    httpx.get(server.url + "/v1/models", headers={"x-request-id": "a b finish=stop"})
    assert re.fullmatch(r"[0-9a-f]{32}", lines.requests(1)[0]["id"])


def test_escapes_leave_other_text_alone() -> None:
    assert printable("grüße 東京 🗼") == "grüße 東京 🗼"
    assert printable("a\nb\x1b\x9b\u2028\ud800") == r"a\nb\x1b\x9b\u2028\ud800"


# ---- how much ------------------------------------------------------------------------------------


def test_polls_are_shown_at_level_debug(server: Served, lines: Lines) -> None:
    for path in ("/health", "/ready", "/metrics", "/health_generate"):
        httpx.get(server.url + path)
    until(
        lambda: any(one["route"] == "/health_generate" for one in lines.fields),
        "the last poll's line",
    )
    assert {one["route"] for one in lines.fields} == {
        "/health",
        "/ready",
        "/metrics",
        "/health_generate",
    }
    assert set(lines.levels) == {"DEBUG"}


def test_the_option_turns_all_of_it_off(lines: Lines) -> None:
    with served(log={"requests": False}) as server:
        httpx.post(server.url + CHAT, json=chat())
        httpx.get(server.url + "/nowhere")
        raw(server, b"\x00\x00\r\n\r\n")
    assert lines.fields == [] and LogOptions().requests


def test_a_server_process_writes_the_lines_once(tmp_path: Path) -> None:
    """The loggers are set up as by ``serve``: bytes that are no HTTP have one line, without a
    second one of uvicorn.
    """
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    log = tmp_path / "stderr"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.fake_server", str(port), "0", "0", "0"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
            stderr=stderr,
        )
        try:
            until(lambda: "ready: " in log.read_text(), "the server is ready")
            with socket.create_connection(("127.0.0.1", port), 10) as connection:
                connection.sendall(b"\x16\x03\x01 not HTTP\r\n\r\n")
                connection.recv(65536)
            httpx.get(f"http://127.0.0.1:{port}/health")
            httpx.get(f"http://127.0.0.1:{port}/v1/models")
        finally:
            process.terminate()
            process.wait(LIMIT)
    requests = [
        line
        for line in log.read_text().splitlines()
        if "[glowplug.request]" in line or "uvicorn" in line
    ]
    assert (
        len(requests) == 2
        and "code=invalid_http" in requests[0]
        and "GET /v1/models 200" in requests[1]
    )
