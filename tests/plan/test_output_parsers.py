"""Output parsers in the plan: defaults from the model's facts, and refusals of what cannot run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glowplug.core.errors import PlanRefused, Refusal
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.entrypoints.cli.flags.arguments import add_engine_options
from glowplug.entrypoints.cli.flags.command_line import CommandLine, read_command_line
from glowplug.entrypoints.cli.flags.parser import Parser

CALLS = """
from typing import Literal
from glowplug.core.plugin.component import Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import OutputOffers
from glowplug.core.plugin.options import OutputOptions

class Calls(OutputOptions):
    use: Literal["deepseek_calls"] = "deepseek_calls"

class Notes(OutputOptions):
    use: Literal["notes"] = "notes"

class Speech(OutputOptions):
    use: Literal["speech"] = "speech"

@hookimpl
def register_output_parsers():
    return [
        Component("deepseek_calls", Calls, "nowhere:None",
                  OutputOffers(kinds=frozenset({"reasoning", "tool_call"}))),
        Component("notes", Notes, "nowhere:None", OutputOffers(kinds=frozenset({"reasoning"}))),
        Component("speech", Speech, "nowhere:None",
                  OutputOffers(kinds=frozenset({"reasoning", "audio"}))),
    ]
"""
CONTRIBUTED = """
@hookimpl
def contribute_defaults(facts):
    return {"outputs": [{"use": "deepseek_r1"}, {"use": "speech"}]}
