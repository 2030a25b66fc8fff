"""OpenAI's and Anthropic's clients, unchanged, against the embedded model: two rounds of tools,
structured output, streams.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("llguidance")

import jsonschema

from tests.e2e.serving import Served
from tests.e2e.structured_server import served_model

PARAMETERS = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["c", "f"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["unit", "days"],
    "additionalProperties": False,
}
QUESTION = "How is the weather in Paris?"
ROUNDS = 2


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    scheduler = {"max_running_requests": 8}
    with served_model(memory={"kv_tokens": 8192}, scheduler=scheduler) as one:
        yield one


@pytest.fixture(scope="module")
def openai_client(server: Served) -> Any:
    openai = pytest.importorskip(
        "openai", reason="the client that is tested comes with the extra `test`"
    )
    return openai.OpenAI(base_url=server.url + "/v1", api_key="k", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def anthropic_client(server: Served) -> Any:
    anthropic = pytest.importorskip(
        "anthropic", reason="the client that is tested comes with `pip install anthropic`"
    )
    return anthropic.Anthropic(base_url=server.url, api_key="k", max_retries=0, timeout=60)


def check(arguments: str | dict[str, Any]) -> None:
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    jsonschema.validate(given, PARAMETERS)


def test_two_rounds_of_tools_in_chat(openai_client: Any) -> None:
    function = {"name": "weather", "description": "Weather", "parameters": PARAMETERS}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(ROUNDS):
        answer = openai_client.chat.completions.create(
            model="embedded",
            messages=messages,
            tools=[{"type": "function", "function": function}],
            tool_choice="required",
            temperature=0,
            max_tokens=400,
            parallel_tool_calls=False,
            reasoning_effort="none",  # no grammar ends the reasoning of so small a model
        )
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls" and len(choice.message.tool_calls) == 1
        messages.append(choice.message)
        for call in choice.message.tool_calls:
            check(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    last = openai_client.chat.completions.create(
        model="embedded", messages=messages, max_tokens=20, temperature=0
    )
    assert last.choices[0].message.tool_calls is None


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_two_rounds_of_tools_in_responses(openai_client: Any, streamed: bool, stored: bool) -> None:
    """The conversation is sent as items, or the earlier response is named."""
    tool = {"type": "function", "name": "weather", "parameters": PARAMETERS}
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    previous: dict[str, str] = {}
    counts = []
    for _ in range(ROUNDS):
        body = {
            "model": "embedded",
            "input": items,
            "tools": [tool],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "max_output_tokens": 400,
            "reasoning": {"effort": "none"},
            "extra_body": {"temperature": 0},
            "store": stored,
            **previous,
        }
        if streamed:
            with openai_client.responses.stream(**body) as stream:
                kinds = [event.type for event in stream]
                answer = stream.get_final_response()
            assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        else:
            answer = openai_client.responses.create(**body)
        calls = [item for item in answer.output if item.type == "function_call"]
        assert answer.status == "completed" and len(calls) == 1
        check(calls[0].arguments)
        outputs = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
            for call in calls
        ]
        items = outputs if stored else [*items, *answer.output, *outputs]
        previous = {"previous_response_id": answer.id} if stored else {}
        counts.append(answer.usage.input_tokens)
    assert counts[1] > counts[0]
    last = openai_client.responses.create(
        model="embedded",
        input=items,
        tools=[tool],
        tool_choice="none",
        max_output_tokens=20,
        **previous,
    )
    assert {item.type for item in last.output} <= {"message", "reasoning"}
    if stored:
        assert openai_client.responses.retrieve(last.id) == last


@pytest.mark.parametrize("streamed", [False, True])
def test_two_rounds_of_tools_in_messages(anthropic_client: Any, streamed: bool) -> None:
    tool = {"name": "weather", "description": "Weather", "input_schema": PARAMETERS}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(ROUNDS):
        body = {
            "model": "embedded",
            "max_tokens": 400,
            "messages": messages,
            "tools": [tool],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "thinking": {"type": "disabled"},
            "extra_body": {"temperature": 0},
        }
        if streamed:
            with anthropic_client.messages.stream(**body) as stream:
                answer = stream.get_final_message()
        else:
            answer = anthropic_client.messages.create(**body)
        uses = [block for block in answer.content if block.type == "tool_use"]
        assert answer.stop_reason == "tool_use" and len(uses) == 1
        check(uses[0].input)
        results = [
            {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"} for use in uses
        ]
        messages.append({"role": "assistant", "content": answer.content})
        messages.append({"role": "user", "content": results})
    counted = anthropic_client.messages.count_tokens(
        model="embedded", messages=messages, tools=[tool]
    )
    last = anthropic_client.messages.create(
        model="embedded", max_tokens=20, messages=messages, tools=[tool]
    )
    assert last.usage.input_tokens + last.usage.cache_read_input_tokens == counted.input_tokens


def test_structured_responses_follow_their_schema(openai_client: Any) -> None:
    made = {"type": "json_schema", "name": "w", "schema": PARAMETERS, "strict": True}
    for effort in ("none", "low"):
        answer = openai_client.responses.create(
            model="embedded",
            input="Give me some JSON.",
            text={"format": made},
            reasoning={"effort": effort},
            max_output_tokens=400,
            extra_body={"temperature": 0},
        )
        assert answer.status == "completed" and answer.text.format.type == "json_schema"
        check(answer.output_text)


def test_structured_messages_follow_their_schema(anthropic_client: Any) -> None:
    for kind in ("disabled", "adaptive"):
        answer = anthropic_client.messages.create(
            model="embedded",
            max_tokens=400,
            messages=[{"role": "user", "content": "Give me some JSON."}],
            output_config={"format": {"type": "json_schema", "schema": PARAMETERS}},
            thinking={"type": kind},
            extra_body={"temperature": 0},
        )
        assert answer.stop_reason == "end_turn"
        check(answer.content[-1].text)


def test_a_grammar_that_is_refused_is_the_clients_fault(openai_client: Any) -> None:
    import openai

    made = {"type": "json_schema", "name": "w", "schema": {"type": 5}}
    with pytest.raises(openai.BadRequestError) as found:
        openai_client.responses.create(model="embedded", input="x", text={"format": made})
    assert found.value.code == "invalid_grammar"


def test_errors_are_the_clients_own_classes(anthropic_client: Any) -> None:
    import anthropic

    body = {"model": "embedded", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        anthropic_client.messages.create(**{**body, "model": "claude"})
    image = {"type": "image", "source": {"type": "url", "url": "http://localhost/a.png"}}
    with pytest.raises(anthropic.BadRequestError, match="text only"):
        anthropic_client.messages.create(
            **{**body, "messages": [{"role": "user", "content": [image]}]}
        )
