"""Prompts of DeepSeek V4 and V4.1, whose folders have no chat template, by DeepSeek's own package.

The package ``deepseek-recipe`` renders conversations with tools, reasoning and its effort.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from glowplug.core.errors import FactsError
from glowplug.core.facts.machine import installed
from glowplug.core.facts.model_facts import Facts
from glowplug.core.plugin.hookspecs import hookimpl

if TYPE_CHECKING:
    from glowplug.core.facts.model_facts import ModelFacts
    from glowplug.core.text.tokenizer import Tokenizer

PACKAGE = "deepseek-recipe"
#: ``model_type`` of config.json -> parser of the tool calls that its prompts describe
PARSERS = {"deepseek_v4": "deepseek_v4", "deepseek_v41": "deepseek_v41"}


def parser_of(model: ModelFacts) -> str:
    """Return the model's parser of tool calls; "" if its prompts are not the package's.

    A chat template, the folder's or the operator's, takes precedence over the package.
    """
    return "" if model.chat_template else PARSERS.get(str(model.config.get("model_type")), "")


@hookimpl
def open_tokenizer(path: Path, facts: ModelFacts) -> Tokenizer | None:
    """Return the tokenizer of a V4 folder; None for other models and without ``tokenizer.json``.

    Raises:
        FactsError: the package is missing.
    """
    folder = path if path.is_dir() else path.parent
    parser = parser_of(facts)
    if not parser or not (folder / "tokenizer.json").is_file():
        return None
    if not installed(PACKAGE):
        raise FactsError(
            f"the model's folder has no chat template, and {PACKAGE}, which has its prompts, is "
            "not installed",
            'pip install "glowplug[deepseek]", or set chat_template',
        )
    from glowplug.plugins.tokenizers.deepseek_recipe_runtime import RecipeTokenizer

    return RecipeTokenizer.of_version(parser, folder)


@hookimpl
def contribute_defaults(facts: Facts) -> dict[str, Any]:
    """Return the parsers of reasoning and of tool calls.

    Parsers listed by the operator replace this default.
    """
    parser = parser_of(facts.model)
    return {"outputs": [{"use": "deepseek_r1"}, {"use": parser}]} if parser else {}
