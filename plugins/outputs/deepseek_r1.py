"""Reasoning parser for models that write reasoning between ``<think>`` and ``</think>``.

These are DeepSeek-R1, and DeepSeek-V3.1 if the request enables thinking.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from glowplug.core.facts.model_facts import Facts
from glowplug.core.plugin.component import Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import OutputOffers
from glowplug.core.plugin.options import OutputOptions


class DeepseekR1Options(OutputOptions):
    use: Literal["deepseek_r1"] = "deepseek_r1"
    opening: Literal["auto", "implied", "required"] = Field(
        "auto",
        description="whether text without an opening tag is reasoning until the closing tag: "
        "implied: always; required: never; auto: if the prompt ends with the tag or is not known",
    )


@hookimpl
def register_output_parsers() -> list[Component]:
    return [
        Component(
            name="deepseek_r1",
            options=DeepseekR1Options,
            factory="glowplug.plugins.outputs.deepseek_r1_runtime:DeepseekR1",
            offers=OutputOffers(aliases=frozenset({"deepseek-r1"})),
            summary="splits <think>...</think> from the answer",
        )
    ]


@hookimpl
def contribute_defaults(facts: Facts) -> dict[str, Any]:
    """Return this parser as the default for models whose chat template contains ``<think>``.

    Parsers listed by the operator replace this default.
    """
    return {"outputs": [{"use": "deepseek_r1"}]} if "<think>" in facts.model.chat_template else {}
