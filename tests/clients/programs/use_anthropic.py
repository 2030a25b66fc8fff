"""anthropic-sdk-python."""

import anthropic
from checks import ANSWER, MESSAGES, MODEL, REASONING_URL, URL, WEATHER, is_forecast, run

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=60)
reasoner = client.with_options(base_url=REASONING_URL)
ASKED = {
    "model": MODEL,
    "messages": MESSAGES,
    "max_tokens": 160,
    "extra_body": {"temperature": 0},  # not a parameter of current versions
}
TOOL = {"name": "weather", "description": "Forecast.", "input_schema": WEATHER}


def messages():
    done = client.messages.create(**ASKED)
    assert ANSWER in "".join(one.text for one in done.content if one.type == "text")
    assert done.usage.output_tokens > 0 and done.stop_reason in ("end_turn", "max_tokens")


def messages_streamed():
    with client.messages.stream(**ASKED) as stream:
        text = "".join(stream.text_stream)
        assert ANSWER in text and stream.get_final_message().usage.output_tokens > 0, text


def count_tokens():
    found = client.messages.count_tokens(model=MODEL, messages=MESSAGES)
    assert found.input_tokens == client.messages.create(**ASKED).usage.input_tokens


def tools():
    done = client.messages.create(**ASKED, tools=[TOOL], tool_choice={"type": "any"})
    call = next(one for one in done.content if one.type == "tool_use")
    assert call.name == "weather" and done.stop_reason == "tool_use"
    is_forecast(call.input)


def tools_streamed():
    with client.messages.stream(**ASKED, tools=[TOOL], tool_choice={"type": "any"}) as stream:
        done = stream.get_final_message()
    is_forecast(next(one for one in done.content if one.type == "tool_use").input)


def reasoning():
    done = reasoner.messages.create(**ASKED, thinking={"type": "adaptive"})
    assert [one.type for one in done.content] == ["thinking", "text"], done.content
    assert done.content[0].thinking and ANSWER in done.content[1].text, done.content


def reasoning_streamed():
    with reasoner.messages.stream(**ASKED, thinking={"type": "adaptive"}) as stream:
        found = {event.type for event in stream}
        assert {"thinking", "text"} <= found, found
        assert ANSWER in stream.get_final_message().content[-1].text


def errors():
    try:
        client.messages.create(**{**ASKED, "extra_body": {"temperature": -1}})
    except anthropic.BadRequestError as error:
        assert error.body["error"]["type"] == "invalid_request_error"
    else:
        raise AssertionError("a wrong temperature was accepted")


run(
    messages,
    messages_streamed,
    count_tokens,
    tools,
    tools_streamed,
    reasoning,
    reasoning_streamed,
    errors,
)
