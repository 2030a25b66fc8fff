"""Facts and element counts of a config.json, completed by the built-in families and formats."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.facts.model_folder import model_facts, normalise, read_json
from glowplug.core.facts.weight_classes import Tally
from glowplug.core.plugin.model_reading import ModelReading
from glowplug.core.plugin.registry import PluginSet, load_plugins
from tests.support.source_tree import ROOT


@cache
def built_in() -> PluginSet:
    return load_plugins(entry_points=False)


def read_config(config: dict[str, Any]) -> ModelReading:
    """Return what the registry reads from a folder that holds only this config.json."""
    rules = built_in().rules
    return built_in().complete(model_facts(normalise(config, rules), rules=rules))


def read_shape(name: str) -> ModelReading:
    """Return the reading of a shipped shape ("deepseek-v3")."""
    return read_config(read_json(ROOT / "models" / "shapes" / f"{name}.json"))


def declared(facts: ModelFacts) -> Tally:
    """Return the element counts without tensor headers."""
    return built_in().complete(replace(facts, tensors={})).elements


def stored(facts: ModelFacts) -> Tally:
    """Return the element counts from tensor headers."""
    return built_in().complete(facts).elements


def parameters(elements: Tally) -> int:
    """Return the number of parameters, without next-token layers and scales."""
    return sum(count for kind, count in elements.items() if kind.draft < 0 and not kind.scale)
