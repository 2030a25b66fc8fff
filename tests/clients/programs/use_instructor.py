"""instructor."""

from typing import Literal

import instructor
import openai
from checks import MESSAGES, MODEL, REASONING_URL, URL, run
from pydantic import BaseModel, Field


class Forecast(BaseModel):
    city: Literal["Bern", "Oslo"]
    days: int = Field(ge=1, le=9)


base = openai.OpenAI(base_url=URL + "/v1", api_key="none", max_retries=0, timeout=60)
ASKED = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 160}


def json_schema():
    client = instructor.from_openai(base, mode=instructor.Mode.JSON_SCHEMA)
    assert client.create(response_model=Forecast, max_retries=0, **ASKED).days


def json_schema_streamed():
    client = instructor.from_openai(base, mode=instructor.Mode.JSON_SCHEMA)
    *_, last = client.create_partial(response_model=Forecast, max_retries=0, **ASKED)
    assert last.city in ("Bern", "Oslo")


def tools():
    client = instructor.from_openai(base, mode=instructor.Mode.TOOLS)
    assert client.create(response_model=Forecast, max_retries=0, **ASKED).days


def reasoning():
    """The object comes after the reasoning, which the raw completion has."""
    client = instructor.from_openai(
        base.with_options(base_url=REASONING_URL + "/v1"), mode=instructor.Mode.JSON_SCHEMA
    )
    forecast, raw = client.create_with_completion(
        response_model=Forecast, max_retries=0, **ASKED, reasoning_effort="high"
    )
    assert forecast.days and raw.choices[0].message.reasoning_content, raw


run(json_schema, json_schema_streamed, tools, reasoning)
