"""``/v1/responses``: objects, streams, storage, tools, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from glowplug.entrypoints.server.protocol.response_request import ResponseRequest
from glowplug.entrypoints.server.responses.answer import split_at
from glowplug.entrypoints.server.responses.fields import REFUSED
from tests.e2e.chat_apis import ANSWERS, CALLS, HOSTILE, PARAMETERS, THOUGHT, nested, served_apis
from tests.e2e.fake_engine import FakeExecutor
from tests.e2e.serving import HTTP, Served
from tests.support.event_order import events_of, response_of
from tests.support.waiting import until

ROUTE = "/v1/responses"
TOOL = {"type": "function", "name": "get_weather", "parameters": PARAMETERS}
KINDS = {"message": "content", "reasoning": "reasoning", "function_call": "tool_call"}
LOGPROBS = ["message.output_text.logprobs"]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served_apis() as one:
        yield one


def post(server: Served, **body: Any) -> httpx.Response:
    return HTTP.post(server.url + ROUTE, json=body)


def made(server: Served, **body: Any) -> dict[str, Any]:
    answer = post(server, **body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def refused(server: Served, status: int = 400, **body: Any) -> dict[str, Any]:
    answer = post(server, **body)
    assert answer.status_code == status, answer.text
    return dict(answer.json()["error"])


def streamed(server: Served, **body: Any) -> dict[str, Any]:
    """Return the object of a stream, whose events are checked."""
    answer = post(server, **body, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    return response_of(events_of(answer.text))


def plain(response: dict[str, Any]) -> dict[str, Any]:
    """Return a response without its ids and times."""
    output = [{**item, "id": "", "call_id": ""} for item in response["output"]]
    return {**response, "id": "", "created_at": 0, "completed_at": 0, "output": output}


def text_of(response: dict[str, Any]) -> str:
    return "".join(
        part["text"]
        for item in response["output"]
        if item["type"] == "message"
        for part in item["content"]
    )


def test_a_response_repeats_its_request_and_counts_tokens(server: Served) -> None:
    given = {
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "top_p": 0.9,
        "max_output_tokens": 50,
        "user": "u",
        "truncation": "disabled",
        "parallel_tool_calls": False,
    }
    found = made(server, input="say:hé", model="fake", cache_salt="warm", **given)
    assert given.items() <= found.items() and found["object"] == "response"
    assert (found["status"], found["model"], found["store"]) == ("completed", "fake", True)
    assert found["id"].startswith("resp_") and found["completed_at"] >= found["created_at"]
    assert [item["type"] for item in found["output"]] == ["message"] and text_of(found) == "hé"
    prompt = len("Be brief.") + len("say:hé".encode()) + 4
    assert found["usage"] == {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + 4,
    }


@pytest.mark.parametrize("text", ANSWERS)
@pytest.mark.parametrize("limit", [None, 30])
def test_a_stream_follows_the_published_order_and_equals_the_whole(
    server: Served, text: str, limit: int | None
) -> None:
    body = {"input": f"say:{text}", "tools": [TOOL], "max_output_tokens": limit}
    whole = made(server, **body)
    assert plain(streamed(server, **body)) == plain(whole)
    kinds = [KINDS[item["type"]] for item in whole["output"]]
    if limit is None or len(text.encode()) < limit:
        assert whole["status"] == "completed" and kinds == ANSWERS[text]
        assert all(item["status"] == "completed" for item in whole["output"])
    else:
        assert whole["status"] == "incomplete"
        assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
        assert all(item["status"] == "incomplete" for item in whole["output"][-1:])


def test_reasoning_is_an_item_of_its_own_and_can_be_turned_off(server: Served) -> None:
    body = {"input": f"say:{THOUGHT}so", "include": ["reasoning.encrypted_content"]}
    reasoning, message = made(server, **body)["output"]
    assert reasoning["summary"] == [] and message["content"][0]["text"] == "so"
    thought = [{"type": "reasoning_text", "text": "first this, then that"}]
    assert reasoning["content"] == thought
    again = {
        "type": "reasoning",
        "summary": [],
        "encrypted_content": reasoning["encrypted_content"],
    }
    for item in (reasoning, again):
        items = [{"role": "user", "content": "a"}, item, message, {"role": "user", "content": "b"}]
        assert made(server, input=items)["usage"]["input_tokens"] == len("asob") + 5
    low = made(server, input=f"say:{THOUGHT}so", reasoning={"effort": "low", "summary": "auto"})
    assert low["reasoning"] == {"effort": "low", "summary": "auto"}
    assert low["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    prompts = [made(server, input="x", reasoning={"effort": e}) for e in ("none", "high")]
    counts = [one["usage"]["input_tokens"] for one in prompts]
    assert counts[1] - counts[0] == len("<think>")


def test_log_probabilities_are_those_of_the_text(server: Served) -> None:
    for text, shown in ((f"{THOUGHT}hé<b>", "hé<b>"), ("zwölf", "zwölf")):
        body = {"input": f"say:{text}", "include": LOGPROBS, "top_logprobs": 2}
        found = made(server, **body)
        (part,) = found["output"][-1]["content"]
        content = b"".join(bytes(one["bytes"]) for one in part["logprobs"]).decode()
        assert content == part["text"] == shown
        assert {len(one["top_logprobs"]) for one in part["logprobs"]} == {2}
        assert plain(streamed(server, **body)) == plain(found)
    assert made(server, input="say:x")["output"][0]["content"][0]["logprobs"] == []


def test_log_probabilities_of_a_text_are_those_of_its_last_occurrence() -> None:
    entries = [
        {"bytes": list(word.encode()), "n": n} for n, word in enumerate(["th", "in", "t", "h"])
    ]
    assert split_at(entries, "th") == (entries[:2], entries[2:])
    assert split_at(entries, "nt") == (entries[:1], entries[1:3])
    assert split_at(entries, "other") == (entries, [])


def test_a_chain_has_all_that_was_said_but_not_the_earlier_instructions(server: Served) -> None:
    first = made(server, input="say:one", instructions="I", max_output_tokens=3)
    second = made(server, input="say:two", previous_response_id=first["id"])
    third = made(server, input="say:three", previous_response_id=second["id"], instructions="J")
    said = ["say:one", "one", "say:two", "two", "say:three"]
    assert third["usage"]["input_tokens"] == len("J") + len("".join(said)) + 8
    roles = ["user", "assistant"] * 3
    items = [{"role": role, "content": text} for role, text in zip(roles, said)]
    alone = made(server, input=items, instructions="J", store=False)
    assert alone["usage"]["input_tokens"] == third["usage"]["input_tokens"]
    assert third["previous_response_id"] == second["id"]
    for continued in (first, second):  # a conversation may branch
        made(server, input="say:x", previous_response_id=continued["id"])


def test_stored_responses_are_read_listed_and_deleted(server: Served) -> None:
    texts = ["a", "b", "say:c"]
    found = made(server, input=[{"role": "user", "content": text} for text in texts])
    url = f"{server.url}{ROUTE}/{found['id']}"
    assert HTTP.get(url).json() == found
    listed = HTTP.get(url + "/input_items").json()
    assert [item["content"][0]["text"] for item in listed["data"]] == texts[::-1]
    assert not listed["has_more"] and listed["first_id"] == listed["data"][0]["id"]
    page = HTTP.get(url + "/input_items", params={"limit": 2, "order": "asc"}).json()
    assert page["has_more"] and len(page["data"]) == 2
    rest = {"order": "asc", "after": page["last_id"]}
    rest_page = HTTP.get(url + "/input_items", params=rest).json()
    assert [item["content"][0]["text"] for item in rest_page["data"]] == ["say:c"]
    for wrong in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "none"}):
        assert HTTP.get(url + "/input_items", params=wrong).status_code == 400
    assert HTTP.post(url + "/cancel").status_code == 400
    assert HTTP.get(url, params={"stream": "true"}).status_code == 400
    assert HTTP.delete(url).json() == {"id": found["id"], "object": "response", "deleted": True}
    for call in (HTTP.get(url), HTTP.delete(url), HTTP.get(url + "/input_items")):
        assert call.status_code == 404
        assert call.json()["error"]["code"] == "response_not_found"
    error = refused(server, 404, input="x", previous_response_id=found["id"])
    assert error["param"] == "previous_response_id"


def test_a_response_that_is_not_stored_cannot_be_read(server: Served) -> None:
    before = len(server.context.stored)
    found = made(server, input="say:x", store=False)
    assert found["store"] is False and len(server.context.stored) == before
    assert HTTP.get(f"{server.url}{ROUTE}/{found['id']}").status_code == 404


def test_a_server_may_store_a_few_responses_or_none() -> None:
    with served_apis(server={"stored_responses": 0}) as none:
        assert made(none, input="say:x")["store"] is False
        assert refused(none, input="say:x", store=True)["param"] == "store"
    with served_apis(server={"stored_responses": 3, "stored_response_bytes": 8000}) as few:
        ids = [made(few, input="say:x")["id"] for _ in range(5)]
        codes = [HTTP.get(f"{few.url}{ROUTE}/{id}").status_code for id in ids]
        assert codes == [404, 404, 200, 200, 200]
        made(few, input=f"say:{'x' * 1500}")
        assert 0 < few.context.stored.bytes <= 8000
        made(few, input=[{"role": "user", "content": "y", "more": "z" * 9000}])
        assert len(few.context.stored) == 0 == few.context.stored.bytes


def test_a_chain_is_no_longer_than_a_request_may_be() -> None:
    with served_apis(server={"max_body_bytes": 100_000}) as one:
        items = [{"role": "user", "content": "x", "note": "n" * 70_000}]
        first = made(one, input=items)
        made(
            one, input="say:y", previous_response_id=first["id"], instructions="parsed in a thread"
        )
        second = made(one, input=items, previous_response_id=first["id"])
        error = refused(one, input="x", previous_response_id=second["id"])
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == "previous_response_id"


def begun(response: httpx.Response) -> tuple[str, Iterator[str]]:
    """Return the id of a streamed response from its first event, and the other lines."""
    lines = response.iter_lines()
    created = json.loads(next(line for line in lines if line.startswith("data: "))[6:])
    return str(created["response"]["id"]), lines


def test_a_response_in_progress_can_be_read_and_cancelled() -> None:
    with served_apis(FakeExecutor(step_seconds=0.01)) as server:
        body = {"input": "say:long ", "ignore_eos": True, "stream": True}
        with HTTP.stream("POST", server.url + ROUTE, json=body) as response:
            id, lines = begun(response)
            url = f"{server.url}{ROUTE}/{id}"
            assert HTTP.get(url).json()["status"] == "in_progress"
            error = refused(server, input="x", previous_response_id=id)
            assert "in progress" in error["message"]
            assert HTTP.post(url + "/cancel").json()["status"] == "cancelled"
            last = json.loads([line for line in lines if line.startswith("data: ")][-1][6:])
        assert last["type"] == "response.incomplete"
        assert last["response"]["status"] == "cancelled" and last["response"]["output"]
        assert HTTP.get(url).json() == last["response"]
        server.wait_idle()


def test_a_client_that_leaves_ends_its_response() -> None:
    with served_apis(FakeExecutor(step_seconds=0.01)) as server:
        body = {"input": "say:long ", "ignore_eos": True, "stream": True}
        with HTTP.stream("POST", server.url + ROUTE, json=body) as response:
            id, _ = begun(response)
        server.wait_idle()
        url = f"{server.url}{ROUTE}/{id}"
        until(lambda: HTTP.get(url).json()["status"] == "cancelled", "the response is cancelled")


def test_a_fault_of_the_engine_fails_the_response(server: Served) -> None:
    assert refused(server, 500, input="fail:nan say:abc")["code"] == "nan_logits"
    events = events_of(post(server, input="fail:nan say:abc", stream=True).text)
    assert [event["type"] for event in events[-2:]] == [
        "response.output_text.delta",
        "response.failed",
    ]
    failed = events[-1]["response"]
    assert failed["status"] == "failed" and failed["error"]["code"] == "nan_logits"
    assert "/var" not in failed["error"]["message"] and text_of(failed) == "ab"
    assert HTTP.get(f"{server.url}{ROUTE}/{failed['id']}").json() == failed


def test_calls_go_out_and_their_outputs_come_back(server: Served) -> None:
    body = {"tools": [TOOL], "input": [{"role": "user", "content": f"say:{CALLS}"}]}
    first = made(server, **body)
    calls = first["output"]
    assert [json.loads(call["arguments"])["city"] for call in calls] == ["Paris", "北京 🗼 é"]
    outputs: list[dict[str, Any]] = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
        for call in calls
    ]
    outputs[1]["output"] = [{"type": "input_text", "text": "rain"}]
    chained = made(server, input=outputs, previous_response_id=first["id"], tools=[TOOL])
    alone = made(server, input=[*body["input"], *calls, *outputs], tools=[TOOL])
    assert chained["usage"]["input_tokens"] == alone["usage"]["input_tokens"]
    assert chained["tools"][0]["name"] == "get_weather"
    for wrong, place in (
        ([*body["input"], *outputs], "input.1"),
        ([*body["input"], *calls, outputs[0]], "input.1"),
        ([*body["input"], *calls, *outputs, outputs[0]], "input.5"),
    ):
        assert refused(server, input=wrong, tools=[TOOL])["param"] == place
    assert refused(server, input="x", previous_response_id=first["id"])["param"] == (
        "previous_response_id"
    )


def test_choices_among_tools(server: Served) -> None:
    other = {"type": "function", "name": "other"}
    body = {"input": f"say:{CALLS}", "tools": [TOOL, other]}
    one = made(server, **body, parallel_tool_calls=False)["output"]
    assert [item["name"] for item in one] == ["get_weather"]
    none = made(server, **body, tool_choice="none")
    assert none["tool_choice"] == "none" and none["output"][0]["type"] == "message"
    allowed = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "other"}],
    }
    assert made(server, **body, tool_choice=allowed)["tool_choice"] == allowed
    for choice in (
        {"type": "function", "name": "third"},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "third"}]},
        {"type": "allowed_tools", "mode": "auto", "tools": []},
        {"type": "file_search"},
    ):
        assert refused(server, **body, tool_choice=choice)["param"].startswith("tool_choice")
    assert refused(server, input="x", tool_choice="required")["param"] == "tool_choice"


@pytest.mark.parametrize("kind", ["web_search", "file_search", "code_interpreter", "mcp", "custom"])
def test_hosted_tools_are_refused_with_the_reason(server: Served, kind: str) -> None:
    error = refused(server, input="x", tools=[{"type": kind}])
    assert error["param"] == "tools.0.type" and "runs no tools itself" in error["message"]


def test_truncation_drops_the_oldest_messages_and_keeps_the_system(server: Served) -> None:
    items = [{"role": "system", "content": "S" * 100}]
    for number in range(60):
        items.append({"role": "user", "content": f"{number:03} " + "u" * 96})
        items.append({"role": "assistant", "content": "a" * 50})
    items.append({"role": "user", "content": "say:last"})
    error = refused(server, input=items)
    assert error["code"] == "context_length_exceeded" and error["param"] == "input"
    found = made(server, input=items, truncation="auto", max_output_tokens=50)
    assert text_of(found) == "last" and found["truncation"] == "auto"
    assert 4096 - 50 - 152 <= found["usage"]["input_tokens"] <= 4096 - 50
    short = {"input": items[-3:], "truncation": "auto"}
    assert made(server, **short)["usage"]["input_tokens"] == 100 + 50 + len("say:last") + 5
    huge = "u" * 5000
    error = refused(server, input=[*items, {"role": "user", "content": huge}], truncation="auto")
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("field", sorted(REFUSED))
def test_fields_without_support_are_refused_with_the_reason(server: Served, field: str) -> None:
    value: Any = {"messages": [1], "n": 2}.get(field, True)
    if field in ("return_token_ids", "return_tokens_as_token_ids", "background"):
        assert made(server, input="say:x", **{field: False})
    if field == "response_format":
        value = {"type": "text"}
    error = refused(server, input="say:x", **{field: value})
    assert error["param"] == field and error["code"] == "unsupported_parameter"
    assert error["message"].startswith(f"{field} ") and len(error["message"]) > len(field) + 10


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"service_tier": "flex"}, "service_tier"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"reasoning": {"mode": "pro"}}, "mode"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options."),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content.0"),
    ],
)
def test_values_without_support_are_refused(
    server: Served, body: dict[str, Any], param: str
) -> None:
    error = refused(server, **{"input": "x", **body})
    assert error["param"].startswith(param) and error["code"] in ("unsupported_parameter", None)


@pytest.mark.parametrize(("field", "value"), HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_input_is_a_fault_of_the_client(server: Served, field: str, value: Any) -> None:
    body = {"input": "say:x", field: value}
    for stream in (False, True):
        status = post(server, **({"stream": stream} | body)).status_code
        known = field in ResponseRequest.model_fields or (field in REFUSED and value)
        assert 400 <= status < 500 if known else status == 200


def test_hostile_nesting_and_no_input(server: Served) -> None:
    for body in ({}, {"input": None}, {"input": nested(100)}, {"metadata": nested(3)}):
        assert 400 <= post(server, **body).status_code < 500
    deep = {"type": "function", "name": "f", "parameters": {"properties": {"a": nested(40)}}}
    assert 400 <= post(server, input="x", tools=[deep]).status_code < 500
    raw = {"Content-Type": "application/json"}
    for content in (b"[" * 5000, b'{"input": "\xff"}', b"null", b"{}" * 2):
        found = HTTP.post(server.url + ROUTE, content=content, headers=raw)
        assert 400 <= found.status_code < 500


def test_requests_are_measured_and_unknown_fields_reported(server: Served) -> None:
    answer = post(server, input="say:x", colour="blue")
    assert "colour" in answer.headers["X-Glowplug-Warning"]
    assert '"/v1/responses"' in HTTP.get(server.url + "/metrics").text
