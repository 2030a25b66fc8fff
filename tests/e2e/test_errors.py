"""Bad input fails only its own request: the table of promised answers; the next request is
served.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from glowplug.entrypoints.server.generate.job import Meter
from glowplug.entrypoints.server.transport import body as bodies
from tests.e2e.fake_engine import FakeExecutor
from tests.e2e.serving import Served, served
from tests.support.pace import slowness, yardstick
from tests.support.waiting import LIMIT

CONTEXT = 256
CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
HELLO = [{"role": "user", "content": "say:hi"}]
LEAKS = re.compile(r"Traceback|0x[0-9a-f]{6}|/(?:home|root|usr|var|work|tmp|etc)/")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(context=CONTEXT, server={"max_choices": 64}) as one:
        yield one


@pytest.fixture
def client(server: Served) -> Iterator[httpx.Client]:
    """A client; after each test the next request is served and nothing is held."""
    with httpx.Client(base_url=server.url, timeout=20) as one:
        yield one
        good = one.post(CHAT, json={"messages": HELLO})
        assert good.status_code == 200 and good.json()["choices"][0]["message"]["content"] == "hi"
        server.wait_idle()


def refused(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    """Return the error of a refused request, which contains nothing about the machine."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json" and answer.headers["x-request-id"]
    assert not LEAKS.search(answer.text), answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


