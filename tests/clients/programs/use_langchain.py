"""langchain-openai."""

from checks import ANSWER, MODEL, QUESTION, REASONING_URL, TOOL, URL, WEATHER, is_forecast, run
from langchain_openai import ChatOpenAI

model = ChatOpenAI(
    base_url=URL + "/v1", api_key="none", model=MODEL, temperature=0, max_tokens=160, max_retries=0
)


def invoke():
    assert ANSWER in model.invoke(QUESTION).content


def stream():
    assert ANSWER in "".join(one.content for one in model.stream(QUESTION))


def batch():
    assert all(ANSWER in one.content for one in model.batch([QUESTION] * 3))


def structured_output():
    schema = {**WEATHER, "title": "weather", "description": "Forecast."}
    is_forecast(model.with_structured_output(schema, method="json_schema").invoke(QUESTION))


def tools():
    done = model.bind_tools([TOOL], tool_choice="any").invoke(QUESTION)
    assert done.tool_calls[0]["name"] == "weather"
    is_forecast(done.tool_calls[0]["args"])


def reasoning():
    """By the Responses API: the class leaves out what chat completions add to OpenAI's fields."""
    reasoner = ChatOpenAI(
        base_url=REASONING_URL + "/v1",
        api_key="none",
        model=MODEL,
        temperature=0,
        max_tokens=160,
        max_retries=0,
        use_responses_api=True,
        reasoning={"effort": "high"},
    )
    done = reasoner.invoke(QUESTION)
    kinds = [one["type"] for one in done.content_blocks]
    assert kinds == ["reasoning", "text"] and ANSWER in done.text, done


run(invoke, stream, batch, structured_output, tools, reasoning)