"""


def given(plugins: PluginSet, model: Path, *words: str) -> CommandLine:
    parser = Parser(prog="glowplug serve")
    add_engine_options(parser)
    return read_command_line(
        parser.parse_args(
            ["--model", str(model), "--load-format", "dummy", "--facts", "cpu", *words]
        ),
        plugins,
    )


def refusals(plugins: PluginSet, model: Path, *words: str) -> tuple[Refusal, ...]:
    with pytest.raises(PlanRefused) as caught:
        given(plugins, model, *words).plan()
    return caught.value.refusals


def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str) -> PluginSet:
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    return load_plugins([name], entry_points=False)


@pytest.fixture
def calling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PluginSet:
    """The built-ins and a plugin with one parser of tool calls and one of reasoning."""
    return loaded(tmp_path, monkeypatch, "tool_calls_of_a_test", CALLS)


REASON = (
    "speech makes pieces of kind audio, which answers do not have; "
    "their text would become part of the content"
)


@pytest.mark.parametrize(
    ("words", "place", "left"),
    [
        (
            ["--reasoning-parser", "speech", "--tool-call-parser", "deepseek_calls"],
            0,
            ["deepseek_calls"],
        ),
        (["--reasoning-parser", "speech"], 0, []),
        (["--set", 'outputs=[{"use": "notes"}, {"use": "speech"}]'], 1, ["notes"]),
        (["--set", "outputs.0.use=speech"], 0, []),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_a_parser_of_an_unknown_kind_is_refused_however_it_was_named(
    calling: PluginSet, v3: Path, words: list[str], place: int, left: list[str]
) -> None:
    (refusal,) = refusals(calling, v3, *words)
    assert (refusal.by, refusal.field, refusal.reason) == (
        "speech",
        f"outputs.{place}.use",
        REASON,
    )
    kept = ", ".join(f'{{use = "{name}"}}' for name in left)
    assert refusal.fix == f"outputs = [{kept}]"
    config = json.dumps([{"use": name} for name in left])
    assert [
        c.name
        for c in given(calling, v3, "--set", f"outputs={config}").plan().choices_in("outputs")
    ] == left


def test_a_parser_of_an_unknown_kind_is_refused_from_a_file(
    calling: PluginSet, v3: Path, tmp_path: Path
) -> None:
    file = tmp_path / "engine.toml"
    file.write_text('[[outputs]]\nuse = "speech"\n')
    (refusal,) = refusals(calling, v3, "--config", str(file))
    assert (refusal.field, refusal.reason) == ("outputs.0.use", REASON)


def test_a_parser_of_an_unknown_kind_is_refused_as_a_contributed_default(
    v3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins = loaded(tmp_path, monkeypatch, "contributed_calls_of_a_test", CALLS + CONTRIBUTED)
    (refusal,) = refusals(plugins, v3)
    assert (refusal.field, refusal.reason) == ("outputs.1.use", REASON)
    assert refusal.fix == 'outputs = [{use = "deepseek_r1"}]'
    plan = given(plugins, v3, "--set", 'outputs=[{"use": "deepseek_r1"}]').plan()
    assert [choice.name for choice in plan.choices_in("outputs")] == ["deepseek_r1"]


@pytest.mark.parametrize(
    ("template", "names"),
    [
        ("<think>{{ messages }}", ["deepseek_r1"]),
        ("{{ messages }}", []),
        ("{{ messages }}<｜tool▁calls▁begin｜>```json", ["deepseek_v3"]),
        ("{{ messages }}<think><｜tool▁calls▁begin｜>", ["deepseek_r1", "deepseek_v31"]),
        ("{{ messages }}<｜DSML｜function_calls>", ["deepseek_v32"]),
        ("{{ messages }}<｜DSML｜tool_calls>", ["deepseek_v4"]),
        ("{{ messages }}<｜DSML｜ calls>", ["deepseek_v41"]),
        ("{{ messages }}<|tool_calls_section_begin|>", ["kimi_k2"]),
        ('{{ messages }}<tool_call>{"name": <n>, "arguments": <a>}', ["hermes"]),
        ("{{ messages }}<tool_call><function=f>", []),
        ('{{ messages }}<|python_tag|>"parameters"', ["llama3_json"]),
    ],
)
def test_the_marks_of_the_chat_template_choose_the_default_parsers(
    calling: PluginSet, v3: Path, tmp_path: Path, template: str, names: list[str]
) -> None:
    file = tmp_path / "t.jinja"
    file.write_text(template, encoding="utf-8")
    plan = given(calling, v3, "--chat-template", str(file)).plan()
    assert [choice.name for choice in plan.choices_in("outputs")] == names


def test_a_second_parser_of_tool_calls_is_refused(calling: PluginSet, v3: Path) -> None:
    words = ["--set", 'outputs=[{"use": "kimi-k2"}, {"use": "deepseek_calls"}]']
    (refusal,) = refusals(calling, v3, *words)
    assert (refusal.by, refusal.field) == ("deepseek_calls", "outputs.1.use")
    assert refusal.reason == "kimi_k2 already parses tool calls; a model has one format"
    assert refusal.fix == 'outputs = [{use = "kimi_k2"}]'


def test_the_offers_of_a_parser_decide_and_not_its_name(calling: PluginSet, v3: Path) -> None:
    plan = given(calling, v3, "--reasoning-parser", "notes").plan()
    assert [choice.name for choice in plan.choices_in("outputs")] == ["notes"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("deepseek", "no tool-call parser named 'deepseek' is registered"),
        ("deepseek-r1", "deepseek_r1 parses reasoning, no tool calls"),
        ("deepseek_call", "no tool-call parser named 'deepseek_call' is registered"),
    ],
)
def test_the_flag_for_tool_calls_takes_nothing_else(
    calling: PluginSet, v3: Path, name: str, reason: str
) -> None:
    tools, other = refusals(
        calling, v3, "--tool-call-parser", name, "--reasoning-parser", "deepseek_r2"
    )
    assert (tools.field, tools.reason) == ("outputs.0.use", f"--tool-call-parser {name}: {reason}")
    assert tools.fix.startswith("--tool-call-parser deepseek_calls or deepseek_v3 or ")
    assert (
        other.reason.startswith("--reasoning-parser deepseek_r2: no")
        and other.fix == "did you mean 'deepseek_r1'?"
    )


@pytest.mark.parametrize("name", ["pythonic", "llama4_pythonic"])
def test_the_names_of_peers_choose_the_parser_of_calls_of_python(
    calling: PluginSet, v3: Path, name: str
) -> None:
    plan = given(calling, v3, "--tool-call-parser", name).plan()
    assert [choice.name for choice in plan.choices_in("outputs")] == ["pythonic"]


def test_a_piece_of_an_undeclared_kind_fails_its_request() -> None:
    """Text of a kind that a parser does not offer must not end up in the content."""
    from glowplug.core.protocols import Piece
    from glowplug.entrypoints.front.chat.answers import AnswerParser
    from glowplug.entrypoints.front.delta import Delta

    class Unknown:
        def feed(self, text: str) -> list[Piece]:
            return [Piece("audio", text)]

        def finish(self) -> list[Piece]:
            return []

    with pytest.raises(ValueError, match="'audio'"):
        AnswerParser([Unknown()]).feed(Delta(text="get_weather", token_ids=[1]))
