"""The tokenizer of a plan, as its plugins find it."""

from __future__ import annotations

from pathlib import Path

from glowplug.core.facts.model_folder import locate_model
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.text.tokenizer import Tokenizer


def tokenizer_path(plan: EnginePlan) -> Path:
    """Return the folder or file of the plan's tokenizer.

    Raises:
        FactsError: the configured one does not exist.
    """
    named = plan.config.get("tokenizer")
    return Path(locate_model(str(named)) if named else plan.facts.model.path)


def find_tokenizer(plan: EnginePlan, plugins: PluginSet) -> Tokenizer | None:
    """Return the tokenizer at ``tokenizer_path``; None if no plugin can read it.

    Raises:
        FactsError: the path does not exist.
        ValueError: a file cannot be read; the message names it.
    """
    path = tokenizer_path(plan)
    found: Tokenizer | None = plugins.hook.open_tokenizer(path=path, facts=plan.facts.model)
    return found
