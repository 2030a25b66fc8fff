"""``--tool-call-parser``: refused with its own reason where the parser that it names makes no tool
calls.
"""

from __future__ import annotations

import copy

from glowplug.core.config.files import Layer
from glowplug.core.config.schema import canonical
from glowplug.core.errors import Refusal
from glowplug.core.plugin.offers import OutputOffers
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.plugin.slots import SLOTS
from glowplug.entrypoints.cli.parallel_flags import reorder

FLAG = "--tool-call-parser"
OUTPUTS = next(slot for slot in SLOTS if slot.name == "outputs")


def without_wrong_parsers(layer: Layer, plugins: PluginSet) -> tuple[Layer, list[Refusal]]:
    """``layer`` less the output parsers that the flag named and that make no tool calls, and a
    refusal of each.

    Parsers that make them stay: the plan's checks say whether answers carry tool calls.
    """
    section = OUTPUTS.section
    items = layer.data.get(section)
    refusals: list[Refusal] = []
    kept = []
    for number, item in enumerate(items if isinstance(items, list) else []):
        path = f"{section}.{number}.use"
        said = layer.origins.get(path, "")
        refusal = _refusal(path, said, str(item["use"]), plugins) if said.startswith(FLAG) else None
        if refusal is None:
            kept.append(number)
        else:
            refusals.append(refusal)
    if not refusals:
        return layer, []
    rest = copy.deepcopy(layer)
    reorder(rest, section, kept)
    return rest, refusals


def _refusal(path: str, said: str, name: str, plugins: PluginSet) -> Refusal | None:
    """A refusal that says why ``name`` is no tool-call parser; None for one that is."""
    kinds = {
        found.component.name: found.component.offers.kinds
        for found in plugins.components(OUTPUTS.name)
        if isinstance(found.component.offers, OutputOffers)
    }
    meant = canonical(OUTPUTS, name, plugins)
    if "tool_call" in kinds.get(meant, ()):
        return None
    reason = f"{said}: " + (
        f"{meant} parses {' and '.join(sorted(kinds[meant]))}, no tool calls"
        if meant in kinds
        else f"no tool-call parser named {name!r} is registered"
    )
    return Refusal(
        "config", path, reason, f"leave {FLAG} out: requests that bring tools are refused"
    )
