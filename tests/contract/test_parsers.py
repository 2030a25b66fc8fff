"""The built-in output parsers pass the conformance suite that third parties run on theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from glowplug.core.protocols import OutputRequest, Worker
from glowplug.core.testing.suites.parser import Case, ParserSuite, run
from glowplug.plugins.outputs.deepseek_r1 import DeepseekR1Options, register_output_parsers
from glowplug.plugins.outputs.deepseek_r1_runtime import DeepseekR1

NO_PLAN: Any = None
ASKED = "<｜Assistant｜>"
OPENED = "<｜Assistant｜><think>\n"


def make(**options: Any) -> DeepseekR1:
    return DeepseekR1(DeepseekR1Options(**options), NO_PLAN, Worker())


def both(reasoning: str, content: str) -> list[tuple[str, str]]:
    return [("reasoning", reasoning), ("content", content)]


class TestDeepseekR1(ParserSuite):
    def make(self) -> DeepseekR1:
        return make()

    def cases(self) -> Sequence[Case]:
        whole = "<think>\nfirst\n\nsecond \n</think>\n\nThe answer.\n"
        parts = both("first\n\nsecond", "The answer.\n")
        return [
            Case(whole, parts),
            Case(whole, parts, ASKED),
            Case(whole, parts, OPENED),
            Case(whole, parts, ASKED, False),
            Case(whole.removeprefix("<think>"), parts),
            Case(whole.removeprefix("<think>\n"), parts, OPENED),
            Case(whole.removeprefix("<think>"), parts, ASKED, True),
            Case(" \n<think>a</think>b", both("a", "b"), ASKED),
            Case("<think>\n\n</think>\n\nhello", [("content", "hello")]),
            Case("</think>hello", [("content", "hello")], OPENED),
            Case("plain text < and <thin", [("content", "plain text < and <thin")], ASKED),
            Case("  plain", [("content", "  plain")], ASKED, False),
            Case(" \n ", [("content", " \n ")], ASKED),
            Case("plain <think>x</think>", [("content", "plain <think>x</think>")], ASKED),
            Case("answer", [("content", "answer")], "<｜Assistant｜></think>", True),
            Case("never closed  ", [("reasoning", "never closed")], OPENED),
            Case("cut in the tag </thin", [("reasoning", "cut in the tag </thin")], OPENED),
            Case("<thi", [("reasoning", "<thi")], OPENED),
            Case("<thi", [("content", "<thi")], ASKED),
            Case(
                "a </thick> </think > c<</think>d</think>e",
                both("a </thick> </think > c<", "d</think>e"),
                OPENED,
            ),
            Case("<think>über 日本 👩‍👩‍👧</think>é<think>", both("über 日本 👩‍👩‍👧", "é<think>")),
            Case("  ", [], OPENED),
        ]


@pytest.mark.parametrize(
    ("opening", "known", "unknown"),
    [
        ("auto", "content", "reasoning"),
        ("implied", "reasoning", "reasoning"),
        ("required", "content", "content"),
    ],
)
def test_opening_option(opening: str, known: str, unknown: str) -> None:
    assert run(make(opening=opening).start(OutputRequest(ASKED)), ["text"]) == [(known, "text")]
    assert run(make(opening=opening).start(OutputRequest()), ["text"]) == [(unknown, "text")]
    assert run(make(opening=opening).start(OutputRequest(OPENED)), ["text"]) == [
        ("reasoning", "text")
    ]
    assert run(make(opening=opening).start(OutputRequest(ASKED, True)), ["text"]) == [
        ("reasoning", "text")
    ]
    assert run(make(opening=opening).start(OutputRequest(thinking=False)), ["text"]) == [
        ("content", "text")
    ]


def test_reasoning_is_not_held_back() -> None:
    parser = make().start(OutputRequest(OPENED))
    assert [piece.text for piece in parser.feed("step one")] == ["step one"]
    assert parser.feed(" ") == []
    assert [piece.text for piece in parser.feed("then <")] == [" then"]
    assert [piece.text for piece in parser.feed("b")] == [" <b"]


def test_declaration() -> None:
    (component,) = register_output_parsers()
    assert component.name == "deepseek_r1" and component.offers.aliases == {"deepseek-r1"}  # type: ignore[attr-defined]
