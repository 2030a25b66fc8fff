"""Tool calls of ``/v1/chat/completions``: every format, streamed and whole, and the checks of
requests with tools.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from glowplug.core.plugin.options import OutputOptions
from glowplug.core.protocols import Worker
from glowplug.core.step.tools import Tool
from glowplug.entrypoints.front.chat.turn import Turn
from glowplug.plugins.outputs.calls import factories
from glowplug.plugins.outputs.deepseek_r1 import DeepseekR1Options
from glowplug.plugins.outputs.deepseek_r1_runtime import DeepseekR1
from tests.contract.test_tool_parsers import FORMATS, WRITERS
from tests.e2e.fake_engine import make_plan, make_tokenizer
from tests.e2e.serving import HTTP, Served, served
from tests.support.tool_dialogues import DIALOGUES, PARIS, QUOTES, TOOLS

CHAT = "/v1/chat/completions"
GIVEN = [tool.described() for tool in TOOLS]
NO_PLAN: Any = None


def parsers(name: str) -> list[Any]:
    """Return the parsers of a server, in the order of a command line that names tools first."""
    made: factories.CallsFactory = FORMATS[name](OutputOptions(use=name), NO_PLAN, Worker())
    return [made, DeepseekR1(DeepseekR1Options(use="deepseek_r1"), make_plan(), Worker())]


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Served]]:
    """A server for each format; a server without a parser has the name ""."""
    with ExitStack() as stack:
        found = {name: stack.enter_context(served(parsers=parsers(name))) for name in FORMATS}
        yield found | {"": stack.enter_context(served())}


def body(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"say:{text}"}]
    return {"messages": messages, "tools": GIVEN, "max_tokens": 2000, **fields}


def whole(one: Served, **fields: Any) -> dict[str, Any]:
    answer = HTTP.post(one.url + CHAT, json=fields)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["choices"][0]
    return found


def streamed(one: Served, **fields: Any) -> dict[str, Any]:
    """Return the choice that the chunks of a stream add up to, as a client adds them."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    reason = None
    with HTTP.stream("POST", one.url + CHAT, json={**fields, "stream": True}) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            (choice,) = json.loads(line[6:])["choices"]
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", []):
                add_call(message["tool_calls"], call)
            reason = choice["finish_reason"] or reason
    return {"message": message, "finish_reason": reason}


def add_call(calls: list[dict[str, Any]], call: dict[str, Any]) -> None:
    if call["index"] == len(calls):
        assert call["id"] and call["type"] == "function" and call["function"]["name"]
        calls.append({**call, "function": dict(call["function"])})
        return
    assert call["index"] == len(calls) - 1 and not {"id", "type"} & call.keys()
    assert call["function"].keys() == {"arguments"}
    calls[-1]["function"]["arguments"] += call["function"]["arguments"]


def shown(choice: dict[str, Any]) -> tuple[str, str, list[tuple[str, Any]], str]:
    """Return reasoning, content, (name, parsed arguments) of the calls, and the finish reason."""
    message = choice["message"]
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls") or []
    ]
    return (
        message["reasoning_content"] or "",
        message["content"] or "",
        calls,
        choice["finish_reason"],
    )


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_model_that_writes_a_format_answers_with_calls(
    servers: dict[str, Served], name: str
) -> None:
    for before, calls, after in DIALOGUES:
        after = "" if name == "llama3_json" else after
        text = f"<think>use a tool</think>{before}{WRITERS[name](calls)}{after}"
        expected = ("use a tool", before.rstrip() + after.lstrip(), list(calls), "tool_calls")
        assert shown(whole(servers[name], **body(text))) == expected
        assert shown(streamed(servers[name], **body(text))) == expected


@pytest.mark.parametrize("name", ["deepseek_v3", "hermes"])
def test_an_answer_cut_within_a_call_ends_with_length(
    servers: dict[str, Served], name: str
) -> None:
    text = WRITERS[name]([QUOTES])
    size = len(text.encode()) - 60
    for choice in (
        whole(servers[name], **body(text, max_tokens=size)),
        streamed(servers[name], **body(text, max_tokens=size)),
    ):
        (call,) = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "length" and not choice["message"]["content"]
        with pytest.raises(ValueError, match=r"Unterminated|Expecting"):
            json.loads(call["function"]["arguments"])


def test_ids_are_unique_and_kimis_are_numbered_over_the_conversation(
    servers: dict[str, Served],
) -> None:
    text = WRITERS["kimi_k2"]([PARIS, PARIS])
    calls = whole(servers["kimi_k2"], **body(text))["message"]["tool_calls"]
    assert [call["id"] for call in calls] == ["functions.get_weather:0", "functions.get_weather:1"]
    calls = [
        call
        for _ in range(2)
        for call in whole(servers["hermes"], **body(WRITERS["hermes"]([PARIS, PARIS])))["message"][
            "tool_calls"
        ]
    ]
    assert len({call["id"] for call in calls}) == 4


def test_one_call_without_parallel_calls(servers: dict[str, Served]) -> None:
    fields = body(WRITERS["hermes"]([PARIS, QUOTES]), parallel_tool_calls=False)
    for choice in (whole(servers["hermes"], **fields), streamed(servers["hermes"], **fields)):
        assert len(choice["message"]["tool_calls"]) == 1


def test_without_tools_the_text_of_a_call_is_content(servers: dict[str, Served]) -> None:
    text = WRITERS["hermes"]([PARIS])
    for fields in ({"tools": None}, {"tools": []}, {"tool_choice": "none"}):
        choice = whole(servers["hermes"], **body(text, **fields))
        assert shown(choice)[1:] == (text, [], "stop")


