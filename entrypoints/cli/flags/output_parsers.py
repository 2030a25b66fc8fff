"""Check of ``--tool-call-parser``: the named parser has to parse tool calls."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from glowplug.core.config.files import Layer
from glowplug.core.config.schema import canonical
from glowplug.core.errors import Refusal
from glowplug.core.plugin.offers import OutputOffers
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.plugin.slots import SLOTS
from glowplug.entrypoints.cli.flags.parallel import reorder

FLAG = "--tool-call-parser"
OUTPUTS = next(slot for slot in SLOTS if slot.name == "outputs")


def without_wrong_parsers(layer: Layer, plugins: PluginSet) -> tuple[Layer, list[Refusal]]:
    """Remove output parsers that ``--tool-call-parser`` names although they parse no tool calls.

    Parsers of tool calls stay; the plan's checks decide whether answers can have tool calls.

    Returns:
        (``layer`` without these parsers, a refusal of each removed parser).
    """
    section = OUTPUTS.section
    items = layer.data.get(section)
    refusals: list[Refusal] = []
    kept = []
    for number, item in enumerate(items if isinstance(items, list) else []):
        path = f"{section}.{number}.use"
        given = layer.origins.get(path, "")
        from_flag = given.startswith(FLAG)
        refusal = _refusal(path, given, str(item["use"]), plugins) if from_flag else None
        if refusal is None:
            kept.append(number)
        else:
            refusals.append(refusal)
    if not refusals:
        return layer, []
    rest = copy.deepcopy(layer)
    reorder(rest, section, kept)
    return rest, refusals


def _refusal(path: str, given: str, name: str, plugins: PluginSet) -> Refusal | None:
    """Return the refusal of the parser ``name`` if it parses no tool calls, else None.

    Args:
        path: path of the option that names the parser.
        given: the flag as given, for the refusal.
        name: the parser's name.
        plugins: the loaded plugins.
    """
    kinds = {
        found.component.name: found.component.offers.kinds
        for found in plugins.components(OUTPUTS.name)
        if isinstance(found.component.offers, OutputOffers)
    }
    meant = canonical(OUTPUTS, name, plugins)
    if "tool_call" in kinds.get(meant, ()):
        return None
    reason = f"{given}: " + (
        f"{meant} parses {' and '.join(sorted(kinds[meant]))}, no tool calls"
        if meant in kinds
        else f"no tool-call parser named {name!r} is registered"
    )
    return Refusal("config", path, reason, f"{FLAG} {' or '.join(_names(kinds))}")


def _names(kinds: Mapping[str, frozenset[str]]) -> list[str]:
    """Return the names of the parsers of tool calls. ``kinds``: kinds of pieces by parser."""
    return sorted(name for name, made in kinds.items() if "tool_call" in made)
