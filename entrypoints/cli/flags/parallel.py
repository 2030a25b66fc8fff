"""``[[parallel]]`` sections from flags in any order: missing sizes, and the order of strategies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from glowplug.core.config.files import Layer
from glowplug.core.plan.plan import Decision
from glowplug.entrypoints.cli.flags.flag import GivenFlag

SECTION = "parallel"
TENSOR = "tensor"
#: strategies that regroup the tensor-parallel ranks, in the order in which they must be listed
REGROUPINGS = ("ep_moe", "dp_attention")
RANKS = f"{SECTION}[{TENSOR}].size"
#: strategy by the field of its size. NOTE: a size of one means the same as no section, and
#: published commands write --tp 1
SIZE_FIELDS: dict[str, str] = {f"{SECTION}[{use}].size": use for use in (TENSOR, *REGROUPINGS)}


def sizes_of_one(given: Sequence[GivenFlag]) -> dict[str, str]:
    """Return the flags that set a parallel strategy's size to 1: ``{"tensor": "--tp 1"}``."""
    return {
        SIZE_FIELDS[one.flag.path]: one.text
        for one in given
        if one.flag.path in SIZE_FIELDS and one.value == 1
    }


def larger_than_one(layer: Layer, given: Sequence[GivenFlag]) -> list[tuple[int, str]]:
    """Return the strategies that have a larger size in ``layer`` although a flag sets size 1.

    Returns:
        (index in the list ``parallel`` of ``layer``, the flag) of each such strategy.
    """
    items = layer.data.get(SECTION)
    single = sizes_of_one(given)
    numbered = enumerate(items if isinstance(items, list) else [])
    return [
        (number, single[item["use"]])
        for number, item in numbered
        if isinstance(item, dict) and item.get("use") in single and item.get("size", 1) != 1
    ]


def arrange(layer: Layer, given: Sequence[GivenFlag]) -> list[Decision]:
    """Sort the parallel strategies in ``layer`` and complete their sizes, if flags name any.

    "ep_moe" and "dp_attention" without a size get the number of tensor-parallel ranks. A strategy
    that a flag sets to size one is removed, even if the file lists it. If no flag names a strategy,
    the file's list is not changed.

    Returns:
        Decisions for the plan: one for each flag that sets size one, and one for each switch that
        has no effect.
    """
    single = sizes_of_one(given)
    notes = [
        Decision(f"{SECTION}[{use}].size", 1, "operator", flag) for use, flag in single.items()
    ]
    items = layer.data.get(SECTION)
    named = any(one.flag.path.startswith(f"{SECTION}[") for one in given)
    # the configuration's parser reports items that are no sections
    if not named or not isinstance(items, list) or not all(isinstance(i, dict) for i in items):
        return notes
    notes += _drop_single(layer, items, single)
    _complete_sizes(layer, items)
    reorder(layer, SECTION, sorted(range(len(items)), key=lambda number: _place(items[number])))
    return notes


def _complete_sizes(layer: Layer, items: list[dict[str, Any]]) -> None:
    """Set missing sizes of "ep_moe" and "dp_attention" to the number of tensor-parallel ranks."""
    ranks = next((item.get("size") for item in items if item.get("use") == TENSOR), None)
    if not isinstance(ranks, int):
        return
    for number, item in enumerate(items):
        if item.get("use") in REGROUPINGS and "size" not in item:
            item["size"] = ranks
            switch = layer.origins.get(f"{SECTION}.{number}.use", "")
            layer.origins[f"{SECTION}.{number}.size"] = switch


def _place(item: dict[str, Any]) -> int:
    """Return the sort key of a strategy, its place in the order that the plan requires.

    Strategies without a required place come last.
    """
    names = (TENSOR, *REGROUPINGS)
    return names.index(item["use"]) if item.get("use") in names else len(names)


def _drop_single(layer: Layer, items: list[Any], single: Mapping[str, str]) -> list[Decision]:
    """Remove the strategies that flags set to size one.

    If tensor parallelism has size one, "ep_moe" and "dp_attention" without a size are removed too.

    NOTE: published commands write ``--tp 1 --enable-ep-moe``.

    Returns:
        A note for each removed "ep_moe" or "dp_attention" that had no size, and for each other
        option of a removed strategy.
    """
    dropped = {
        number: single[item["use"]]
        for number, item in enumerate(items)
        if item.get("use") in single
    }
    one_rank = single.get(TENSOR)
    for number, item in enumerate(items):
        if item.get("use") in REGROUPINGS and "size" not in item and one_rank is not None:
            dropped[number] = one_rank
    notes = []
    for number, flag in dropped.items():
        why = "there is one rank" if flag == one_rank else "its size is one"
        for origin in _origins_without_effect(layer, number, items[number]):
            notes.append(Decision(origin, "no effect", "operator", f"{why} ({flag})"))
    reorder(layer, SECTION, [number for number in range(len(items)) if number not in dropped])
    return notes


def _origins_without_effect(layer: Layer, number: int, item: Mapping[str, Any]) -> Iterator[str]:
    """Yield the origins of a removed item's options, beside the one that sets its size.

    ``use`` counts if no size was given: then a switch chose the strategy.
    """
    keys = [key for key in item if key not in ("use", "size")]
    if item.get("use") in REGROUPINGS and "size" not in item:
        keys.insert(0, "use")
    paths = (f"{SECTION}.{number}.{key}" for key in keys)
    yield from dict.fromkeys(layer.origins.get(path, path) for path in paths)


def reorder(layer: Layer, listed: str, order: list[int]) -> None:
    """Reorder the items of a list in ``layer``, and with them the recorded origins of their values.

    Args:
        layer: the layer to change.
        listed: name of the section that is a list.
        order: old indices in the new order; items whose index is missing are removed.
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
