"""Parsers of tool calls: the formats of DeepSeek, Kimi, Hermes and Qwen, and Llama."""

from __future__ import annotations

from typing import Any, Literal

from glowplug.core.facts.model_facts import Facts
from glowplug.core.plugin.component import Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import OutputOffers
from glowplug.core.plugin.options import OutputOptions

FACTORIES = "glowplug.plugins.outputs.calls.factories"
#: texts in a chat template -> parser; the first entry whose texts are all there decides
MARKS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<｜DSML｜function_calls>",), "deepseek_v32"),
    (("<｜DSML｜tool_calls>",), "deepseek_v4"),
    (("<｜DSML｜ calls>",), "deepseek_v41"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<tool_call>", '"arguments"'), "hermes"),
    (("<|python_tag|>", '"parameters"'), "llama3_json"),
)


class DeepseekV3Options(OutputOptions):
    use: Literal["deepseek_v3"] = "deepseek_v3"


class DeepseekV31Options(OutputOptions):
    use: Literal["deepseek_v31"] = "deepseek_v31"


class DeepseekV32Options(OutputOptions):
    use: Literal["deepseek_v32"] = "deepseek_v32"


class DeepseekV4Options(OutputOptions):
    use: Literal["deepseek_v4"] = "deepseek_v4"


class DeepseekV41Options(OutputOptions):
    use: Literal["deepseek_v41"] = "deepseek_v41"


class KimiK2Options(OutputOptions):
    use: Literal["kimi_k2"] = "kimi_k2"


class HermesOptions(OutputOptions):
    use: Literal["hermes"] = "hermes"


class Llama3JsonOptions(OutputOptions):
    use: Literal["llama3_json"] = "llama3_json"


class PythonicOptions(OutputOptions):
    use: Literal["pythonic"] = "pythonic"


def _parser(options: type[OutputOptions], factory: str, summary: str, *aliases: str) -> Component:
    """Return the component of a parser, named as its options are."""
    return Component(
        name=options.model_fields["use"].default,
        options=options,
        factory=f"{FACTORIES}:{factory}",
        offers=OutputOffers(aliases=frozenset(aliases), kinds=frozenset({"tool_call"})),
        summary=summary,
    )


@hookimpl
def register_output_parsers() -> list[Component]:
    return [
        _parser(
            DeepseekV3Options,
            "DeepseekV3Calls",
            "tool calls of DeepSeek V3 and R1, with arguments in a fence",
            "deepseekv3",
        ),
        _parser(
            DeepseekV31Options, "DeepseekV31Calls", "tool calls of DeepSeek V3.1", "deepseekv31"
        ),
        _parser(
            DeepseekV32Options,
            "DeepseekV32Calls",
            "tool calls of DeepSeek V3.2, in DSML",
            "deepseekv32",
        ),
        _parser(
            DeepseekV4Options, "DeepseekV4Calls", "tool calls of DeepSeek V4, in DSML", "deepseekv4"
        ),
        _parser(
            DeepseekV41Options,
            "DeepseekV41Calls",
            "tool calls of DeepSeek V4.1, in DSML",
            "deepseekv41",
        ),
        _parser(KimiK2Options, "KimiK2Calls", "tool calls of Kimi K2", "kimi-k2"),
        _parser(
            HermesOptions,
            "HermesCalls",
            "tool calls of Hermes and Qwen, JSON between tags",
            "qwen",
            "qwen25",
            "qwen2_5",
        ),
        _parser(
            Llama3JsonOptions,
            "Llama3Calls",
            "tool calls of Llama 3, as JSON",
            "llama3",
            "llama4_json",
        ),
        _parser(
            PythonicOptions,
            "PythonicCalls",
            "tool calls of Llama 3.2 and Llama 4, as a list of calls of Python",
            "llama4_pythonic",
        ),
    ]


@hookimpl
def contribute_defaults(facts: Facts) -> dict[str, Any]:
    """Return the parser whose marks are in the model's chat template, beside other parsers.

    Parsers listed by the operator replace this default.
    """
    template = facts.model.chat_template
    for marks, name in MARKS:
        if all(mark in template for mark in marks):
            return {"outputs": [{"use": name}]}
    return {}
