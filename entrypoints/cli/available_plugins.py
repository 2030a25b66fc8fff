"""The list of installed plugins, with the reason for each one that cannot be loaded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from glowplug.core.errors import PluginLoadError
from glowplug.core.facts.machine import this_machine
from glowplug.core.plan.candidates import unavailable
from glowplug.core.plugin.component import CONTRACT
from glowplug.core.plugin.loading import PluginSource
from glowplug.core.plugin.registry import (
    LOAD_TIMEOUT,
    PluginSet,
    built_in_plugins,
    distribution_of,
    found_entry_points,
)
from glowplug.core.plugin.slots import SLOTS
from glowplug.entrypoints.cli.suite_results import add_results, cell, failures

HEAD = ("plugin", "distribution", "version", "provides", "contract", "loads")


def available(
    sources: Iterable[PluginSource], block: Sequence[str] = (), timeout: float = LOAD_TIMEOUT
) -> list[dict[str, Any]]:
    """Return one entry per plugin, whether it can be loaded or not.

    Each plugin is loaded beside the built-in ones and those before it that could be loaded, as in
    an engine.

    Args:
        sources: the plugins.
        block: names of plugins that are listed, but not loaded.
        timeout: seconds that one plugin may take to load.

    Returns:
        Entries with the plugin's name, target, distribution, version, hooks and components (slot,
        name, contract, ``needs_gpu``, and ``why_not``, the reason why it cannot run here),
        ``loads``, and ``why_not``, the reasons why the plugin does not load or a component cannot
        run here.
    """
    kept = [PluginSource(name, name) for name in built_in_plugins()]
    found = []
    for source in sources:
        entry: dict[str, Any] = {
            "name": source.name,
            "target": source.target,
            "distribution": source.distribution,
            "version": source.version,
            "hooks": [],
            "components": [],
            "loads": False,
        }
        found.append(entry)
        same = [one.origin for one in kept if one.name == source.name]
        if source.name in block:
            entry["why_not"] = "blocked by --block-plugin"
        elif same:
            entry["why_not"] = f"{same[0]} has an entry point of this name; uninstall one of them"
        else:
            try:
                entry |= _loaded(PluginSet([*kept, source], timeout=timeout), source)
                kept.append(source)
            except PluginLoadError as error:
                entry["why_not"] = str(error)
    return found


def _loaded(plugins: PluginSet, source: PluginSource) -> dict[str, Any]:
    """Return the fields of a loaded plugin's entry."""
    machine = this_machine()
    components: list[dict[str, Any]] = []
    reasons = []
    for slot in SLOTS:
        for registration in plugins.components(slot.name):
            one = registration.component
            if plugins.source_of(slot.name, one.name) == source:
                why = unavailable(one, slot.name, plugins.software.packages, machine)
                components.append(
                    {
                        "slot": slot.name,
                        "name": one.name,
                        "contract": one.contract,
                        "why_not": why,
                        "needs_gpu": "cpu" not in one.offers.devices,
                    }
                )
                reasons += [f"{slot.name} {one.name}: {why}"] if why else []
    return {
        "hooks": plugins.hooks_of(source.name),
        "components": components,
        "loads": True,
        "why_not": "; ".join(reasons),
    }


def print_available(
    extra: Sequence[str], block: Sequence[str], as_json: bool, suite_seconds: float | None = None
) -> None:
    """Print the installed entry points and the modules ``extra`` as a table or JSON.

    ``suite_seconds``: time limit of each component's suite; None: no suite is run.
    """
    modules = [PluginSource(name, name, *distribution_of(name)) for name in extra]
    found = available([*found_entry_points(), *modules], block)
    suites = suite_seconds is not None
    if suite_seconds is not None:
        add_results(found, suite_seconds)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    if not found:
        print("no plugin is installed (entry points of the group glowplug)")
        return
    rows = [(*_row(one), *([cell(one)] if suites else [])) for one in found]
    print_table([(*HEAD, *(["suite"] if suites else [])), *rows])
    for one in found:
        if one["why_not"]:
            print(f"\n{one['name']}: {one['why_not']}")
        for line in failures(one) if suites else []:
            print(f"\n{one['name']}: {line}")


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of an entry."""
    parts = entry["components"]
    provided = [f"{part['slot']} {part['name']}" for part in parts] or entry["hooks"]
    contracts = sorted({part["contract"] for part in parts})
    return (
        entry["name"],
        entry["distribution"],
        entry["version"],
        ", ".join(provided),
        ", ".join(str(one) if one == CONTRACT else f"{one} (now {CONTRACT})" for one in contracts),
        "yes" if entry["loads"] else "no",
    )


def print_table(lines: Sequence[tuple[str, ...]]) -> None:
    """Print rows of equally many cells in columns."""
    sizes = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        print("  ".join(cell.ljust(size) for cell, size in zip(line, sizes)).rstrip())