#: (route, body beyond a valid one, param, words in the message)
FIELDS: list[tuple[str, dict[str, Any], str | None, str]] = [
    (CHAT, {"messages": None}, "messages", "required"),
    (CHAT, {"messages": []}, "messages", "at least 1"),
    (CHAT, {"messages": "hello"}, "messages", "list"),
    (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role", "'user'"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages.0.role", "required"),
    (CHAT, {"messages": user(None)}, "messages.0.content", "needs content"),
    (
        CHAT,
        {"messages": user([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}])},
        "messages.0.content",
        "text only",
    ),
    (CHAT, {"messages": user([{"type": "text"}])}, "messages.0.content", "needs text"),
    (CHAT, {"max_tokens": 0}, "max_tokens", "at least 1"),
    (CHAT, {"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
    (CHAT, {"max_tokens": 10**12}, "max_tokens", "less than or equal"),
    (CHAT, {"max_tokens": "10"}, "max_tokens", "integer"),
    (CHAT, {"max_tokens": True}, "max_tokens", "integer"),
    (CHAT, {"max_tokens": CONTEXT}, "max_tokens", str(CONTEXT)),
    (CHAT, {"temperature": -1}, "temperature", "greater than or equal to 0"),
    (CHAT, {"temperature": "hot"}, "temperature", "number"),
    (CHAT, {"top_p": 0}, "top_p", "greater than 0"),
    (CHAT, {"top_p": 2}, "top_p", "less than or equal to 1"),
    (CHAT, {"top_k": -2}, "top_k", "greater"),
    (CHAT, {"min_p": 1.5}, "min_p", "less"),
    (CHAT, {"n": 0}, "n", "greater than or equal to 1"),
    (CHAT, {"n": 10**9}, "n", "less than or equal to 128"),
    (CHAT, {"n": 65}, "n", "at most 64"),
    (CHAT, {"presence_penalty": 3}, "presence_penalty", "less"),
    (CHAT, {"frequency_penalty": -3}, "frequency_penalty", "greater"),
    (CHAT, {"repetition_penalty": 5e-324}, "repetition_penalty", "equal to 0.01"),
    (CHAT, {"seed": 2**63}, "seed", ""),
    (CHAT, {"stop": ""}, "stop", "empty"),
    (CHAT, {"stop": ["x"] * 17}, "stop", "16"),
    (CHAT, {"stop": ["x" * 2000]}, "stop", "1024 bytes"),
    (CHAT, {"stop": 5}, "stop", "string"),
    (CHAT, {"stop_token_ids": [-1]}, "stop_token_ids.0", "greater"),
    (CHAT, {"stop_token_ids": [9999]}, "stop_token_ids", "vocabulary"),
    (CHAT, {"min_tokens": 9, "max_tokens": 8}, "min_tokens", "between 0 and 8"),
    (CHAT, {"logit_bias": {"word": 1}}, "logit_bias", "not a token id"),
    (CHAT, {"logit_bias": {"-1": 1}}, "logit_bias", "not a token id"),
    (CHAT, {"logit_bias": {"9999": 1}}, "logit_bias", "vocabulary"),
    (CHAT, {"logit_bias": {"65": 101}}, "logit_bias.65", "less than or equal to 100"),
    (CHAT, {"allowed_token_ids": []}, "allowed_token_ids", "empty"),
    (CHAT, {"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs", "greater than or equal to 0"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
    (CHAT, {"stream": "yes"}, "stream", "boolean"),
    (CHAT, {"model": 5}, "model", "string"),
    (CHAT, {"input_ids": [9999]}, "prompt", "vocabulary"),
    (CHAT, {"input_ids": [-1]}, "input_ids.0", "greater"),
    (CHAT, {"input_ids": []}, "prompt", "empty"),
    (CHAT, {"request_id": "a b\n[INFO] forged"}, "request_id", "pattern"),
    (CHAT, {"cache_salt": "x" * 300}, "cache_salt", "at most 256"),
    (CHAT, {"priority": 2**40}, "priority", "less"),
    (
        CHAT,
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        "tools",
        "start it with --tool-call-parser",
    ),
    (CHAT, {"tool_choice": "required"}, "tool_choice", "needs tools"),
    (CHAT, {"response_format": {"type": "json_object"}}, None, "grammar.use = none"),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format",
        "needs json_schema.schema",
    ),
    (CHAT, {"response_format": "json"}, "response_format", "object"),
    (CHAT, {"regex": "(a+)+$"}, None, "grammar.use = none"),
    (CHAT, {"custom_logit_processor": "gASV"}, "custom_logit_processor", "refused"),
    (
        CHAT,
        {"chat_template": "{% for i in range(10**9) %}x{% endfor %}"},
        "chat_template",
        "refused",
    ),
    (CHAT, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "not allowed"),
    (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "not allowed"),
    (CHAT, {"chat_template_kwargs": {"thinking": {"a": 1}}}, "chat_template_kwargs", "boolean"),
    (CHAT, {"continue_final_message": True}, "continue_final_message", "role assistant"),
    (CHAT, {"reasoning_effort": "enormous"}, "reasoning_effort", "'low'"),
    (CHAT, {"messages": user("x" * 400)}, "prompt", str(CONTEXT)),
    (CHAT, {"messages": user("x" * 16 * CONTEXT)}, "prompt", "bytes"),
    (TEXT, {"prompt": None}, "prompt", "missing"),
    (TEXT, {"prompt": ""}, "prompt", "empty"),
    (TEXT, {"prompt": []}, "prompt", "empty"),
    (TEXT, {"prompt": [[]]}, "prompt", "empty"),
    (TEXT, {"prompt": [""]}, "prompt", "empty"),
    (
        TEXT,
        {"prompt": ["a", 5]},
        "prompt",
        "a string, a list of integers, a list of strings or a list of lists of",
    ),
    (TEXT, {"prompt": [9999]}, "prompt", "vocabulary"),
    (TEXT, {"prompt": [-5]}, None, ""),
    (TEXT, {"prompt": ["x"] * 257}, None, ""),
    (TEXT, {"prompt": ["x"] * 33, "n": 2}, "n", "at most 64"),
    (TEXT, {"max_tokens": 0}, "max_tokens", "at least 1"),
    (TEXT, {"logprobs": 21}, "logprobs", "less than or equal to 20"),
    (TEXT, {"logprobs": -1}, "logprobs", "greater"),
    (TEXT, {"suffix": "end"}, "suffix", "not supported"),
    (TEXT, {"best_of": 5}, "best_of", "must equal n"),
    (TEXT, {"prompt_embeds": "AAAA"}, "prompt_embeds", "refused"),
    (NATIVE, {"text": None}, "text", "either text or input_ids"),
    (NATIVE, {"rid": 5}, "rid", "a string or a list of strings"),
    (NATIVE, {"input_ids": [1]}, "text", "either text or input_ids"),
    (
        NATIVE,
        {"sampling_params": {"max_new_tokens": 0}},
        "sampling_params.max_new_tokens",
        "sampling_params.max_new_tokens must be between 1",
    ),
    (NATIVE, {"sampling_params": {"temperature": -1}}, "sampling_params.temperature", "greater"),
    (
        NATIVE,
        {"sampling_params": {"json_schema": "{"}},
        "sampling_params.json_schema",
        "is not valid JSON",
    ),
    (NATIVE, {"sampling_params": [{}, {}]}, "sampling_params", "1 prompts but 2"),
    (NATIVE, {"top_logprobs_num": -1}, "top_logprobs_num", "greater"),
    (NATIVE, {"rid": "../../etc"}, None, "pattern"),
    (NATIVE, {"image_data": "http://169.254.169.254/"}, "image_data", "text only"),
]
VALID = {CHAT: {"messages": HELLO}, TEXT: {"prompt": "say:hi"}, NATIVE: {"text": "say:hi"}}


@pytest.mark.parametrize(
    ("path", "change", "param", "words"), FIELDS, ids=lambda value: str(value)[:40]
)
def test_bad_fields(
    client: httpx.Client, path: str, change: dict[str, Any], param: str | None, words: str
) -> None:
    for stream in ({}, {"stream": True}):
        if "stream_options" in change and stream:
            continue
        error = refused(client.post(path, json={**VALID[path], **stream, **change}))
        assert words in error["message"] and error["type"] == "invalid_request_error"
        if param is not None:
            assert error["param"] == param


ITEMS: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -1}, "temperature", ": Input should be greater"),
    ({"temperature": "hot"}, "temperature", ": Input should be a valid number"),
    ({"stop": 5}, "stop", ": Input should be a string or a list of strings"),
    ({"max_new_tokens": 0}, "max_new_tokens", " must be between 1"),
    ({"max_new_tokens": 5, "min_new_tokens": 6}, "min_new_tokens", " must be between 0 and 5"),
    ({"max_new_tokens": CONTEXT}, "max_new_tokens", f"; max_new_tokens may be {CONTEXT - 6}"),
    ({"stop": [""]}, "stop", "a stop string must not be empty"),
    ({"stop_token_ids": [9999]}, "stop_token_ids", "9999"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "'x' is not a token id"),
    ({"json_schema": "{"}, "json_schema", " is not valid JSON"),
]


