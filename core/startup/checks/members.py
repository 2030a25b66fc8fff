"""Check that a runtime object has the members of its slot's protocol, with their arguments.

The object is checked once, when it is built, so that a missing method or a method that takes other
arguments ends the start instead of the first step that calls it. Members that only some components
need are listed in ``NEEDED_IF``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from glowplug.core import protocols
from glowplug.core.plugin.slots import BY_NAME

#: (slot, member) -> function from the component's offers to whether it needs the member
NEEDED_IF: Mapping[tuple[str, str], Callable[[Any], bool]] = {
    ("model", "build_nextn"): lambda offers: offers.nextn,
    ("model", "build_eagle"): lambda offers: bool(offers.eagle_architectures),
    ("attention", "mla_projected"): lambda offers: "mla" in offers.kinds,
    ("attention", "mla"): lambda offers: "mla" in offers.kinds,
    ("attention", "store_mla"): lambda offers: "mla" in offers.kinds,
    ("attention", "mha"): lambda offers: "mha" in offers.kinds,
    ("attention", "store_mha"): lambda offers: "mha" in offers.kinds and offers.first_key,
    ("attention", "move_entries"): lambda offers: offers.tree,
}


def member_faults(slot: str, made: object, offers: Any = None) -> list[str]:
    """Return the members in which ``made`` differs from the protocol of ``slot``.

    Args:
        slot: name of the slot.
        made: the object that the component's factory returned.
        offers: the component's offers, on which the required members depend; None: all.

    Returns:
        One clause for each member that is missing or takes other arguments; [] if there is none.
    """
    tiered = slot == "cache" and getattr(offers, "tier", None) is not None
    protocol = getattr(protocols, "TieredCache" if tiered else BY_NAME[slot].protocol)
    return [
        fault
        for name in _members(protocol)
        if _needed(slot, name, offers) and (fault := _fault(protocol, made, name))
    ]


def _needed(slot: str, name: str, offers: Any) -> bool:
    needed = NEEDED_IF.get((slot, name))
    return needed is None or offers is None or needed(offers)


def _members(protocol: type) -> Iterator[str]:
    """Yield the names of a protocol's attributes and methods, those of its bases first."""
    found: dict[str, None] = {}
    for kind in reversed(protocol.__mro__):
        if getattr(kind, "_is_protocol", False):
            found |= dict.fromkeys(inspect.get_annotations(kind))
            found |= dict.fromkeys(
                name for name, value in vars(kind).items() if inspect.isfunction(value)
            )
    yield from (name for name in found if not name.startswith("_"))


def _fault(protocol: type, made: object, name: str) -> str | None:
    """Return why the member ``name`` of ``made`` is not that of ``protocol``; None if it is."""
    wanted = inspect.getattr_static(protocol, name, None)
    kind = type(made).__name__
    if not hasattr(made, name):
        what = "method" if inspect.isfunction(wanted) else "attribute"
        return f"{kind} has no {what} {name!r}"
    if not inspect.isfunction(wanted):
        return None
    found = getattr(made, name)
    if not callable(found):
        return f"{name!r} of {kind} is not a method"
    return _signature_fault(wanted, found, name)


def _signature_fault(
    wanted: Callable[..., Any], found: Callable[..., Any], name: str
) -> str | None:
    """Return why ``found`` cannot be called as ``wanted`` is; None if it can or is not known."""
    parameters = list(inspect.signature(wanted).parameters.values())[1:]
    try:
        taken = inspect.signature(found)
    except (TypeError, ValueError):  # a builtin without a signature
        return None
    by_place = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
    by_name = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
    required = [p for p in by_place if p.default is p.empty]
    for count in sorted({len(required), len(by_place)}):
        try:
            taken.bind(*[None] * count, **by_name)
        except TypeError:
            takes = ", ".join(map(str, taken.parameters.values()))
            takes_wanted = ", ".join(p.name for p in parameters)
            return f"{name}({takes}) does not take the arguments ({takes_wanted})"
    return None
