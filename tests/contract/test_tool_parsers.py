"""The parsers of tool calls pass the conformance suite: each format's dialogues cut everywhere."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import pytest

from glowplug.core.plugin.options import OutputOptions
from glowplug.core.protocols import OutputRequest, Worker
from glowplug.core.step.tools import Tool, ToolChoice
from glowplug.core.testing.suites.parser import Case, ParserSuite, run
from glowplug.plugins.outputs.calls import factories
from glowplug.plugins.outputs.calls.base import CallParser
from tests.support import tool_dialogues
from tests.support.tool_dialogues import PARIS, TOOLS, cases, dsml

NO_PLAN: Any = None
FORMATS: dict[str, type[factories.CallsFactory]] = {
    "deepseek_v3": factories.DeepseekV3Calls,
    "deepseek_v31": factories.DeepseekV31Calls,
    "deepseek_v32": factories.DeepseekV32Calls,
    "deepseek_v4": factories.DeepseekV4Calls,
    "deepseek_v41": factories.DeepseekV41Calls,
    "kimi_k2": factories.KimiK2Calls,
    "hermes": factories.HermesCalls,
    "llama3_json": factories.Llama3Calls,
    "pythonic": factories.PythonicCalls,
}
WRITERS = {
    "deepseek_v3": tool_dialogues.deepseek_v3,
    "deepseek_v31": tool_dialogues.deepseek_v31,
    "deepseek_v32": dsml("function_calls"),
    "deepseek_v4": dsml("tool_calls"),
    "deepseek_v41": dsml("calls", " "),
    "kimi_k2": tool_dialogues.kimi_k2,
    "hermes": tool_dialogues.hermes,
    "llama3_json": tool_dialogues.llama3_json,
    "pythonic": tool_dialogues.pythonic,
}
FORCED = ToolChoice("required")


def make(name: str) -> factories.CallsFactory:
    return FORMATS[name](OutputOptions(use=name), NO_PLAN, Worker())


def parsed(name: str, text: str, **fields: Any) -> list[tuple[str, str]]:
    """Return the joined pieces of a text, fed a character at a time."""
    return run(make(name).start(OutputRequest(tools=TOOLS, **fields)), list(text))


class FormatSuite(ParserSuite):
    """The suite for one format, ``name``."""

    __test__ = False
    plain_request = OutputRequest(tools=TOOLS)
    name = ""
    #: patterns whose megabyte is parsed in bounded time, beside a plain one
    patterns: Sequence[str] = ()

    def make(self) -> factories.CallsFactory:
        return make(self.name)

    def cases(self) -> Sequence[Case]:
        number = "functions.get_weather:0 " if self.name == "kimi_k2" else ""
        return [
            *cases(
                WRITERS[self.name],
                2 if self.name == "kimi_k2" else None,
                after=self.name != "llama3_json",
            ),
            Case("plain { text <", [("content", "plain { text <")], tools=TOOLS),
            Case("  [1, 2]\n", [("content", "  [1, 2]\n")], tools=TOOLS),
            Case(" \n ", [("content", " \n ")], tools=TOOLS),
            Case(
                WRITERS[self.name]([PARIS]),
                [("content", WRITERS[self.name]([PARIS]))],
            ),
            Case(
                "\n\n" + WRITERS[self.name]([PARIS]),
                [("tool_call", f"{number}get_weather {tool_dialogues.dumped(PARIS[1])}")],
                tools=TOOLS,
                tool_choice=FORCED,
            ),
        ]

    def adversarial(self) -> Sequence[str]:
        return ["a <", *self.patterns]


class TestDeepseekV3(FormatSuite):
    __test__ = True
    name = "deepseek_v3"
    patterns = ("<｜tool▁call▁begin｜>f<｜tool▁sep｜>g\n", "<｜tool▁calls▁begin｜")


class TestDeepseekV31(FormatSuite):
    __test__ = True
    name = "deepseek_v31"
    patterns = ("<｜tool▁call▁begin｜>f<｜tool▁sep｜>{",)


class TestDeepseekV32(FormatSuite):
    __test__ = True
    name = "deepseek_v32"
    patterns = ('<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">[',)


class TestDeepseekV4(FormatSuite):
    __test__ = True
    name = "deepseek_v4"

    def cases(self) -> Sequence[Case]:
        body = (
            '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n{"a": {"b": "</｜DSML｜invoke>"}}\n'
        )
        return [
            *super().cases(),
            Case(
                body + "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
                [("tool_call", 'f {"a": {"b": "</｜DSML｜invoke>"}}')],
                tools=TOOLS,
            ),
        ]


class TestDeepseekV41(FormatSuite):
    __test__ = True
    name = "deepseek_v41"


class TestKimiK2(FormatSuite):
    __test__ = True
    name = "kimi_k2"


class TestHermes(FormatSuite):
    __test__ = True
    name = "hermes"
    patterns = ("<tool_call>", '<tool_call>{"name": "f", "arguments": "\\\\')

    def cases(self) -> Sequence[Case]:
        return [
            *super().cases(),
            Case("write <tool_call> tags", [("content", "write <tool_call> tags")], tools=TOOLS),
            Case(
                '<tool_call>{"arguments": {"a": "</tool_call>"}, "id": 1, "name": "f"}</tool_call>',
                [("tool_call", 'f {"a": "</tool_call>"}')],
                tools=TOOLS,
            ),
            Case(
                '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
                [("tool_call", 'f {"a": 1}')],
                tools=TOOLS,
            ),
            Case(
                '<tool_call>{"name": "f"}<tool_call>{"name": "g", "arguments": null}',
                [("tool_call", "f {}"), ("tool_call", "g {}")],
                tools=TOOLS,
            ),
        ]


class TestLlama3(FormatSuite):
    __test__ = True
    name = "llama3_json"

    def cases(self) -> Sequence[Case]:
        return [
            *super().cases(),
            Case(
                ' {"name": "get_weather", "parameters": {"city": "P"}}',
                [("tool_call", 'get_weather {"city": "P"}')],
                tools=TOOLS,
            ),
            Case(
                '{"type": "function", "name": "get_weather", "parameters": {}}',
                [("tool_call", "get_weather {}")],
                tools=TOOLS,
            ),
            Case('{"name": "Ada"}', [("content", '{"name": "Ada"}')], tools=TOOLS),
        ]


def written(value: str) -> tuple[str, str]:
    """Return a call with an argument as Python writes it, and its parsed form."""
    given = tool_dialogues.dumped(ast.literal_eval(value))
    return f"[write_file(a={value})]", f'write_file {{"a": {given}}}'


class TestPythonic(FormatSuite):
    __test__ = True
    name = "pythonic"
    patterns = ("[get_weather(city='a\\n b'), ", "[write_file(a=[1, ", "[ ")

    def cases(self) -> Sequence[Case]:
        literals = [
            "'it\\'s \\\\ \\t\\x41\\u00e9\\U0001F5FC\\101\\\n end'",
            '"""two\n"lines\\""""',
            "''",
            '""',
            "[None, True, [False], {}, [], {'a': {'b': [1,]},}]",
            "1_000",
            "-12",
            "-1.25",
            "'\\ud83d\\uddfc'",
        ]
        return [
            *super().cases(),
            *(
                Case(text, [("tool_call", call)], tools=TOOLS)
                for text, call in map(written, literals[:-1])
            ),
            Case(
                f"[write_file(a={literals[-1]}, b = true ,c='<\\/a>', d=-1.5e-3)]",
                [
                    (
                        "tool_call",
                        'write_file {"a": "\\ud83d\\uddfc", "b": true, "c": "</a>", "d": -1.5e-3}',
                    )
                ],
                tools=TOOLS,
            ),
            Case(
                "ok <|python_start|>[ other(x=.5) ,\n time-now.utc()]<|python_end|> done",
                [
                    ("content", "ok"),
                    ("tool_call", 'other {"x": 0.5}'),
                    ("tool_call", "time-now.utc {}"),
                    ("content", "done"),
                ],
                tools=TOOLS,
            ),
            Case(
                "see [other(x=1)] <|python_end|>",
                [("content", "see [other(x=1)] <|python_end|>")],
                tools=TOOLS,
            ),
            Case(
                "<|python_tag|> 1 [[get_weather",
                [("content", "<|python_tag|> 1 [[get_weather")],
                tools=TOOLS,
            ),
        ]

    def test_a_required_call_that_python_cannot_express_is_a_list_of_json(self) -> None:
        tools = (Tool("f", parameters={"type": "object", "anyOf": [{"required": ["a"]}]}), *TOOLS)
        text = '[{"name": "f", "parameters": {"a": 1}}, {"name": "g"}]'
        named = ToolChoice("required", "get_weather")
        for choice, expected in (
            (FORCED, [("tool_call", 'f {"a": 1}'), ("tool_call", "g {}")]),
            (named, [("content", text)]),
        ):
            request = OutputRequest(tools=tools, tool_choice=choice)
            assert run(make(self.name).start(request), list(text)) == expected

    @pytest.mark.parametrize(
        ("value", "rest"),
        [
            ("__import__('os')", "('os'))]"),
            ("1 + 1", "+ 1)]"),
            ("celsius", ")]"),
            ("0x10", ")]"),
            ("f'{x}'", "'{x}')]"),
            ("(1, 2)", "(1, 2))]"),
            ("{1: 2}", "1: 2})]"),
            ("[1 2]", "2])]"),
            ("[" * 300, "[" * 44 + ")]"),
            ("1 b=2", "b=2)]"),
            ("1, 5", ")]"),
        ],
    )
    def test_an_argument_that_is_no_literal_ends_the_call(self, value: str, rest: str) -> None:
        """Nothing is evaluated: the call stays incomplete, and the text behind it is content."""
        whole = parsed(self.name, f"[write_file(a={value})]")
        assert [kind for kind, _ in whole] == ["tool_call", "content"]
        assert whole[0][1].startswith('write_file {"a": ') and not whole[0][1].endswith("}")
        assert whole[1][1].endswith(rest)


# ---- named faults of other engines ---------------------------------------------------------------


def test_calls_without_the_tag_around_them_are_calls() -> None:
    """DeepSeek V4 leaves the tag out in long contexts (vllm 48931)."""
    inner = dsml("")([("f", {"a": "x 2>&1"})]).split("\n", 1)[1].partition("</｜DSML｜invoke>")[0]
    assert parsed("deepseek_v4", f"ok\n\n{inner}</｜DSML｜invoke>") == [
        ("content", "ok"),
        ("tool_call", 'f {"a": "x 2>&1"}'),
    ]
    assert parsed(
        "deepseek_v31", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
    ) == [("tool_call", 'f {"a": 1}')]


@pytest.mark.parametrize("value", ["NaN", "[1, ", "hello", "{'a': 1}", "1" * 5000, "[" * 100_000])
def test_a_parameter_that_is_no_json_becomes_a_text(value: str) -> None:
    text = (
        '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">'
        f"{value}</｜DSML｜parameter></｜DSML｜invoke>"
    )
    whole = run(make("deepseek_v32").start(OutputRequest(tools=TOOLS)), [text])
    assert whole == [("tool_call", f"f {tool_dialogues.dumped({'a': value})}")]


def test_words_of_python_become_json() -> None:
    text = WRITERS["deepseek_v32"]([("f", {"a": True})]).replace(">true", ">True")
    assert parsed("deepseek_v32", text) == [("tool_call", 'f {"a": true}')]


def test_a_parameter_without_its_kind_has_the_type_of_the_schema() -> None:
    text = (
        '<｜DSML｜invoke name="get_weather"><｜DSML｜parameter name="city">12</｜DSML｜parameter>'
        '<｜DSML｜parameter name="days">12</｜DSML｜parameter></｜DSML｜invoke>'
    )
    assert parsed("deepseek_v32", text) == [("tool_call", 'get_weather {"city": "12", "days": 12}')]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_an_answer_cut_within_a_call_has_no_tag_in_its_parts(name: str) -> None:
    """Its arguments are the beginning of the whole arguments, for every length of the answer."""
    text = WRITERS[name]([tool_dialogues.QUOTES])
    _, whole = parsed(name, text)[0]
    for length in range(len(text)):
        parts = parsed(name, text[:length])
        calls = [part for kind, part in parts if kind == "tool_call"]
        # a text that ends within the first tag may still be an ordinary text
        if calls or length > len(text.partition(">")[0]):
            assert all(kind == "tool_call" for kind, _ in parts) and len(calls) <= 1, parts
        assert all(whole.startswith(call) for call in calls), (length, calls)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_work_is_linear_in_the_text(name: str) -> None:
    """The characters that are looked at grow with the text, not with the number of its pieces."""
    frame = WRITERS[name]([("write_file", {"text": "@"})])
    opening, _, closing = frame.partition("@")
    for filler in ('\\"', "{[", "<", "</", "x"):
        text = opening + filler * 2000 + closing
        for size in (1, 7, len(text)):
            parser = make(name).start(OutputRequest(tools=TOOLS))
            assert isinstance(parser, CallParser)
            for at in range(0, len(text), size):
                parser.feed(text[at : at + size])
            parser.finish()
            assert parser.source.work <= 40 * len(text), (filler, size)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_unbalanced_arguments_are_passed_on_and_nothing_is_kept(name: str) -> None:
    opening = WRITERS[name]([("write_file", {"text": "@"})]).partition("@")[0]
    parser = make(name).start(OutputRequest(tools=TOOLS))
    given = sum(len(piece.text) for piece in parser.feed(opening))
    for _ in range(1000):
        given += sum(len(piece.text) for piece in parser.feed("[{" * 100))
    assert given >= 200_000
    assert parser.finish() == []


def test_calls_of_kimi_are_numbered_over_the_conversation() -> None:
    text = WRITERS["kimi_k2"]([tool_dialogues.PARIS, tool_dialogues.EMPTY])
    assert [part.split(" ")[0] for _, part in parsed("kimi_k2", text, earlier_calls=3)] == [
        "functions.get_weather:3",
        "functions.time-now.utc:4",
    ]


@pytest.mark.parametrize(
    ("name", "encoding"),
    [("deepseek_v4", "DeepseekV4Encoding"), ("deepseek_v41", "DeepseekV41Encoding")],
)
def test_calls_that_deepseeks_own_package_writes_are_parsed(name: str, encoding: str) -> None:
    recipe = pytest.importorskip("deepseek_recipe", reason="needs DeepSeek's own package")
    for before, calls, _ in tool_dialogues.DIALOGUES:
        written = [
            recipe.ToolCall(str(i), function, tool_dialogues.dumped(given))
            for i, (function, given) in enumerate(calls)
        ]
        messages = [
            recipe.UserMessage("x"),
            recipe.AssistantMessage(before.rstrip(), "thought", written),
            recipe.UserMessage("y"),
        ]
        prompt = getattr(recipe, encoding)().render_conversation(recipe.Conversation(messages))
        answer = prompt.prompt.rpartition("</think>")[2].partition("<｜end▁of▁sentence｜>")[0]
        expected = [("content", before.rstrip())] if before else []
        expected += [
            ("tool_call", f"{function} {tool_dialogues.dumped(given)}") for function, given in calls
        ]
        assert parsed(name, answer) == expected, answer