@pytest.mark.parametrize(("item", "field", "words"), ITEMS, ids=lambda value: str(value)[:40])
def test_a_bad_item_of_a_list_of_parameters_is_named_with_its_field(
    client: httpx.Client, item: dict[str, Any], field: str, words: str
) -> None:
    texts = ["say:hi", "say:ho", "say:ha"]
    for at in range(3):
        given = [{"max_new_tokens": 2} for _ in texts]
        given[at] = item
        error = refused(client.post(NATIVE, json={"text": texts, "sampling_params": given}))
        assert error["param"] == f"sampling_params.{at}.{field}"
        assert error["message"].startswith(error["param"]) and words in error["message"]


BODIES: list[tuple[bytes, str]] = [
    (b"", "JSON"),
    (b"{", "JSON"),
    (b"[]", "object"),
    (b"null", "object"),
    (b'"text"', "object"),
    (b"{}x", "JSON"),
    (b"\xff\xfe", "JSON"),
    (b'{"messages": NaN}', "JSON"),
    (b'{"temperature": 1e400}', "JSON"),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "JSON"),
    (b'{"a":' * 70 + b"1" + b"}" * 70, "64 levels"),
    (b"[" * 100_000, "JSON"),
    (b'{"messages": ' + b"[" * 80 + b"]" * 80 + b"}", "64 levels"),
]


@pytest.mark.parametrize(("body", "words"), BODIES, ids=lambda value: str(value)[:24])
def test_bad_bodies(client: httpx.Client, body: bytes, words: str) -> None:
    error = refused(client.post(CHAT, content=body, headers={"Content-Type": "application/json"}))
    assert words in error["message"] and error["code"] == "invalid_json"


def test_a_form_is_refused_as_no_json(client: httpx.Client) -> None:
    refused(client.post(CHAT, data={"messages": "x"}), 415)


def test_unknown_things_are_404_and_wrong_methods_405(client: httpx.Client) -> None:
    assert (
        refused(client.post(CHAT, json={"messages": HELLO, "model": "gpt-9"}), 404)["code"]
        == "model_not_found"
    )
    assert refused(client.get("/v1/files"), 404)["type"] == "not_found_error"
    refused(client.get(CHAT), 405)
    refused(client.delete("/health"), 405)


def test_context_errors_have_both_numbers(client: httpx.Client) -> None:
    error = refused(client.post(TEXT, json={"prompt": "x" * 300}))
    assert (
        error["code"] == "context_length_exceeded"
        and "256" in error["message"]
        and "300" in error["message"]
    )
    error = refused(client.post(TEXT, json={"prompt": "x" * 250, "max_tokens": 50}))
    assert (
        error["code"] == "context_length_exceeded"
        and "256" in error["message"]
        and "300" in error["message"]
    )
    room = int(error["message"].rpartition("max_tokens may be ")[2])
    assert client.post(TEXT, json={"prompt": "x" * 250, "max_tokens": room}).status_code == 200
    assert client.post(TEXT, json={"prompt": "x" * 250, "max_tokens": room + 1}).status_code == 400


