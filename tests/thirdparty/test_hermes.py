"""The sample parser of tool calls of a third party: Hermes' format, through suite and server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from glowplug.core.api import OutputOptions
from glowplug.core.protocols import OutputParser, OutputRequest, Worker
from glowplug.core.step.request import SamplingParams
from glowplug.core.step.structured import GrammarSpec
from glowplug.core.step.tools import Tool
from glowplug.core.testing.harness.plans import bare_plan
from glowplug.core.testing.suites.parser import Case, ParserSuite, run
from glowplug.entrypoints.front.chat.answers import answer_form
from tests.e2e.serving import HTTP, Served, served
from tests.e2e.test_tool_calls import CHAT, body, shown, streamed, whole
from tests.support.tool_dialogues import DIALOGUES, PARIS, QUOTES, TOOLS, cases, hermes
from tests.thirdparty.packages import FOLDER

NAME = "glowplug-hermes"
STRICT = Tool("f", parameters={"type": "object"}, strict=True).described()
STRICT["function"]["strict"] = True


@pytest.fixture(scope="module", autouse=True)
def _package() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER / NAME / "src"))
        yield


def factory() -> Any:
    from glowplug_hermes.plugin import HermesParsers

    return HermesParsers(OutputOptions(use="hermes_calls"), bare_plan(), Worker())


def texts() -> list[tuple[str, list[tuple[str, str]]]]:
    """Return texts of the format that the dialogues do not have, and their parsed form."""
    long = "x" * 600
    call = ("tool_call", 'f {"a": 1}')
    return [
        ("plain { text <tool_", [("content", "plain { text <tool_")]),
        (" \n ", [("content", " \n ")]),
        ("  [1, 2]\n", [("content", "  [1, 2]\n")]),
        ("the <tool_call> tag", [("content", "the <tool_call> tag")]),
        ("<tool_call>\n", [("content", "<tool_call>\n")]),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [call]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [call]),
        ('<tool_call>{"name": "f"}</tool_call>', [("tool_call", "f {}")]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}, "id": {"b": "}"}} \n', [call]),
        ('<tool_call>{"a": 1}</tool_call>', [("content", '<tool_call>{"a": 1}</tool_call>')]),
        (
            f'<tool_call>{{"note": "{long}", "name": "f", "arguments": {{"a": 1}}}}</tool_call>b',
            [call, ("content", "b")],
        ),
        ('a <tool_call>{"name": "f", "argu', [("content", "a ")]),
    ]


class TestHermes(ParserSuite):
    plain_request = OutputRequest(tools=TOOLS)

    def make(self) -> Any:
        return factory()

    def cases(self) -> Sequence[Case]:
        call = hermes([PARIS])
        return [
            *cases(hermes),
            *(Case(text, parts, tools=TOOLS) for text, parts in texts()),
            Case(call, [("content", call)]),
        ]

    def adversarial(self) -> Sequence[str]:
        begin = '<tool_call>{"name": "f", "arguments": '
        return [*super().adversarial(), "a <", "<tool_call>", "<tool_call> ", begin, begin + "{}}"]


@pytest.mark.parametrize(
    "begin", ["<tool_call>", '<tool_call>{"name": "f", "arguments": {}}', "<tool_call>{"]
)
def test_white_space_is_not_held(begin: str) -> None:
    """A megabyte in small pieces is not joined again and again."""
    parser = factory().start(OutputRequest(tools=TOOLS))
    parser.feed(begin)
    for _ in range(1 << 14):
        parser.feed(" " * 64)
        assert len(parser._text) < 1024


def test_arguments_are_passed_on_while_they_arrive() -> None:
    parser = factory().start(OutputRequest(tools=TOOLS))
    text = hermes([QUOTES])
    got = [piece.text for one in text for piece in parser.feed(one) if piece.kind == "tool_call"]
    assert "".join(got) == json.dumps(QUOTES[1], ensure_ascii=False)
    assert max(map(len, got)) == 1


def test_an_answer_in_a_response_format_is_content() -> None:
    text = hermes([PARIS])
    request = OutputRequest(tools=TOOLS, response_format=GrammarSpec("json_schema", "{}"))
    assert run(factory().start(request), [text]) == [("content", text)]


# ---- through the server --------------------------------------------------------------------------


class Recorder:
    """The parsers, and the requests that they were started with."""

    shows_special = False

    def __init__(self) -> None:
        self.made = factory()
        self.requests: list[OutputRequest] = []

    def start(self, request: OutputRequest) -> OutputParser:
        self.requests.append(request)
        parser: OutputParser = self.made.start(request)
        return parser

    def call_grammar(self, request: OutputRequest) -> None:
        self.made.call_grammar(request)


@pytest.fixture(scope="module")
def recorder(_package: None) -> Recorder:
    return Recorder()


@pytest.fixture(scope="module")
def server(recorder: Recorder) -> Iterator[Served]:
    with served(parsers=[recorder]) as one:
        yield one


@pytest.mark.parametrize("number", range(len(DIALOGUES)))
def test_calls_reach_the_client_whole_and_streamed(server: Served, number: int) -> None:
    before, calls, after = DIALOGUES[number]
    fields = body(before + hermes(calls) + after)
    expected = ("", before.rstrip() + after.lstrip(), list(calls), "tool_calls")
    for choice in (whole(server, **fields), streamed(server, **fields)):
        choice["message"].setdefault("reasoning_content", "")
        assert shown(choice) == expected


def test_the_pieces_of_a_call_are_streamed(server: Served) -> None:
    """The client gets a call's arguments in many events."""
    fields = body(hermes([QUOTES]), stream=True)
    text = HTTP.post(server.url + CHAT, json=fields).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert sum("tool_calls" in delta for delta in deltas) > 5


def test_tools_and_response_format_reach_the_parser(server: Served, recorder: Recorder) -> None:
    whole(server, **body("ok"))
    assert recorder.requests[-1].tools == TOOLS
    spec = GrammarSpec("choice", '["ok"]')
    answer = answer_form(OutputRequest(), [recorder], SamplingParams(grammar=spec))
    answer.start()
    assert recorder.requests[-1].response_format == spec


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tool_choice": "required"}, "cannot require a call"),
        ({"tools": [STRICT]}, "has no grammar of strict tools"),
    ],
)
def test_calls_that_cannot_be_forced_are_refused(
    server: Served, fields: dict[str, Any], reason: str
) -> None:
    answer = HTTP.post(server.url + CHAT, json=body("ok", **fields))
    assert answer.status_code == 400 and reason in answer.json()["error"]["message"]