F = {"type": "function", "function": {"name": "f"}}
ASKED = {"role": "user", "content": "x"}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}


def parameters(schema: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [F, F]}, "tools.1.function.name", "earlier tool"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type", "function"),
    ({"tools": [{"type": "function"}]}, "tools.0.function", "required"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", ""),
    ({"tools": [F] * 2000}, "tools", "at most 1024"),
    (parameters("object"), "tools.0.function.parameters", "valid dictionary"),
    (parameters({"type": "array"}), "tools.0.function.parameters.type", "object"),
    (parameters({"type": 5}), "tools.0.function.parameters.type", "object"),
    (parameters({"properties": []}), "tools.0.function.parameters.properties", "of schemas"),
    (parameters({"properties": {"a": 1}}), "tools.0.function.parameters.properties.a", "schema"),
    (
        parameters({"properties": {"a": {"type": "text"}}}),
        "tools.0.function.parameters.properties.a.type",
        "unknown type",
    ),
    (parameters({"required": "a"}), "tools.0.function.parameters.required", "list of names"),
    (parameters({"anyOf": {}}), "tools.0.function.parameters.anyOf", "list of schemas"),
    (parameters(nested(26)), "tools.0.function.parameters", "too deeply"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tool_choice": "maybe", "tools": [F]}, "tool_choice", "'none', 'auto' or 'required'"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [F]},
        "tool_choice",
        "'g' is not the name",
    ),
    ({"messages": [ASKED, CALLED, ASKED]}, "messages.1.tool_calls", "missing: a"),
    (
        {"messages": [ASKED, {"role": "tool", "content": "x", "tool_call_id": "a"}]},
        "messages.1.tool_call_id",
        "'a' is none of them",
    ),
    (
        {"messages": [ASKED, CALLED, {"role": "tool", "content": "x"}]},
        "messages.2.tool_call_id",
        "needs it",
    ),
    (
        {"messages": [ASKED, {**CALLED, "tool_calls": CALLED["tool_calls"] * 2}]},
        "messages.1.tool_calls.1.id",
        "earlier call",
    ),
    ({"tools": [F], "response_format": {"type": "json_object"}}, "tools", "response_format"),
    ({"tools": [F], "tool_choice": "required"}, "", "grammar.use = none"),
]


@pytest.mark.parametrize(
    ("change", "param", "words"), REFUSED, ids=[str(one[0])[:60] for one in REFUSED]
)
def test_malformed_requests_are_refused_with_their_field(
    servers: dict[str, Served], change: dict[str, Any], param: str, words: str
) -> None:
    for stream in (False, True):
        given = {"messages": [ASKED], "stream": stream, **change}
        answer = HTTP.post(servers["hermes"].url + CHAT, json=given)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["type"] == "invalid_request_error", error
        assert (error["param"] or "") == param and words in error["message"], error


def test_tools_without_a_parser_are_refused_with_the_fix(servers: dict[str, Served]) -> None:
    answer = HTTP.post(servers[""].url + CHAT, json={"messages": [ASKED], "tools": [F]})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "tools")
    assert "--tool-call-parser" in error["message"]


def test_results_of_calls_are_accepted(servers: dict[str, Served]) -> None:
    result = {"role": "tool", "content": "say:done", "tool_call_id": "a"}
    given = {"messages": [ASKED, CALLED, result], "tools": [F]}
    assert shown(whole(servers["hermes"], **given))[1] == "done"


@pytest.mark.parametrize(
    "use",
    [
        "{{ c.arguments | tojson }}",
        "{{ '[' + c.arguments + ']' }}",
        "{{ c.arguments if c.arguments is string else c.arguments | tojson }}",
        "{% for key, value in c.arguments.items() %}{{ key }}={{ value }};{% endfor %}",
    ],
)
@pytest.mark.parametrize("as_text", [True, False])
def test_templates_take_arguments_as_object_and_as_text(use: str, as_text: bool) -> None:
    template = (
        "{% for m in messages %}{% for one in m.tool_calls %}{% set c = one.function %}"
        f"{use}{{% endfor %}}{{% endfor %}}{{{{ tools | length }}}}{{{{ tools[0].function.name }}}}"
    )
    tokenizer = make_tokenizer()
    tokenizer.use_chat_template(template)
    value = {"city": "Köln", "n": 2}
    given = json.dumps(value, ensure_ascii=False) if as_text else value
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": given}}
    turn = Turn([{"role": "assistant", "content": None, "tool_calls": [call]}], (Tool("f"),))
    text = '{"city": "Köln", "n": 2}'
    expected = {"for": "city=Köln;n=2;", "'['": f"[{text}]"}
    found = next((value for key, value in expected.items() if key in use), text)
    assert turn.prompt_text(tokenizer) == found + "1f"


def test_hostile_bodies_are_no_server_errors(servers: dict[str, Served]) -> None:
    schemas: list[Any] = [
        {"type": [[]]},
        {"type": {}},
        {"required": [[]]},
        {"properties": {"a": {"items": [1]}}},
        {"$ref": "#"},
        {"properties": {"\ud800": {}}},
    ]
    for schema in schemas:
        content = json.dumps({"messages": [ASKED], "max_tokens": 1, **parameters(schema)})
        answer = HTTP.post(
            servers["hermes"].url + CHAT,
            content=content,
            headers={"content-type": "application/json"},
        )
        assert answer.status_code in (200, 400), (schema, answer.text)
