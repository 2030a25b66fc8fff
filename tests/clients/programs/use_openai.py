"""openai-python."""

import json

import openai
from checks import (
    ANSWER,
    MESSAGES,
    MODEL,
    QUESTION,
    REASONING_URL,
    TOOL,
    URL,
    WEATHER,
    is_forecast,
    run,
)

client = openai.OpenAI(base_url=URL + "/v1", api_key="none", max_retries=0, timeout=60)
reasoner = client.with_options(base_url=REASONING_URL + "/v1")
CHAT = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 160}


def models():
    assert [one.id for one in client.models.list()] == [MODEL]


def chat():
    assert ANSWER in client.chat.completions.create(**CHAT).choices[0].message.content


def chat_streamed():
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options=options))
    text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
    assert ANSWER in text and chunks[-1].usage.completion_tokens > 0, text


def completions():
    done = client.completions.create(model=MODEL, prompt=QUESTION, max_tokens=8)
    assert done.usage.completion_tokens == 8 or done.choices[0].finish_reason == "stop"


def structured_output():
    schema = {"name": "weather", "schema": WEATHER, "strict": True}
    format = {"type": "json_schema", "json_schema": schema}
    done = client.chat.completions.create(**CHAT, response_format=format)
    is_forecast(json.loads(done.choices[0].message.content))


def tools():
    done = client.chat.completions.create(**CHAT, tools=[TOOL], tool_choice="required")
    call = done.choices[0].message.tool_calls[0]
    assert call.function.name == "weather" and done.choices[0].finish_reason == "tool_calls"
    is_forecast(json.loads(call.function.arguments))


def tools_streamed():
    stream = client.chat.completions.create(
        **CHAT, tools=[TOOL], tool_choice="required", stream=True
    )
    arguments = ""
    for chunk in stream:
        for call in chunk.choices[0].delta.tool_calls or [] if chunk.choices else []:
            arguments += call.function.arguments or ""
    is_forecast(json.loads(arguments))


def responses():
    done = client.responses.create(
        model=MODEL, input=QUESTION, temperature=0, max_output_tokens=160
    )
    assert ANSWER in done.output_text and done.status == "completed", done.output_text


def responses_streamed():
    stream = client.responses.create(
        model=MODEL, input=QUESTION, temperature=0, max_output_tokens=160, stream=True
    )
    events = list(stream)
    text = "".join(one.delta for one in events if one.type == "response.output_text.delta")
    assert ANSWER in text and events[-1].type == "response.completed", text


def reasoning():
    message = reasoner.chat.completions.create(**CHAT, reasoning_effort="high").choices[0].message
    assert message.reasoning_content and ANSWER in message.content, message


def reasoning_streamed():
    stream = reasoner.chat.completions.create(**CHAT, reasoning_effort="high", stream=True)
    deltas = [chunk.choices[0].delta for chunk in stream if chunk.choices]
    assert "".join(getattr(one, "reasoning_content", None) or "" for one in deltas), deltas
    assert ANSWER in "".join(one.content or "" for one in deltas), deltas


def reasoning_of_responses():
    done = reasoner.responses.create(
        model=MODEL,
        input=QUESTION,
        temperature=0,
        max_output_tokens=160,
        reasoning={"effort": "high"},
    )
    first = done.output[0]
    assert first.type == "reasoning" and first.content[0].text, done.output
    assert ANSWER in done.output_text, done.output_text


def errors():
    try:
        client.chat.completions.create(**{**CHAT, "temperature": -1})
    except openai.BadRequestError as error:
        assert error.param == "temperature"
    else:
        raise AssertionError("a wrong temperature was accepted")


run(
    models,
    chat,
    chat_streamed,
    completions,
    structured_output,
    tools,
    tools_streamed,
    responses,
    responses_streamed,
    reasoning,
    reasoning_streamed,
    reasoning_of_responses,
    errors,
)
