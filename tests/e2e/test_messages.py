"""``/v1/messages`` and ``/v1/messages/count_tokens``: messages, streams, tools, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from glowplug.entrypoints.server.messages.fields import REFUSED
from glowplug.entrypoints.server.protocol.messages import MessagesRequest
from tests.e2e.chat_apis import ANSWERS, CALLS, HOSTILE, PARAMETERS, THOUGHT, nested, served_apis
from tests.e2e.fake_engine import FakeExecutor
from tests.e2e.serving import HTTP, Served
from tests.support.event_order import events_of, message_of

ROUTE = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
TOOL = {"name": "get_weather", "description": "Weather", "input_schema": PARAMETERS}
KINDS = {"text": "content", "thinking": "reasoning", "tool_use": "tool_call"}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served_apis() as one:
        yield one


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def post(server: Served, route: str = ROUTE, **body: Any) -> httpx.Response:
    return HTTP.post(server.url + route, json={"max_tokens": 1000, "messages": user("x"), **body})


def made(server: Served, **body: Any) -> dict[str, Any]:
    answer = post(server, **body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def counted(server: Served, **body: Any) -> int:
    answer = post(server, COUNT, **body)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["input_tokens"])


def refused(server: Served, status: int = 400, route: str = ROUTE, **body: Any) -> str:
    """Return the message of an error, whose form is Anthropic's."""
    answer = post(server, route, **body)
    assert answer.status_code == status, answer.text
    found = answer.json()
    assert found.keys() == {"type", "error", "request_id"} and found["type"] == "error"
    assert found["error"].keys() == {"type", "message"}
    assert found["request_id"] == answer.headers["X-Request-Id"]
    return str(found["error"]["message"])


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without its ids."""
    blocks = [{**block, "id": ""} for block in message["content"]]
    return {**message, "id": "", "content": blocks}


def test_a_message_has_text_and_counts(server: Served) -> None:
    found = made(server, model="fake", messages=user("say:hé"), system="Be brief.")
    assert found["id"].startswith("msg_") and found.keys() == {
        *("id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage")
    }
    assert (found["type"], found["role"], found["model"]) == ("message", "assistant", "fake")
    assert found["content"] == [{"type": "text", "text": "hé"}]
    assert (found["stop_reason"], found["stop_sequence"]) == ("end_turn", None)
    prompt = len("Be brief.") + len("say:hé".encode()) + 4
    assert found["usage"] == {
        "input_tokens": prompt,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 4,
        "output_tokens_details": {"thinking_tokens": 0},
    }
    warm = made(server, messages=user("say:" + "x" * 40), cache_salt="warm")["usage"]
    assert (warm["input_tokens"], warm["cache_read_input_tokens"]) == (47 - 32, 32)


@pytest.mark.parametrize("text", ANSWERS)
@pytest.mark.parametrize("limit", [1000, 30])
def test_a_stream_follows_the_published_order_and_equals_the_whole(
    server: Served, text: str, limit: int
) -> None:
    body = {"messages": user(f"say:{text}"), "tools": [TOOL], "max_tokens": limit}
    whole = made(server, **body)
    answer = post(server, **body, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert plain(message_of(events_of(answer.text))) == plain(whole)
    kinds = [KINDS[block["type"]] for block in whole["content"]]
    if len(text.encode()) < limit:
        assert kinds == ANSWERS[text]
        assert whole["stop_reason"] == ("tool_use" if "tool_call" in kinds else "end_turn")
    else:
        assert whole["stop_reason"] == "max_tokens"


def test_reasons_of_the_end(server: Served) -> None:
    cut = made(server, messages=user("say:one two"), stop_sequences=["w", "zz"])
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", "w")
    assert cut["content"][0]["text"] == "one t"
    long = {"messages": user("say:" + "y" * 3000), "ignore_eos": True}
    full = made(server, **long, max_tokens=100000)
    assert full["stop_reason"] == "model_context_window_exceeded"
    assert made(server, **long, max_tokens=9)["stop_reason"] == "max_tokens"
    assert "context length" in refused(server, messages=user("z" * 4096))


def test_thinking_is_a_block_that_comes_back(server: Served) -> None:
    body = {"messages": user(f"say:{THOUGHT}so")}
    enabled = {"type": "enabled", "budget_tokens": 100}
    thinking, text = made(server, **body, thinking=enabled)["content"]
    assert thinking["thinking"] == "first this, then that" and thinking["signature"]
    assert text == {"type": "text", "text": "so<think>"}  # the fake repeats the prompt's end
    omitted = made(server, **body, thinking={**enabled, "display": "omitted"})["content"]
    assert omitted == [{**thinking, "thinking": ""}, text]
    hidden = post(server, **body, thinking={**enabled, "display": "omitted"}, stream=True)
    assert message_of(events_of(hidden.text))["content"] == omitted
    said = [*user("a"), {"role": "assistant", "content": [thinking, text]}, *user("b")]
    assert counted(server, messages=said) == len("aso<think>b") + 5
    kinds: list[dict[str, Any]] = [{"type": "disabled"}, {"type": "adaptive"}, enabled]
    counts = [counted(server, thinking=kind) for kind in kinds]
    assert counts[1] - counts[0] == len("<think>") and counts[1] == counts[2]


def test_a_last_message_of_the_assistant_is_continued(server: Served) -> None:
    said = [*user("say:x"), {"role": "assistant", "content": "It is"}]
    assert counted(server, messages=said) == len("say:xIt is") + 3
    assert made(server, messages=said)["stop_reason"] == "end_turn"


def test_calls_go_out_and_their_results_come_back(server: Served) -> None:
    first = made(server, messages=user(f"say:{CALLS}"), tools=[TOOL])
    calls = first["content"]
    assert [call["input"]["city"] for call in calls] == ["Paris", "北京 🗼 é"]
    assert len({call["id"] for call in calls}) == 2
    said = [*user("say:x"), {"role": "assistant", "content": calls}]
    results: list[dict[str, Any]] = [
        {"type": "tool_result", "tool_use_id": calls[0]["id"], "content": "sunny"},
        {
            "type": "tool_result",
            "tool_use_id": calls[1]["id"],
            "content": [{"type": "text", "text": "no city"}],
            "is_error": True,
        },
    ]
    more = {"type": "text", "text": "say:done"}
    answered = [*said, {"role": "user", "content": [*results, more]}]
    assert made(server, messages=answered, tools=[TOOL])["content"][0]["text"] == "done"
    base = counted(server, messages=said[:1]) - 1
    # each special token, or name of a role in the template, counts once
    roles = len("<|tool|>") * 2 + len("sunny") + len("Error: no city") + len("say:done") + 3
    assert counted(server, messages=answered) == base + roles
    counted(server, messages=said)  # a call without its result can be counted
    for wrong, place in (
        (said, "messages.1"),
        ([*said, {"role": "user", "content": results[:1]}], "messages.1"),
        ([*said, {"role": "user", "content": "no"}], "messages.1"),
        ([*answered, {"role": "user", "content": results}], "messages.3"),
    ):
        assert place in refused(server, messages=wrong, tools=[TOOL])


def test_choices_among_tools(server: Served) -> None:
    body = {"messages": user(f"say:{CALLS}"), "tools": [TOOL]}
    one = made(server, **body, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block["type"] for block in one["content"]] == ["tool_use"]
    none = made(server, **body, tool_choice={"type": "none"})
    assert [block["type"] for block in none["content"]] == ["text"]
    for choice in ({"type": "tool", "name": "other"}, {"type": "any", "name": "x"}):
        assert refused(server, **body, tool_choice=choice).startswith("tool_choice")
    assert refused(server, tool_choice={"type": "any"}).startswith("tool_choice")


def test_system_prompts_and_blocks_are_joined(server: Served) -> None:
    blocks = [{"type": "text", "text": "A"}, {"type": "text", "text": "B", "cache_control": {}}]
    assert counted(server, system=blocks) == counted(server, system="A\n\nB")
    split = [{"role": "user", "content": [*blocks]}]
    assert counted(server, messages=split) == counted(server, messages=user("A\nB"))
    inner = [{"role": "system", "content": "S"}, *user("x")]
    assert counted(server, messages=inner) == counted(server, system="S")


def test_counted_tokens_are_those_of_the_message(server: Served) -> None:
    body = {"messages": user("say:hello"), "system": "S", "thinking": {"type": "adaptive"}}
    assert counted(server, **body) == made(server, **body)["usage"]["input_tokens"]
    answer = HTTP.post(server.url + COUNT, json={"messages": user("x")})
    assert answer.json() == {"input_tokens": 4}


@pytest.mark.parametrize("field", sorted(REFUSED))
def test_fields_without_support_are_refused_with_the_reason(server: Served, field: str) -> None:
    value: Any = {"stop": ["x"], "stream_options": {"include_usage": True}}.get(field, True)
    message = refused(server, **{field: value})
    assert message.startswith(f"{field} ") and len(message) > len(field) + 10


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"speed": "fast"}, "speed"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1000}}, "less than max_tokens"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 10}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "no tools of its own"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools.0.defer_loading"),
        ({"tools": [{**TOOL, "allowed_callers": ["code_execution"]}]}, "tools.0.allowed_callers"),
        ({"tools": [TOOL, TOOL]}, "tools.1.name"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "text only"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "does not belong"),
    ],
)
def test_values_without_support_are_refused(
    server: Served, body: dict[str, Any], words: str
) -> None:
    assert words in refused(server, **body)


@pytest.mark.parametrize(("field", "value"), HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_input_is_a_fault_of_the_client(server: Served, field: str, value: Any) -> None:
    for stream in (False, True):
        known = field in MessagesRequest.model_fields or (field in REFUSED and value)
        status = post(server, **{"stream": stream, field: value}).status_code
        assert 400 <= status < 500 if known else status == 200
    if field in ("messages", "system", "tools", "thinking"):
        valid = value == {"type": "enabled", "budget_tokens": 1 << 20}
        assert post(server, COUNT, **{field: value}).status_code == (200 if valid else 400)


def test_hostile_nesting_and_no_body(server: Served) -> None:
    assert 400 <= post(server, metadata={"a": nested(100)}).status_code < 500
    schema = {"type": "object", "properties": {"a": nested(40)}}
    assert 400 <= post(server, tools=[{"name": "f", "input_schema": schema}]).status_code < 500
    raw = {"Content-Type": "application/json"}
    for content in (b"", b"[" * 5000, b"null", b'{"messages": "\xff"}'):
        found = HTTP.post(server.url + ROUTE, content=content, headers=raw)
        assert found.status_code == 400 and found.json()["type"] == "error"


@pytest.mark.parametrize(
    ("change", "status", "kind"),
    [
        ({"json": {}}, 400, "invalid_request_error"),
        ({"json": {"messages": user("x"), "max_tokens": 1, "model": "x"}}, 404, "not_found_error"),
        ({"headers": {"X-Api-Key": "wrong"}}, 401, "authentication_error"),
        ({"content": b"x" * 5000}, 413, "request_too_large"),
        ({"content": b"x"}, 415, "invalid_request_error"),
        ({"headers": {f"x-{n}": "y" for n in range(101)}}, 431, "invalid_request_error"),
        ({"method": "GET"}, 405, "invalid_request_error"),
        ({"route": ROUTE + "/batches"}, 404, "not_found_error"),
        ({"json": {"messages": user("fail:nan"), "max_tokens": 9}}, 500, "api_error"),
    ],
    ids=lambda value: str(value) if isinstance(value, int | str) else "",
)
def test_every_error_has_anthropics_form(change: dict[str, Any], status: int, kind: str) -> None:
    with served_apis(server={"api_key": "k", "max_body_bytes": 2048}) as one:
        request = {"method": "POST", "headers": {}, "route": ROUTE, **change}
        headers = {"X-Api-Key": "k", **request.pop("headers")}
        url = one.url + request.pop("route")
        answer = HTTP.request(request.pop("method"), url, headers=headers, **request)
        assert answer.status_code == status, answer.text
        assert answer.json()["type"] == "error" and answer.json()["error"]["type"] == kind
        assert "error" not in answer.json()["error"] and "/var" not in answer.text


def test_a_late_fault_is_the_streams_last_event(server: Served) -> None:
    events = events_of(post(server, messages=user("fail:nan say:abc"), stream=True).text)
    assert [event["type"] for event in events[-2:]] == ["content_block_delta", "error"]
    assert events[-1]["error"]["type"] == "api_error" and "/var" not in str(events[-1])


def test_a_full_queue_and_a_draining_server_name_the_time_to_wait() -> None:
    with served_apis(FakeExecutor(queue_limit=0)) as one:
        answer = post(one)
        assert answer.status_code == 429 and int(answer.headers["Retry-After"]) > 0
        assert answer.json()["error"]["type"] == "rate_limit_error"
        one.context.draining = True
        answer = post(one)
        assert answer.status_code == 503 and int(answer.headers["Retry-After"]) > 0
        assert answer.json()["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize(
    ("version", "status"),
    [("2023-06-01", 200), ("2026-10-21", 200), ("2023-01-01", 400), ("new", 400)],
)
def test_versions_of_the_api(server: Served, version: str, status: int) -> None:
    for route in (ROUTE, COUNT):
        body = {"messages": user("say:x"), "max_tokens": 5}
        headers = {"anthropic-version": version}
        assert HTTP.post(server.url + route, json=body, headers=headers).status_code == status


def test_a_client_that_leaves_ends_its_message() -> None:
    with served_apis(FakeExecutor(step_seconds=0.01)) as one:
        body = {"messages": user("say:long "), "ignore_eos": True, "max_tokens": 4000}
        with HTTP.stream("POST", one.url + ROUTE, json={**body, "stream": True}) as response:
            next(response.iter_lines())
        one.wait_idle()
        assert '"/v1/messages"' in HTTP.get(one.url + "/metrics").text