def test_nul_and_odd_unicode_are_text(client: httpx.Client) -> None:
    for text in ("a\x00b", "\ufeff", "👩‍👩‍👧", "\u202e", "e\u0301"):
        assert (
            client.post(TEXT, json={"prompt": f"say:{text}", "max_tokens": 64}).json()["choices"][
                0
            ]["text"]
            == text
        )


def test_known_fields_are_silent_and_unknown_ones_are_named(client: httpx.Client) -> None:
    known = {
        "user": "me\n[INFO] forged",
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "tools": [],
        "parallel_tool_calls": False,
        "response_format": {"type": "text"},
        "tool_choice": "none",
    }
    answer = client.post(CHAT, json={"messages": HELLO, **known})
    assert answer.status_code == 200 and "x-glowplug-warning" not in answer.headers
    answer = client.post(CHAT, json={"messages": HELLO, "temprature": 1, "evil\r\nX-Set: 1": 2})
    assert (
        answer.headers["x-glowplug-warning"] == "unknown fields ignored: temprature, evil??X-Set??1"
    )


def test_large_bodies_are_refused_early(server: Served, client: httpx.Client) -> None:
    """The length in the head decides before any of the body is sent; without one, the body is
    refused before its end.
    """
    with socket.create_connection((server.host, server.port), timeout=LIMIT) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % (50 << 20)
        )
        assert connection.recv(65536).startswith(b"HTTP/1.1 413")

    def chunks() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * (1 << 20)

    refused(client.post(TEXT, content=chunks(), headers={"Content-Type": "application/json"}), 413)


def send_huge_prompt(server: Served) -> socket.socket:
    connection = socket.create_connection((server.host, server.port), timeout=LIMIT)
    body = b'{"prompt": "' + b"word " * (6 << 20) + b'"}'
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body) + body
    )
    return connection


def test_health_is_answered_while_a_huge_prompt_is_parsed(
    server: Served, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, parse = threading.Event(), threading.Event(), bodies._parse

    def held(raw: bytes, model: Any) -> Any:
        begun.set()
        assert go_on.wait(LIMIT)
        return parse(raw, model)

    monkeypatch.setattr(bodies, "_parse", held)
    with send_huge_prompt(server) as connection:
        assert begun.wait(LIMIT)
        for _ in range(20):
            assert client.get("/health").status_code == 200
        go_on.set()
        assert b" 400 " in connection.recv(100)


@pytest.mark.timing
def test_a_huge_prompt_costs_the_event_loop_little(server: Served, client: httpx.Client) -> None:
    """Its thread takes less than a second of processor time, the reading of 30 MB included."""
    paces, before = [yardstick()], server.loop_seconds()
    with send_huge_prompt(server) as connection:
        assert b" 400 " in connection.recv(100)
    spent = server.loop_seconds() - before
    assert spent < 1.0 * slowness([*paces, yardstick()])


def test_a_fan_out_of_a_billion_costs_nothing(server: Served, client: httpx.Client) -> None:
    before, asked = psutil.Process().memory_info().rss, len(server.executor.params)
    refused(client.post(CHAT, json={"messages": HELLO, "n": 10**9}))
    assert (
        len(server.executor.params) == asked
        and psutil.Process().memory_info().rss - before < 10 << 20
    )


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Big: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X-Many: 1\r\n" * 200 + b"\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Endless: " + b"a" * 500_000,
    ],
)
def test_large_heads_are_refused(server: Served, client: httpx.Client, head: bytes) -> None:
    with socket.create_connection((server.host, server.port), timeout=LIMIT) as connection:
        try:
            connection.sendall(head)
            answer = connection.recv(65536)
        except ConnectionError:
            return  # refused while it was still being sent
        assert answer == b"" or answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))


