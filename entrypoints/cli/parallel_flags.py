"""``[[parallel]]`` from flags that come in any order: sizes that follow from others, and the order
strategies need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from glowplug.core.config.files import Layer
from glowplug.core.plan.plan import Decision
from glowplug.entrypoints.cli.flag_table import Flag

SECTION = "parallel"
TENSOR = "tensor"
FOLLOWING = (
    "ep_moe",
    "dp_attention",
)  #: strategies over the tensor ranks, in the order in which they refine them
RANKS = f"{SECTION}[{TENSOR}].size"
#: NOTE: a size of one is what no parallel section means, and published commands write --tp 1
ONE_RANK: dict[str, str] = {f"{SECTION}[{use}].size": use for use in (TENSOR, *FOLLOWING)}
Given = Sequence[tuple[Flag, str, Any]]


def ones(given: Given) -> dict[str, str]:
    """Strategies to which flags give the size one, with the flag as it is spelled: {"tensor": "--tp
    1"}.
    """
    return {
        ONE_RANK[flag.path]: f"{spelling} {value}"
        for flag, spelling, value in given
        if flag.path in ONE_RANK and value == 1
    }


def larger_than_one(layer: Layer, given: Given) -> list[tuple[int, str]]:
    """(number in the list, flag) of strategies to which a flag gives the size one and ``layer`` a
    larger one.
    """
    items = layer.data.get(SECTION)
    single = ones(given)
    numbered = enumerate(items if isinstance(items, list) else [])
    return [
        (number, single[item["use"]])
        for number, item in numbered
        if isinstance(item, dict) and item.get("use") in single and item.get("size", 1) != 1
    ]


def arrange(layer: Layer, given: Given) -> list[Decision]:
    """Put the strategies that flags named into their order; a switch without a size means as many
    as tensor ranks.

    A strategy of size one goes, one that stands in a file too: the command line has precedence. A
    list that stands in a file alone is left as it is. Returns a decision for each flag that says
    one, and for switches without effect.
    """
    single = ones(given)
    notes = [
        Decision(f"{SECTION}[{use}].size", 1, "operator", shown) for use, shown in single.items()
    ]
    items = layer.data.get(SECTION)
    if not isinstance(items, list) or not any(
        flag.path.startswith(f"{SECTION}[") for flag, _, _ in given
    ):
        return notes
    if not all(isinstance(item, dict) for item in items):
        return notes  # the parser says what is wrong with it
    notes += _drop_single(layer, items, single)
    ranks = next((item.get("size") for item in items if item.get("use") == TENSOR), None)
    for number, item in enumerate(items):
        if item.get("use") in FOLLOWING and "size" not in item and isinstance(ranks, int):
            item["size"] = ranks
            layer.origins[f"{SECTION}.{number}.size"] = layer.origins.get(
                f"{SECTION}.{number}.use", ""
            )
    order = sorted(range(len(items)), key=lambda number: _place(items[number]))
    reorder(layer, SECTION, order)
    return notes


def _place(item: dict[str, Any]) -> int:
    names = (TENSOR, *FOLLOWING)
    return names.index(item["use"]) if item.get("use") in names else len(names)


def _drop_single(layer: Layer, items: list[Any], single: Mapping[str, str]) -> list[Decision]:
    """Leave out strategies of size one, and on one rank those whose size follows from the ranks
    (published commands write ``--tp 1 --enable-ep-moe``). Returns a note for each switch among
    them."""
    dropped = {
        number: single[item["use"]]
        for number, item in enumerate(items)
        if item.get("use") in single
    }
    alone = single.get(TENSOR)
    notes = []
    for number, item in enumerate(items):
        if item.get("use") not in FOLLOWING or "size" in item:
            continue
        if alone is not None:
            dropped[number] = alone
        if number in dropped:
            switch = layer.origins.get(f"{SECTION}.{number}.use", SECTION)
            why = "there is one rank" if dropped[number] == alone else "its size is one"
            notes.append(Decision(switch, "no effect", "operator", f"{why} ({dropped[number]})"))
    reorder(layer, SECTION, [number for number in range(len(items)) if number not in dropped])
    return notes


def reorder(layer: Layer, listed: str, order: list[int]) -> None:
    """Items of a list and the places they come from, in a new order; numbers that are missing from
    it go.
    """
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
