"""Structured output over HTTP: every spelling, streams, reasoning, refusals, hostile grammars."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import pytest

pytest.importorskip("llguidance")
pytest.importorskip("jsonschema")

import jsonschema
import psutil

from tests.e2e.serving import Served, gauge
from tests.e2e.structured_server import served_model
from tests.support.hostile_grammars import HOSTILE
from tests.support.waiting import LIMIT

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 3, "maximum": 50},
        "w": {"enum": ["x", "y"]},
    },
    "required": ["n", "w"],
    "additionalProperties": False,
}
TAG = {"structures": [{"begin": "<n>", "schema": SCHEMA, "end": "</n>"}], "triggers": ["<n>"]}
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 150, **PLAIN},
    TEXT: {"prompt": "Hi", "max_tokens": 150},
    NATIVE: {"text": "Hi"},
}


@pytest.fixture(scope="module")
def one() -> Iterator[Served]:
    grammar = {"workers": 1, "compile_seconds": 1.0}
    with served_model(grammar=grammar, scheduler={"max_running_requests": 8}) as found:
        yield found


def post(one: Served, path: str, change: dict[str, Any], **more: Any) -> httpx.Response:
    body = {**BASE[path], **more}
    if path == NATIVE:
        body["sampling_params"] = {"max_new_tokens": 150, "temperature": 1.5, "sampling_seed": 7}
        body["sampling_params"] |= change
    else:
        body = {"temperature": 1.5, "seed": 7, **body, **change}
    return httpx.post(one.url + path, json=body, timeout=LIMIT)


def text_of(path: str, answer: dict[str, Any]) -> str:
    if path == NATIVE:
        return str(answer["text"])
    choice = answer["choices"][0]
    return str(choice["message"]["content"] if path == CHAT else choice["text"])


def streamed(path: str, response: httpx.Response) -> tuple[str, str]:
    """Return the content and the reasoning of a stream."""
    parts: list[dict[str, Any]] = [
        json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")
    ]
    if path == NATIVE:
        return parts[-1]["text"], ""
    choices = [choice for part in parts for choice in part["choices"]]
    if path == TEXT:
        return "".join(choice["text"] for choice in choices), ""
    deltas = [choice["delta"] for choice in choices]
    return tuple("".join(d.get(k) or "" for d in deltas) for k in ("content", "reasoning_content"))  # type: ignore[return-value]


def is_valid(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


def matches(pattern: str) -> Any:
    return lambda text: re.fullmatch(pattern, text)


FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
CASES: list[tuple[str, dict[str, Any], Any]] = [
    (CHAT, {"response_format": FORMAT}, is_valid),
    (
        CHAT,
        {"response_format": {"type": "structural_tag", **TAG}, "max_tokens": 9},
        matches("(?s).*"),
    ),
    (CHAT, {"regex": "[ab]{4}"}, matches("[ab]{4}")),
    (CHAT, {"structured_outputs": {"choice": ["red", "blue"]}}, matches("red|blue")),
    (TEXT, {"response_format": FORMAT}, is_valid),
    (TEXT, {"guided_json": SCHEMA}, is_valid),
    (TEXT, {"guided_json": json.dumps(SCHEMA)}, is_valid),
    (TEXT, {"guided_regex": "x[0-9]{2}"}, matches("x[0-9]{2}")),
    (TEXT, {"guided_choice": ["a", "b"]}, matches("a|b")),
    (TEXT, {"guided_grammar": 'start: "p" /[qr]/'}, matches("p[qr]")),
    (TEXT, {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, is_valid),
    (TEXT, {"structured_outputs": {"grammar": 'root ::= "k" [lm]'}}, matches("k[lm]")),
    (TEXT, {"ebnf": 'root ::= "k" [lm]'}, matches("k[lm]")),
    (NATIVE, {"json_schema": json.dumps(SCHEMA)}, is_valid),
    (NATIVE, {"regex": "[ab]{4}"}, matches("[ab]{4}")),
    (NATIVE, {"ebnf": 'root ::= "k" [lm]'}, matches("k[lm]")),
    (NATIVE, {"structural_tag": json.dumps(TAG), "max_new_tokens": 9}, matches("(?s).*")),
]


@pytest.mark.parametrize(
    ("path", "change", "holds"), CASES, ids=lambda v: "" if callable(v) else str(v)[:50]
)
def test_every_spelling_is_served_whole_and_streamed(
    one: Served, path: str, change: dict[str, Any], holds: Any
) -> None:
    whole = post(one, path, change)
    assert whole.status_code == 200, whole.text
    assert "X-Glowplug-Warning" not in whole.headers
    text = text_of(path, whole.json())
    assert holds(text), text
    stream = post(one, path, change, stream=True)
    assert stream.status_code == 200 and streamed(path, stream)[0] == text


def test_the_grammar_begins_after_the_reasoning(one: Served) -> None:
    change = {
        "response_format": FORMAT,
        "max_tokens": 400,
        "chat_template_kwargs": {"enable_thinking": True},
    }
    message = post(one, CHAT, change).json()["choices"][0]["message"]
    assert message["reasoning_content"] and is_valid(message["content"])
    content, reasoning = streamed(CHAT, post(one, CHAT, change, stream=True))
    assert (content, reasoning) == (message["content"], message["reasoning_content"])


REFUSED: list[tuple[str, dict[str, Any], str | None, str]] = [
    (CHAT, {"response_format": "json"}, "response_format", "object"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format", "type text"),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format",
        "schema",
    ),
    (CHAT, {"response_format": FORMAT, "regex": "a"}, None, "only one kind"),
    (CHAT, {"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "exactly one"),
    (CHAT, {"structured_outputs": {"jason": {}}}, "structured_outputs", "jason"),
    (CHAT, {"regex": "(a"}, None, "not supported"),
    (CHAT, {"regex": "a", "min_tokens": 5}, "min_tokens", "grammar decides"),
    (TEXT, {"guided_choice": []}, "guided_choice", "list of texts"),
    (TEXT, {"guided_json": "{"}, "guided_json", "valid JSON"),
    (TEXT, {"guided_regex": "a" * 70000}, None, "65536"),
    (NATIVE, {"json_schema": "{"}, "sampling_params.json_schema", "valid JSON"),
    (NATIVE, {"structural_tag": '{"format": {"type": "any_text"}}'}, None, "xgrammar"),
]


@pytest.mark.parametrize(("path", "change", "param", "words"), REFUSED, ids=lambda v: str(v)[:40])
def test_a_wrong_grammar_is_a_400(
    one: Served, path: str, change: dict[str, Any], param: str | None, words: str
) -> None:
    for more in ({}, {"stream": True}):
        answer = post(one, path, change, **more)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert words in error["message"]
        if param is not None:
            assert error["param"] == param


@pytest.mark.parametrize(
    "grammars",
    [
        pytest.param((*HOSTILE[::4], HOSTILE[9]), id="every_fourth"),
        pytest.param(HOSTILE, id="all", marks=pytest.mark.slow),
    ],
)
def test_hostile_grammars_stop_no_other_request(
    one: Served, grammars: Sequence[tuple[str, Any]]
) -> None:
    """Number 9, whose masks are slow, is always one; a second request with it is refused, too."""
    free = {"max_tokens": 4, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        for name, value in grammars:
            given = value if isinstance(value, str) else json.dumps(value)
            slow = pool.submit(post, one, NATIVE, {name: given, "max_new_tokens": 4})
            while True:
                assert post(one, TEXT, free).status_code == 200
                if slow.done():
                    break
            answer = slow.result()
            assert answer.status_code in (200, 400), answer.text
    one.wait_idle()
    name, text = HOSTILE[9]
    assert post(one, NATIVE, {name: text}).status_code == 400
    assert post(one, TEXT, {"guided_regex": "[ab]{4}"}).status_code == 200


def test_grammars_are_compiled_with_lower_priority(one: Served) -> None:
    """A worker lowers its priority when it is ready; another one may be starting."""
    assert post(one, TEXT, {"guided_regex": "[ab]{4}"}).status_code == 200
    own = psutil.Process().nice()
    found: list[int] = []
    for _ in range(600):
        found = niceness_of_workers()
        if found and min(found) > own:
            return
        time.sleep(0.1)
    raise AssertionError(f"workers have niceness {found}, this process {own}")


def niceness_of_workers() -> list[int]:
    """Return the niceness of the processes that compile grammars for this one."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended, or is a zombie
            if "grammar_worker" in " ".join(child.cmdline()):
                found.append(child.nice())
    return found


def test_masked_steps_are_counted(one: Served) -> None:
    post(one, TEXT, {"guided_regex": "[ab]{4}"})
    text = httpx.get(one.url + "/metrics").text
    assert gauge(text, "grammar_masked_steps_total") > 0
    assert gauge(text, "grammar_mask_waits_total") == 0
    assert gauge(text, "grammar_mask_seconds_total") > 0
