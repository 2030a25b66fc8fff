"""One configuration layer of all flags of a command line and of ``--set``."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from glowplug.core.config.files import LISTS, Layer, set_path
from glowplug.core.errors import Refusal
from glowplug.core.plan.plan import Decision
from glowplug.entrypoints.cli.flags.flag import Flag, GivenFlag
from glowplug.entrypoints.cli.flags.parallel import SECTION, SIZE_FIELDS, larger_than_one
from glowplug.entrypoints.cli.flags.table import NO_EFFECT_WITH, NO_EFFECT_WITHOUT

_ITEM = re.compile(r"(\w+)\[([\w*]+)\]\.(\w+)")
#: option of a component in a list of sections, by the component's name
_NAMED_OPTION = re.compile(rf"({'|'.join(sorted(LISTS))})\.([^\W\d]\w*)\.(\w+)")


def command_line_layer(
    given: Sequence[GivenFlag], overrides: Sequence[str]
) -> tuple[Layer, list[Decision]]:
    """Return a configuration layer that has the values of all flags, in order, then of ``--set``.

    Args:
        given: flags in command-line order.
        overrides: values of ``--set``.

    Returns:
        The layer, and a note for each flag that has no effect.
    """
    layer = Layer()
    names = {one.flag.names[0] for one in given}
    notes = []
    first = _first_of_each(given, layer)
    for one in first:
        reason = _no_effect_reason(one.flag, names)
        if reason:
            notes.append(Decision(one.spelling, "no effect", "operator", reason))
            continue
        _assign(layer, {**one.flag.also, one.flag.path: one.config_value}, one.text)
    for override in overrides:
        _apply_override(layer, override)
    for number, flag in larger_than_one(layer, first):
        path = f"{SECTION}.{number}.size"
        layer.refusals.append(_contradiction(path, flag, layer.origins.get(path, path)))
    return layer, notes


def drop_unused_options(layer: Layer, given: Sequence[GivenFlag]) -> list[Decision]:
    """Remove options that flags set in ``layer`` for components that ``layer`` does not choose.

    Returns:
        A note for each removed option.
    """
    notes = []
    for one in given:
        path = one.flag.path
        other, why = NO_EFFECT_WITHOUT.get(one.flag.names[0], ("", ""))
        section, _, key = path.partition(".")
        held = layer.data.get(section)
        if not other or not isinstance(held, dict) or key not in held:
            continue
        if held.get("use") in (None, "auto"):
            del held[key], layer.origins[path]
            notes.append(Decision(one.spelling, "no effect", "operator", f"{why} (no {other})"))
    return notes


def value_at(data: Any, path: str) -> Any:
    """Return the value at a dotted path in ``data``; None if the path has no value."""
    for part in path.split("."):
        if isinstance(data, list):
            data = data[int(part)] if part.isdigit() and int(part) < len(data) else None
        else:
            data = data.get(part) if isinstance(data, dict) else None
    return data


def literal(text: str) -> Any:
    """Parse a JSON value (``3``, ``true``, ``[1, 2]``, ``"3"``); return other text unchanged."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _first_of_each(given: Sequence[GivenFlag], layer: Layer) -> list[GivenFlag]:
    """Return the first occurrence of each flag.

    A flag that is repeated with another value adds a refusal to ``layer``.
    """
    first: dict[str, GivenFlag] = {}
    for one in given:
        before = first.setdefault(one.flag.names[0], one)
        if before.config_value != one.config_value:
            layer.refusals.append(_contradiction(one.flag.path, before.text, one.text))
    return list(first.values())


def _no_effect_reason(flag: Flag, names: Collection[str]) -> str:
    """Return why another given flag leaves ``flag`` without effect; "" if none does.

    Args:
        flag: the flag.
        names: the first spelling of each given flag.
    """
    other, why = NO_EFFECT_WITH.get(flag.names[0], ("", ""))
    return f"{why} ({other})" if other in names else ""


