"""``--chat-template``: a file or the template itself, read during planning and refused before
anything is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from glowplug.core.errors import PlanRefused, Refusal
from glowplug.core.plan.plan import Decision, EnginePlan
from glowplug.core.plugin.registry import PluginSet
from glowplug.entrypoints.bench.others.engine_options import engine_config
from glowplug.entrypoints.cli.flags.arguments import add_engine_options
from glowplug.entrypoints.cli.flags.command_line import CommandLine, read_command_line
from glowplug.entrypoints.cli.flags.parser import Parser
from glowplug.entrypoints.front.model_text import open_tokenizer
from tests.support.tiny_tokenizer import BOS, write_folder

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
OTHER = "give a Jinja file, or the template itself; leave chat_template out for the model's own"


def given(plugins: PluginSet, model: Path, *words: str) -> CommandLine:
    parser = Parser(prog="glowplug serve")
    add_engine_options(parser)
    return read_command_line(
        parser.parse_args(
            ["--model", str(model), "--load-format", "dummy", "--facts", "cpu", *words]
        ),
        plugins,
    )


def template_decision(plan: EnginePlan) -> Decision:
    return next(decision for decision in plan.decisions if decision.field == "chat_template")


def refusal(plugins: PluginSet, model: Path, *words: str) -> Refusal:
    with pytest.raises(PlanRefused) as caught:
        given(plugins, model, *words).plan()
    (found,) = caught.value.refusals
    return found


@pytest.fixture
def spoken(v3: Path, tmp_path: Path) -> Path:
    """A model folder with a tokenizer and a chat template of its own."""
    folder = write_folder(tmp_path / "model")
    (folder / "config.json").write_text((v3 / "config.json").read_text())
    return folder


@pytest.mark.parametrize("how", ["flag", "file", "inline", "key"])
def test_a_chat_template_replaces_the_models_own(
    plugins: PluginSet, spoken: Path, tmp_path: Path, how: str
) -> None:
    file, config = tmp_path / "mine.jinja", tmp_path / "engine.toml"
    file.write_text(TEMPLATE)
    config.write_text(f"chat_template = '{file}'\n")
    words = {
        "flag": ["--chat-template", str(file)],
        "file": ["--config", str(config)],
        "inline": ["--chat-template", TEMPLATE],
        "key": ["--set", f"chat_template={file}"],
    }[how]
    plan = given(plugins, spoken, *words).plan()
    tokenizer = open_tokenizer(plan, plugins)
    assert tokenizer is not None
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "[user]hi"
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tools=[{}]) == "[user]hi"
    )
    assert plan.facts.model.chat_template == plan.chat_template == TEMPLATE
    decision = template_decision(plan)
    assert (decision.value, decision.by) == (
        "inline" if how == "inline" else "mine.jinja",
        "operator",
    )
    assert EnginePlan.from_json(plan.to_json()).chat_template == TEMPLATE


def test_without_the_option_the_models_own_is_used(plugins: PluginSet, spoken: Path) -> None:
    plan = given(plugins, spoken).plan()
    tokenizer = open_tokenizer(plan, plugins)
    assert plan.chat_template == "" and tokenizer is not None
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]).startswith(BOS)
    assert not [decision for decision in plan.decisions if decision.field == "chat_template"]


def test_an_inline_template_may_write_line_breaks_as_a_shell_does(
    plugins: PluginSet, spoken: Path
) -> None:
    text = r"{% for m in messages %}{{ m.content }}\n{% endfor %}"
    assert given(plugins, spoken, "--chat-template", text).plan().chat_template.count("\n") == 1


def test_a_home_folder_is_found(
    plugins: PluginSet, spoken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    assert (
        given(plugins, spoken, "--chat-template", "~/mine.jinja").plan().chat_template == TEMPLATE
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "the chat template 'mine.jinja' could not be read: No such file or directory"),
        (
            b"{% for m in messages %}{{ m",
            "mine.jinja is no chat template: line 1: unexpected end of template",
        ),
        (
            b"\n{{ messages | shout }}",
            "mine.jinja is no chat template: line 2: No filter named 'shout'",
        ),
        (b"Hello {{ name }}", "mine.jinja is no chat template: it does not read 'messages'"),
        (b'{"name": "chatml"}', "mine.jinja is no chat template: it does not read 'messages'"),
        (
            b"\xff\xfe{{ messages }}",
            "the chat template 'mine.jinja' could not be read: it is not UTF-8",
        ),
        (
            b"{{ messages }}" + b" " * (1 << 20),
            "the chat template 'mine.jinja' could not be read: it is larger than 1 MiB",
        ),
        (b"", "mine.jinja is no chat template: it does not read 'messages'"),
    ],
    ids=["missing", "cut", "filter", "plain", "json", "utf8", "large", "empty"],
)
def test_files_that_are_no_chat_template_are_refused(
    plugins: PluginSet, spoken: Path, tmp_path: Path, content: bytes | None, reason: str
) -> None:
    file = tmp_path / "mine.jinja"
    if content is not None:
        file.write_bytes(content)
    found = refusal(plugins, spoken, "--chat-template", str(file))
    assert (found.field, found.fix) == ("chat_template", OTHER)
    assert found.reason.startswith(reason), found.reason


def test_names_and_broken_inline_templates_are_refused(plugins: PluginSet, spoken: Path) -> None:
    named = refusal(plugins, spoken, "--chat-template", "chatml")
    assert named.reason == "the chat template 'chatml' could not be read: No such file or directory"
    broken = refusal(plugins, spoken, "--chat-template", "{% for m in messages %}")
    assert (
        broken.reason.startswith("the inline template is no chat template: line 1: ")
        and broken.fix == OTHER
    )
    folder = refusal(plugins, spoken, "--chat-template", str(spoken))
    assert folder.reason == "the chat template 'model' could not be read: Is a directory"
    assert refusal(plugins, spoken, "--set", "chat_template=").field == "chat_template"
    assert refusal(plugins, spoken, "--set", "chat_template=3").reason.endswith(
        "should be a valid string"
    )


@pytest.mark.parametrize(
    "template", ["{{ render(messages) }}", "{{ nothing.there }}{{ messages }}"]
)
def test_a_template_that_renders_no_conversation_is_refused_before_loading(
    plugins: PluginSet, spoken: Path, template: str
) -> None:
    plan = given(plugins, spoken, "--chat-template", template).plan()
    with pytest.raises(PlanRefused) as caught:
        open_tokenizer(plan, plugins)
    (found,) = caught.value.refusals
    assert found.field == "chat_template" and "undefined" in found.reason and found.fix == OTHER


def test_a_template_may_refuse_a_conversation(plugins: PluginSet, spoken: Path) -> None:
    text = (
        "{% if messages[0].role != 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    )
    assert (
        open_tokenizer(given(plugins, spoken, "--chat-template", text).plan(), plugins) is not None
    )


def test_a_template_that_thinks_brings_its_parser(plugins: PluginSet, spoken: Path) -> None:
    assert given(plugins, spoken, "--chat-template", TEMPLATE).plan().choices_in("outputs") == ()
    thinking = given(plugins, spoken, "--chat-template", TEMPLATE + "<think>").plan()
    assert [choice.name for choice in thinking.choices_in("outputs")] == ["deepseek_r1"]


def test_a_plugin_may_contribute_a_template(plugins: PluginSet, spoken: Path) -> None:
    plan = given(plugins, spoken).plan({"chat_template": TEMPLATE})
    assert plan.chat_template == TEMPLATE and template_decision(plan).by == "entry point"


def test_a_template_without_a_tokenizer_is_reported_as_without_effect(
    plugins: PluginSet, spoken: Path
) -> None:
    plan = given(plugins, spoken, "--chat-template", TEMPLATE, "--skip-tokenizer-init").plan()
    decision = template_decision(plan)
    assert decision.why.endswith("; no effect: this engine runs without a tokenizer")
    assert open_tokenizer(plan, plugins) is None


def test_a_long_inline_template_is_shown_short(plugins: PluginSet, spoken: Path) -> None:
    plan = given(plugins, spoken, "--chat-template", TEMPLATE + "x\n" * 500).plan()
    assert len(template_decision(plan).why) < 300 and "\n" not in template_decision(plan).why


def test_benchmarks_take_the_template(plugins: PluginSet, spoken: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    parser = Parser(prog="glowplug bench single-query")
    add_engine_options(parser)
    config: dict[str, Any] = engine_config(
        parser.parse_args(["--chat-template", str(tmp_path / "mine.jinja")])
    )
    assert config == {"chat_template": str(tmp_path / "mine.jinja")}
