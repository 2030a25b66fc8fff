"""litellm."""

import json

import litellm
from checks import ANSWER, MESSAGES, MODEL, REASONING_URL, TOOL, URL, is_forecast, run

ASKED = {
    "api_base": URL + "/v1",
    "api_key": "none",
    "messages": MESSAGES,
    "temperature": 0,
    "max_tokens": 160,
}


def hosted_vllm():
    done = litellm.completion(model=f"hosted_vllm/{MODEL}", **ASKED)
    assert ANSWER in done.choices[0].message.content


def openai_streamed():
    chunks = list(litellm.completion(model=f"openai/{MODEL}", stream=True, **ASKED))
    assert ANSWER in "".join(one.choices[0].delta.content or "" for one in chunks)


def context_error():
    asked = {**ASKED, "messages": [{"role": "user", "content": "x y " * 4000}]}
    try:
        litellm.completion(model=f"openai/{MODEL}", **asked)
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("a prompt beyond the context was accepted")


def tools():
    done = litellm.completion(
        model=f"openai/{MODEL}", tools=[TOOL], tool_choice="required", **ASKED
    )
    is_forecast(json.loads(done.choices[0].message.tool_calls[0].function.arguments))


def reasoning():
    asked = {**ASKED, "api_base": REASONING_URL + "/v1", "reasoning_effort": "high"}
    message = litellm.completion(model=f"hosted_vllm/{MODEL}", **asked).choices[0].message
    assert message.reasoning_content and ANSWER in message.content, message


run(hosted_vllm, openai_streamed, context_error, tools, reasoning)