def test_garbage_is_400(server: Served, client: httpx.Client) -> None:
    negative = b"POST / HTTP/1.1\r\nContent-Length: -1\r\nHost: x\r\n\r\n"
    for garbage in (b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", negative):
        with socket.create_connection((server.host, server.port), timeout=LIMIT) as connection:
            connection.sendall(garbage)
            assert connection.recv(65536).startswith(b"HTTP/1.1 400")


def test_the_request_id_is_echoed_when_harmless(client: httpx.Client) -> None:
    answer = client.post(CHAT, json={"messages": HELLO}, headers={"X-Request-Id": "job-1.2:3"})
    assert (
        answer.headers["x-request-id"] == "job-1.2:3"
        and answer.json()["id"] == "chatcmpl-job-1.2:3"
    )
    odd = client.get("/health", headers={"X-Request-Id": "a b;<script>"})
    assert re.fullmatch(r"[0-9a-f]{32}", odd.headers["x-request-id"])
    assert (
        client.post(CHAT, json={"messages": HELLO, "rid": "mine"}).json()["id"] == "chatcmpl-mine"
    )


def test_engine_failures_are_sanitised(client: httpx.Client) -> None:
    bad = [{"role": "user", "content": "fail:nan"}]
    error = refused(client.post(CHAT, json={"messages": bad}), 500)
    assert error["code"] == "nan_logits" and "NaN in the logits" in error["message"]
    text = client.post(CHAT, json={"messages": bad, "stream": True}).text
    last = [line for line in text.splitlines() if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "nan_logits"
    assert "[DONE]" not in text and not LEAKS.search(text)


def test_our_own_bugs_reveal_nothing(
    server: Served,
    client: httpx.Client,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*arguments: object) -> None:
        raise ZeroDivisionError("in /home/someone/secret.py at 0x7f0011223344")

    for stream in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(Meter, "observe", broken)
            error = refused(client.post(CHAT, json={"messages": HELLO, "stream": stream}), 500)
        assert (error["message"], error["code"], error["type"]) == (
            "internal error",
            "internal_error",
            "server_error",
        )
        server.wait_idle()
    assert "ZeroDivisionError" in caplog.text, "the operator's log has the error"


def test_timeouts_are_504_and_free_their_pages(client: httpx.Client) -> None:
    for header in ("0", "-1", "soon", "nan", "1e9"):
        refused(client.post(CHAT, json={"messages": HELLO}, headers={"X-Request-Timeout": header}))
    hang = {"messages": user("hang:")}
    error = refused(client.post(CHAT, json=hang, headers={"X-Request-Timeout": "0.2"}), 504)
    assert error["code"] == "request_timeout"
    refused(
        client.post(CHAT, json={**hang, "stream": True}, headers={"X-Request-Timeout": "0.2"}), 504
    )


def test_a_full_queue_is_429_with_retry_after() -> None:
    with served(FakeExecutor(rows=1, queue_limit=2, step_seconds=0.01)) as one:
        with httpx.Client(base_url=one.url, timeout=20) as client:
            answer = client.post(CHAT, json={"messages": user("say:" + "x" * 50), "n": 9})
            error = refused(answer, 429)
            assert error["code"] == "queue_full" and error["type"] == "rate_limit_error"
            assert int(answer.headers["retry-after"]) >= 1
            one.wait_idle()
            refused(
                client.post(
                    CHAT, json={"messages": user("say:" + "x" * 50), "n": 9, "stream": True}
                ),
                429,
            )
            one.wait_idle()
            assert client.post(CHAT, json={"messages": HELLO}).status_code == 200


def test_without_a_tokenizer_only_ids_are_taken() -> None:
    with served(tokenizer=False) as one, httpx.Client(base_url=one.url) as client:
        assert refused(client.post(CHAT, json={"messages": HELLO}))["code"] == "no_tokenizer"
        assert refused(client.post(TEXT, json={"prompt": "x"}))["code"] == "no_tokenizer"
        refused(client.post(TEXT, json={"prompt": [1], "stop": "x"}))
        answer = client.post(
            NATIVE, json={"input_ids": list(b"say:ok"), "sampling_params": {"max_new_tokens": 2}}
        )
        assert answer.json()["output_ids"] == list(b"ok")
        scored = client.post(
            TEXT, json={"prompt": list(b"say:ok"), "max_tokens": 2, "logprobs": 1}
        ).json()
        assert scored["choices"][0]["logprobs"]["tokens"] == ["token_id:111", "token_id:107"]


def test_labels_are_no_paths(server: Served, client: httpx.Client) -> None:
    for label in ("../../etc/x", "/abs", "a\x00b", "", "x" * 65):
        refused(client.post("/start_profile", json={"label": label}))
    assert server.executor.profiled == []
    assert client.post("/start_profile", json={"label": "run-1"}).status_code == 200
    assert client.post("/start_profile").status_code == 200
    assert server.executor.profiled == ["run-1", "profile"]