def _assign(layer: Layer, fields: Mapping[str, Any], flag: str) -> None:
    """Set the fields of one flag in ``layer``.

    If one of the fields already has another value, nothing is set and a refusal names both flags.

    Args:
        layer: the layer to change.
        fields: values by dotted path.
        flag: the flag and its value, for messages.
    """
    resolved = {
        _resolve_item(layer, path, flag): value
        for path, value in fields.items()
        if path not in SIZE_FIELDS or value != 1
    }
    for path, value in resolved.items():
        before = layer.origins.get(path)
        if before is not None and not _same(path, value_at(layer.data, path), value):
            layer.refusals.append(_contradiction(path, before, flag))
            return
    for path, value in resolved.items():
        if path in layer.origins and value_at(layer.data, path) == f"{value}_mla":
            continue
        set_path(layer.data, path, value)
        layer.origins[path] = flag


def _same(path: str, held: Any, value: Any) -> bool:
    """Return whether ``held`` and ``value`` mean the same in the field ``path``.

    In ``attention.use``, a library's name in other engines ("fa3") means the same as the name of
    its latent attention here ("fa3_mla").
    """
    return bool(
        held == value
        or path == "attention.use"
        and (held == f"{value}_mla" or value == f"{held}_mla")
    )


def _resolve_item(layer: Layer, path: str, flag: str) -> str:
    """Convert a path such as ``parallel[tensor].size`` to the form ``parallel.0.size``.

    The number is that of the list item whose ``use`` is "tensor"; a missing item is added.
    """
    match = _ITEM.fullmatch(path)
    return path if match is None else _item_path(layer, match, flag)


def _item_path(layer: Layer, match: re.Match[str], flag: str) -> str:
    """Return the path of an option of a list item, adding the item if it is missing.

    Args:
        layer: the layer to change.
        match: section, component and option; the component "*" stands for a new item without one.
        flag: the flag and its value, for messages.
    """
    section, use, key = match.groups()
    items = layer.data.setdefault(section, [])
    at = next((i for i, item in enumerate(items) if item.get("use") == use), len(items))
    if at == len(items):
        items.append({} if use == "*" else {"use": use})
        if use != "*":
            layer.origins[f"{section}.{at}.use"] = flag
    return f"{section}.{at}.{key}"


def _apply_override(layer: Layer, override: str) -> None:
    """Set the value of one ``--set A.B=VALUE`` in ``layer``.

    If VALUE is a section or a list of sections, each value inside is recorded as set by this
    override. In a list of sections a component's name stands for its number, as in
    ``parallel.ep_moe.exchange``. A mistake adds a refusal to ``layer``.
    """
    path, equals, text = override.partition("=")
    path = path.strip()
    try:
        if not equals:
            raise ValueError("expected A.B=VALUE")
        for given, value in _leaves(path, literal(text.strip())):
            named = _NAMED_OPTION.fullmatch(given)
            leaf = _item_path(layer, named, f"--set {path}") if named else given
            before = _origin(layer, leaf)
            if before and value_at(layer.data, leaf) != value:
                layer.refusals.append(_contradiction(leaf, before, f"--set {path}"))
                continue
            set_path(layer.data, leaf, value)
            layer.origins[leaf] = f"--set {path}"
    except ValueError as error:
        layer.refusals.append(
            Refusal("config", f"--set {path}", str(error), "--set section.key=value")
        )


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of each single value at ``path`` or in the sections below."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}", item)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for number, item in enumerate(value):
            yield from _leaves(f"{path}.{number}", item)
    else:
        yield path, value


def _origin(layer: Layer, path: str) -> str:
    """Return the flag or file that set ``path``, a value below ``path`` or a section around it.

    The result is "" if none of these is set.
    """
    for written, origin in layer.origins.items():
        if f"{written}.".startswith(f"{path}.") or path.startswith(f"{written}."):
            return origin
    return ""


def _contradiction(path: str, before: str, now: str) -> Refusal:
    """Return the refusal of a field that was given two values.

    Args:
        path: dotted path of the field.
        before: flag or file that set the first value.
        now: flag or override that gives the other value.
    """
    reason = (
        f"{before} and {now} contradict each other"
        if before != now
        else f"{now} is given twice, differently"
    )
    return Refusal("config", path, reason, "write one of them")
