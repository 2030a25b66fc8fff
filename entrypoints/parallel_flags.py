"""``[[parallel]]`` from flags that come in any order: sizes that follow from others, and the order strategies need."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from glowplug.core.configfile import Layer
from glowplug.core.plan import Decision
from glowplug.entrypoints.flag_table import Flag

SECTION = "parallel"
TENSOR = "tensor"
FOLLOWING = ("ep_moe", "dp_attention")  #: strategies over the tensor ranks, in the order in which they refine them
RANKS = f"{SECTION}[{TENSOR}].size"


def arrange(layer: Layer, given: Sequence[tuple[Flag, str, Any]]) -> list[Decision]:
    """Put the strategies that flags named into their order; a switch without a size means as many as tensor ranks.

    A list that stands in a file alone is left as it is. Returns remarks on switches that mean nothing on one rank.
    """
    items = layer.data.get(SECTION)
    if not isinstance(items, list) or not any(flag.path.startswith(f"{SECTION}[") for flag, _, _ in given):
        return []
    if not all(isinstance(item, dict) for item in items):
        return []  # the parser says what is wrong with it
    notes = _drop_for_one_rank(layer, items, given)
    ranks = next((item.get("size") for item in items if item.get("use") == TENSOR), None)
    for number, item in enumerate(items):
        if item.get("use") in FOLLOWING and "size" not in item and isinstance(ranks, int):
            item["size"] = ranks
            layer.origins[f"{SECTION}.{number}.size"] = layer.origins.get(f"{SECTION}.{number}.use", "")
    order = sorted(range(len(items)), key=lambda number: _place(items[number]))
    reorder(layer, SECTION, order)
    return notes


def _place(item: dict[str, Any]) -> int:
    names = (TENSOR, *FOLLOWING)
    return names.index(item["use"]) if item.get("use") in names else len(names)


def _drop_for_one_rank(layer: Layer, items: list[Any], given: Sequence[tuple[Flag, str, Any]]) -> list[Decision]:
    """``--tp 1 --enable-ep-moe``: published commands write it, and it means one rank."""
    alone = [f"{spelling} {value}" for flag, spelling, value in given if flag.path == RANKS and value == 1]
    if not alone or any(item.get("use") == TENSOR for item in items):
        return []
    idle = [number for number, item in enumerate(items) if item.get("use") in FOLLOWING and "size" not in item]
    notes = [Decision(layer.origins.get(f"{SECTION}.{number}.use", SECTION), "no effect", "operator",
                      f"there is one rank ({alone[0]})") for number in idle]
    reorder(layer, SECTION, [number for number in range(len(items)) if number not in idle])
    return notes


def reorder(layer: Layer, listed: str, order: list[int]) -> None:
    """Items of a list and the places they come from, in a new order; numbers that are missing from it go."""
    items = layer.data.get(listed, [])
    moved = {old: new for new, old in enumerate(order)}
    origins: dict[str, str] = {}
    for path, place in layer.origins.items():
        section, _, rest = path.partition(".")
        number, dot, key = rest.partition(".")
        if section == listed and number.isdigit():
            if int(number) not in moved:
                continue
            path = f"{listed}.{moved[int(number)]}{dot}{key}"
        origins[path] = place
    layer.origins = origins
    items[:] = [items[old] for old in order]
    if not items:
        layer.data.pop(listed, None)
