"""``--tool-call-parser`` names a parser that makes tool calls, or is refused: one of reasoning will not do."""
from __future__ import annotations

import copy
import difflib

from glowplug.core.config import canonical
from glowplug.core.configfile import Layer
from glowplug.core.errors import Refusal
from glowplug.core.offers import OutputOffers
from glowplug.core.plugins import PluginSet
from glowplug.core.slots import SLOTS
from glowplug.entrypoints.parallel_flags import reorder

FLAG = "--tool-call-parser"
OUTPUTS = next(slot for slot in SLOTS if slot.name == "outputs")


def without_wrong_parsers(layer: Layer, plugins: PluginSet) -> tuple[Layer, list[Refusal]]:
    """``layer`` less the output parsers that the flag named and that make no tool calls, and a refusal of each."""
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
    """Why ``name`` is no tool-call parser and what to write instead; None for one that is."""
    kinds = {found.component.name: found.component.offers.kinds for found in plugins.components(OUTPUTS.name)
             if isinstance(found.component.offers, OutputOffers)}
    makers = [known for known, made in kinds.items() if "tool_call" in made]
    meant = canonical(OUTPUTS, name, plugins)
    if meant in makers:
        return None
    reason = f"{said}: " + (f"{meant} parses {' and '.join(sorted(kinds[meant]))}, no tool calls" if meant in kinds
                            else f"no tool-call parser named {name!r} is registered")
    close = difflib.get_close_matches(name.lower(), makers, 1, 0.6)
    if close:
        return Refusal("config", path, reason, f"did you mean {close[0]!r}?")
    fix = f"leave {FLAG} out" + (f", or name one of {', '.join(makers)}" if makers
                                 else ": requests that bring tools are refused")
    return Refusal("config", path, reason, fix)
