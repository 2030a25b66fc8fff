"""The table of a record of exchanges, which the plan's collectives keep."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from glowplug.core.plugin.offers import CollectiveOffers
from glowplug.core.plugin.registry import PluginSet


def save_table(record: Mapping[str, Any], plugins: PluginSet) -> str:
    """Keep a record as a table by the plan's collectives; return a line that names its file."""
    found = plugins.find("collectives", record["chosen"])
    offers = found.component.offers if found is not None else None
    if not isinstance(offers, CollectiveOffers) or not offers.keeps_times:
        return f"no table: {record['chosen']} chooses nothing by measured times"
    module, _, name = offers.keeps_times.partition(":")
    path = getattr(import_module(module), name)(record)
    return f"table: {path}" if path else "no table: neither sums nor exchanges were measured"
