"""Prompts of DeepSeek V4 and V4.1 by the package ``deepseek-recipe``.

A folder of the V3 family that states V4's ``model_type`` stands for that of a third party.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.errors import PlanRefused, RequestError
from glowplug.core.facts.machine import read_sheet
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.protocols import OutputRequest, Worker
from glowplug.core.step.tools import Tool
from glowplug.core.testing.harness.fakes import TINY_V3, write_model
from glowplug.core.text.tokenizer import Tokenizer
from glowplug.entrypoints.front.chat.turn import Turn
from glowplug.entrypoints.front.model_text import open_tokenizer
from glowplug.plugins.outputs.calls.factories import DeepseekV4Calls, DeepseekV41Calls
from glowplug.plugins.tokenizers import deepseek_recipe as plugin
from tests.e2e.fake_engine import make_tokenizer

VERSIONS = {"deepseek_v4": "DeepSeek-V4-Pro", "deepseek_v41": "DeepSeek-V4.1-Flash"}
PARSERS = {"deepseek_v4": DeepseekV4Calls, "deepseek_v41": DeepseekV41Calls}
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ARGUMENTS = {"city": 'Bern "Süd"', "days": 3, "exact": True}
CALL = {
    "id": "call-1",
    "type": "function",
    "function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)},
}
ROUND = [
    *HELLO,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call-1", "content": "sunny"},
]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


def planned(folder: Path, plugins: PluginSet, kind: str = "deepseek_v4", **more: Any) -> EnginePlan:
    config = {**TINY_V3, "vocab_size": 512, "model_type": kind}
    write_model(folder, config, {"lm_head.weight": ("BF16", (512, 128))})
    make_tokenizer().backend.save(str(folder / "tokenizer.json"))
    given = {"model": str(folder), "weights": {"use": "random"}, **more}
    return make_plan(given, plugins=plugins, hardware=read_sheet("cpu"))


def opened(plan: EnginePlan, plugins: PluginSet) -> Tokenizer:
    pytest.importorskip("deepseek_recipe", reason="needs the extra deepseek")
    found = open_tokenizer(plan, plugins)
    assert found is not None and found.has_chat_template
    return found


def by_the_package(kind: str, **body: Any) -> str:
    import deepseek_recipe as recipe

    request = recipe.ChatCompletionRequest({"model": VERSIONS[kind], **body})
    conversation = request.convert(recipe.ConversionOptions()).conversation
    encoding = recipe.DeepseekV4Encoding if kind == "deepseek_v4" else recipe.DeepseekV41Encoding
    return str(encoding().render_conversation(conversation).prompt)


def outputs_of(plan: EnginePlan) -> list[str]:
    return [one.name for one in plan.choices if one.slot == "outputs"]


def test_without_the_package_the_start_is_refused_with_the_fix(
    tmp_path: Path, plugins: PluginSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "installed", lambda name: "")
    with pytest.raises(PlanRefused) as caught:
        open_tokenizer(planned(tmp_path, plugins), plugins)
    (refusal,) = caught.value.refusals
    assert "deepseek-recipe" in refusal.reason
    assert 'pip install "glowplug[deepseek]"' in refusal.fix


@pytest.mark.parametrize("own", [True, False])
def test_a_chat_template_takes_precedence(
    tmp_path: Path, plugins: PluginSet, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """The folder's or the operator's; the package is not needed then."""
    monkeypatch.setattr(plugin, "installed", lambda name: "")
    if own:
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    plan = planned(tmp_path, plugins, **({} if own else {"chat_template": TEMPLATE}))
    tokenizer = open_tokenizer(plan, plugins)
    assert tokenizer is not None and type(tokenizer) is Tokenizer
    assert tokenizer.apply_chat_template(HELLO) and outputs_of(plan) == []


def test_other_models_without_a_template_have_none(tmp_path: Path, plugins: PluginSet) -> None:
    plan = planned(tmp_path, plugins, "deepseek_v3")
    tokenizer = open_tokenizer(plan, plugins)
    assert tokenizer is not None and not tokenizer.has_chat_template and outputs_of(plan) == []


@pytest.mark.parametrize("kind", VERSIONS)
def test_prompts_are_those_of_the_package(tmp_path: Path, plugins: PluginSet, kind: str) -> None:
    plan = planned(tmp_path, plugins, kind)
    assert outputs_of(plan) == ["deepseek_r1", kind]
    tokenizer = opened(plan, plugins)
    assert tokenizer.template_arguments == {"thinking", "enable_thinking", "reasoning_effort"}
    render = tokenizer.apply_chat_template
    assert render(HELLO) == by_the_package(kind, messages=HELLO)
    assert render(HELLO).endswith("<｜Assistant｜><think>")
    for name in ("thinking", "enable_thinking"):
        closed = render(HELLO, **{name: False})
        assert closed == by_the_package(kind, messages=HELLO, thinking={"type": "disabled"})
        assert closed.endswith("<｜Assistant｜></think>")
    high, most = (render(HELLO, thinking=True, reasoning_effort=one) for one in ("high", "max"))
    assert high != most == by_the_package(kind, messages=HELLO, reasoning_effort="max")
    turn = Turn(ROUND, (Tool("weather", "", SCHEMA),))
    text = turn.prompt_text(tokenizer)
    assert '"city"' in text and "<tool_result>sunny</tool_result>" in text
    assert text == by_the_package(kind, messages=ROUND, tools=[turn.tools[0].described()])
    assert text == render([*ROUND], tools=[turn.tools[0].described()])


@pytest.mark.parametrize("kind", VERSIONS)
def test_the_parser_reads_the_calls_that_the_package_writes(
    tmp_path: Path, plugins: PluginSet, kind: str
) -> None:
    plan = planned(tmp_path, plugins, kind)
    text = opened(plan, plugins).apply_chat_template(ROUND, tools=[TOOL])
    written = text.rpartition("</think>")[2].partition("<｜end▁of▁sentence｜>")[0]
    options = next(one for one in plan.choices if one.name == kind).options
    parser = PARSERS[kind](options, plan, Worker()).start(  # type: ignore[arg-type]
        OutputRequest(tools=(Tool("weather", "", SCHEMA),))
    )
    pieces = [*parser.feed(written), *parser.finish()]
    calls = [one for one in pieces if one.kind == "tool_call"]
    assert calls[0].data["name"] == "weather"
    assert json.loads("".join(one.text for one in calls)) == ARGUMENTS
    assert not "".join(one.text for one in pieces if one.kind == "content").strip()


def test_ends_of_prompts_and_faults_of_requests(tmp_path: Path, plugins: PluginSet) -> None:
    tokenizer = opened(planned(tmp_path, plugins), plugins)
    render = tokenizer.apply_chat_template
    begun = [*HELLO, {"role": "assistant", "content": "It is"}]
    assert render(begun, add_generation_prompt=False, continue_final_message=True).endswith("It is")
    assert render(HELLO, add_generation_prompt=False).endswith("<｜User｜>Hello")
    for messages, more, param in (
        ([], {}, "messages"),
        ([{"role": "nobody", "content": "x"}], {}, "messages"),
        (HELLO, {"reasoning_effort": "sideways"}, "messages"),
        (HELLO, {"tokenize": True}, "chat_template_kwargs"),
        (HELLO, {"continue_final_message": True}, "continue_final_message"),
        (HELLO, {"continue_final_message": True, "add_generation_prompt": False}, "messages"),
    ):
        with pytest.raises(RequestError) as refused:
            render(messages, **more)
        assert refused.value.param == param
    digest = tokenizer.digest
    tokenizer.use_chat_template("{{ messages[0].content }}")
    assert render(HELLO) == "Hello" and tokenizer.digest != digest
