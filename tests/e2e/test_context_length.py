"""A request longer than the context: every route and entry answers with the phrases that clients
recognise.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from glowplug import LLM, SamplingParams
from glowplug.core.errors import RequestError
from tests.e2e.served_folder import write_served
from tests.e2e.serving import Served, served

openai = pytest.importorskip("openai", reason="the clients come with the extra `test`")

#: phrase that litellm 1.109 searches for in the lower-case text of an error (ExceptionCheckers)
LITELLM = "this model's maximum context length is"
#: phrase that langchain-openai 1.7 searches for in the text of openai's BadRequestError, which no
#: longer shows the code
LANGCHAIN = "prompt is too long"
CODE = "context_length_exceeded"
LONG = "x" * 300

TOO_LONG: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": LONG}, "prompt"),
    ("/v1/completions", {"prompt": [5] * 256}, "prompt"),
    ("/v1/completions", {"prompt": "x" * 250, "max_tokens": 50}, "max_tokens"),
    ("/v1/completions", {"prompt": "x" * 5000}, "prompt"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "prompt"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": LONG}], "stream": True},
        "prompt",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x" * 200}], "max_tokens": 100},
        "max_tokens",
    ),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 5000}]}, "prompt"),
    ("/generate", {"text": LONG}, "prompt"),
    ("/generate", {"input_ids": [5] * 300}, "prompt"),
    (
        "/generate",
        {"text": "x" * 250, "sampling_params": {"max_new_tokens": 50}},
        "sampling_params.max_new_tokens",
    ),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(context=256) as one:
        yield one


@pytest.mark.parametrize(("path", "body", "param"), TOO_LONG, ids=lambda value: str(value)[:30])
def test_a_request_beyond_the_context_fails_with_known_phrases(
    server: Served, path: str, body: dict[str, Any], param: str
) -> None:
    answer = httpx.post(server.url + path, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert LITELLM + " 256 tokens" in error["message"].lower() and LANGCHAIN in error["message"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", CODE, param)


def test_the_openai_client_sees_both(server: Served) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": LONG}], stream=stream
            )
        assert LITELLM in str(caught.value).lower() and LANGCHAIN in str(caught.value)
        assert caught.value.code == CODE


def test_both_numbers_and_the_remaining_tokens_are_named(server: Served) -> None:
    body = {"prompt": "x" * 250, "max_tokens": 50}
    message = httpx.post(server.url + "/v1/completions", json=body).json()["error"]["message"]
    assert message == (
        "This model's maximum context length is 256 tokens. However, you requested 300 tokens (250 "
        "in the prompt, 50 for the completion): the prompt is too long for that many; max_tokens "
        "may be 6"
    )
    message = httpx.post(server.url + "/v1/completions", json={"prompt": LONG}).json()["error"][
        "message"
    ]
    assert message == (
        "This model's maximum context length is 256 tokens. However, your prompt has 300 tokens; "
        "with one to generate the prompt is too long"
    )


def test_the_offline_class_gives_the_same_error(tmp_path: Path) -> None:
    with LLM(
        model=str(write_served(tmp_path)), weights={"use": "random"}, context_length=64
    ) as llm:
        for prompt, most in (([5] * 64, None), ([5] * 60, 10)):
            with pytest.raises(RequestError) as caught:
                llm.generate([prompt], SamplingParams(max_tokens=most))
            assert LITELLM + " 64 tokens" in str(caught.value).lower() and LANGCHAIN in str(
                caught.value
            )
            assert caught.value.code == CODE
