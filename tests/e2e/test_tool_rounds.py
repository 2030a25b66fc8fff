"""Rounds of required and strict tool calls with the embedded model, by OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from glowplug import LLM, SamplingParams
from glowplug.core.errors import RequestError
from tests.e2e.serving import Served
from tests.e2e.structured_server import served_model

openai = pytest.importorskip("openai", reason="the clients come with the extra `test`")
jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

COLOURS = {"type": "string", "enum": ["red", "green", "grün"]}
PAINT = {
    "type": "object",
    "properties": {
        "colour": {"$ref": "#/$defs/colour"},
        "coats": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["colour", "coats"],
    "additionalProperties": False,
    "$defs": {"colour": COLOURS},
}
STOP = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "paint", "parameters": PAINT, "strict": True}},
    {"type": "function", "function": {"name": "stop", "parameters": STOP}},
]
SCHEMAS = {"paint": PAINT, "stop": STOP}
CALL_BEGIN = 9  #: token of "<｜tool▁call▁begin｜>"
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}
#: a reasoning that ends soon: the token of "</think>" has a high probability
REASONING = {
    "chat_template_kwargs": {"enable_thinking": True},
    "logit_bias": {"6": 22},
    "temperature": 1.0,
}
HOT: dict[str, Any] = {
    "model": "embedded",
    "tools": TOOLS,
    "temperature": 1.5,
    "max_tokens": 400,
    "parallel_tool_calls": False,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served_model(grammar={"workers": 1}, scheduler={"max_running_requests": 8}) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as found:
        yield found


def checked(message: Any) -> list[tuple[str, str]]:
    """Check the arguments of a message's calls; return (id, name) of each."""
    for call in message.tool_calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    return [(call.id, call.function.name) for call in message.tool_calls]


@pytest.mark.parametrize("extra", [PLAIN, REASONING], ids=["plain", "reasoning"])
def test_a_client_loops_through_two_rounds_of_tools(client: Any, extra: dict[str, Any]) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is 17 + 25?"}]
    ids = set()
    for seed in (3, 4):
        answer = client.chat.completions.create(
            messages=messages, tool_choice="required", seed=seed, extra_body=extra, **HOT
        )
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        messages.append(choice.message)
        ((call_id, name),) = checked(choice.message)
        ids.add(call_id)
        messages.append({"role": "tool", "tool_call_id": call_id, "content": f"{name}: done"})
    assert len(ids) == 2
    last = client.chat.completions.create(
        messages=messages, tool_choice="none", extra_body=extra, **{**HOT, "max_tokens": 4}
    )
    assert last.choices[0].message.tool_calls is None


def test_a_streamed_call_equals_the_whole_one(client: Any) -> None:
    given = {"messages": [{"role": "user", "content": "Paint."}], "seed": 11, "extra_body": PLAIN}
    choice = {"type": "function", "function": {"name": "paint"}}
    whole = client.chat.completions.create(tool_choice=choice, **given, **HOT)
    (expected,) = whole.choices[0].message.tool_calls
    arguments, reasons, names = "", set(), []
    for chunk in client.chat.completions.create(tool_choice=choice, stream=True, **given, **HOT):
        (one,) = chunk.choices
        reasons.add(one.finish_reason)
        for call in one.delta.tool_calls or []:
            names += [call.function.name] if call.function.name else []
            arguments += call.function.arguments
    assert (names, arguments) == (["paint"], expected.function.arguments)
    assert reasons == {None, "tool_calls"}
    jsonschema.validate(json.loads(arguments), PAINT)


@pytest.mark.parametrize("stream", [False, True])
def test_an_automatic_call_of_a_strict_tool_matches_its_schema(client: Any, stream: bool) -> None:
    """The model is made to write the tag of a call, where the grammar begins."""
    given = {
        **HOT,
        "messages": [{"role": "user", "content": "Paint."}],
        "parallel_tool_calls": True,
        "max_tokens": 200,
        "seed": 1,
        "tools": TOOLS[:1],
        "logit_bias": {str(CALL_BEGIN): 100},
        "extra_body": PLAIN,
    }
    calls: list[str] = []
    if stream:
        for chunk in client.chat.completions.create(stream=True, **given):
            assert not chunk.choices[0].delta.content
            for call in chunk.choices[0].delta.tool_calls or []:
                calls += [call.function.name, ""] if call.function.name else []
                calls[-1] += call.function.arguments
    else:
        (choice,) = client.chat.completions.create(**given).choices
        assert choice.message.content is None
        for one in choice.message.tool_calls:
            calls += [one.function.name, one.function.arguments]
    # the last call is cut: the tag is written again until no token is left
    assert len(calls) > 4
    for name, arguments in zip(calls[:-2:2], calls[1:-2:2], strict=True):
        assert isinstance(json.loads(arguments), dict)
        if name == "paint":
            jsonschema.validate(json.loads(arguments), PAINT)


def test_offline_chats_have_calls() -> None:
    params = SamplingParams(temperature=1.5, seed=3, max_tokens=400)
    with LLM(model="embedded", scheduler={"max_running_requests": 8}) as llm:
        question = [{"role": "user", "content": "Paint."}]
        given: dict[str, Any] = {"tools": TOOLS, "enable_thinking": False}
        one = llm.chat(
            question, params, tool_choice="required", parallel_tool_calls=False, **given
        )[0]
        assert one.finish_reason == "tool_calls" and one.message["content"] is None
        (call,) = one.message["tool_calls"]
        name = call["function"]["name"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[name])
        result = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
        more = [*question, one.message, result]
        short = params.replace(max_tokens=4)
        assert llm.chat(more, short, tool_choice="none", **given)[0].message["role"] == "assistant"
        for wrong in ("maybe", {"type": "function", "function": {"name": "g"}}):
            with pytest.raises(RequestError, match="tool_choice"):
                llm.chat(question, params, tool_choice=wrong, **given)
        with pytest.raises(RequestError, match=r"tools\.0"):
            llm.chat(question, params, tools=[{"name": "f"}])
