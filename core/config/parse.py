"""Pass one: parsing of the operator's configuration, which collects every mistake. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import msgspec
from pydantic import ValidationError

from glowplug.core.config.errors import Explained, explain, unwritable, without_use
from glowplug.core.config.schema import (
    EngineConfig,
    auto_options,
    canonical,
    config_class,
    plain_copy,
)
from glowplug.core.errors import Refusal
from glowplug.core.plugin.slots import SLOTS

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from glowplug.core.plugin.registry import PluginSet


@dataclass
class Parsed:
    """A parsed configuration.

    Attributes:
        config: the frozen model, without the keys that were refused.
        raw: the operator's dict, as given.
        origins: origin of each value by dotted path: "engine.toml:12", "--tp 8" or a plugin's name.
        operator: the operator's values by dotted path, sections included.
        refusals: refusals of keys and values.
        unknown: slot -> a ``use`` that is not the name of a registered component; the section is
            then checked as if ``use`` were "auto".
    """

    config: EngineConfig
    raw: Mapping[str, Any]
    origins: Mapping[str, str]
    operator: Mapping[str, Any]
    refusals: list[Refusal] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)


Contributor = str | list[str]  #: a plugin or the caller; of a list, that of each item


def parse(
    raw: Mapping[str, Any],
    plugins: PluginSet,
    contributed: Mapping[str, tuple[Any, Contributor]],
    origins: Mapping[str, str],
) -> Parsed:
    """Parse a configuration (pass one); mistakes are collected in ``refusals`` and never raised.

    Args:
        raw: the operator's configuration, a nested dict.
        contributed: defaults that plugins and the caller set: dotted path -> (value, contributor).
        origins: origin of the operator's values by dotted path.
    """
    model = config_class(plugins)
    operator = by_path(raw)
    data, sources = contribute(raw, contributed, operator)
    _fill_in_use(data, plugins)
    origins = {**sources, **origins}
    refusals = _unwritable(data, origins) + _items_without_use(data, plugins, origins)
    unknown: dict[str, str] = {}
    # NOTE: each round removes at least one key; the bound stops a validator that refuses forever
    for _ in range(64):
        config = _validated(model, data)
        if isinstance(config, EngineConfig):
            return Parsed(config, raw, origins, operator, refusals, unknown)
        found = _outermost([explain(one, data, plugins, model, origins) for one in config])
        refusals += _new_refusals(found, refusals)
        unknown |= {one.slot: one.name for one in found if one.slot}
        _drop_refused(data, found)
    raise AssertionError(f"the configuration does not settle: {refusals}")


def _validated(
    model: type[EngineConfig], data: dict[str, Any]
) -> EngineConfig | list[ErrorDetails]:
    """Return the validated configuration, or pydantic's validation errors."""
    try:
        found = model.__pydantic_validator__.validate_json(msgspec.json.encode(data), strict=True)
    except ValidationError as error:
        return error.errors(include_url=False)
    return cast(EngineConfig, found)


def _new_refusals(found: Sequence[Explained], refusals: Sequence[Refusal]) -> list[Refusal]:
    """Return the refusals of ``found`` that are new and do not follow from ``refusals``.

    Example: some items of a list were refused and removed. That the list is now too short is no
    new refusal.
    """
    new: list[Refusal] = []
    for refusal in (one.refusal for one in found):
        before = [*refusals, *new]
        items = f"{refusal.field}."
        if refusal not in before and not any(one.field.startswith(items) for one in before):
            new.append(refusal)
    return new


def by_path(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return every value of a nested dict by dotted path, sections included.

    In the paths, items of a list of sections have their number as key.
    """
    found: dict[str, Any] = {}
    _flatten(value, "", found)
    return found


def _flatten(value: Any, prefix: str, found: dict[str, Any]) -> None:
    items: Any = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        path = f"{prefix}{key}"
        found[path] = item
        if isinstance(item, dict) or (
            isinstance(item, (list, tuple)) and any(isinstance(one, dict) for one in item)
        ):
            _flatten(item, f"{path}.", found)


def contribute(
    raw: Mapping[str, Any],
    contributed: Mapping[str, tuple[Any, Contributor]],
    operator: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, str]]:
    """Merge the operator's values with the defaults that plugins and the caller set.

    The operator's values take precedence. If the operator chose another ``use`` for a section,
    the default options of that section are dropped.

    Returns:
        The merged configuration, and the plugin or caller that set each default, by dotted path.
    """
    data: dict[str, Any] = plain_copy(raw)
    sources: dict[str, str] = {}
    for path, (value, by) in contributed.items():
        section, _, key = path.partition(".")
        if path in operator or (key and not isinstance(data.get(section, {}), dict)):
            continue
        if key and _replaces(raw.get(section), contributed.get(f"{section}.use")):
            continue
        if key:
            data.setdefault(section, {})[key] = value
        else:
            data[section] = plain_copy(value)
        sources |= _sources(path, by)
    return data, sources


def _sources(path: str, by: Contributor) -> dict[str, str]:
    """Return the contributor of a default, and those of its items, by dotted path."""
    if isinstance(by, str):
        return {path: by}
    items = {f"{path}.{i}.use": name for i, name in enumerate(by)}
    return {path: ", ".join(dict.fromkeys(by)), **items}


def _replaces(section: Any, contributed: tuple[Any, Contributor] | None) -> bool:
    """Return whether the operator chose another component than the section's default.

    Args:
        section: the section as the operator gave it; None if it was not given.
        contributed: (value, contributor) of the default ``use`` that a plugin or the caller sets
            for the section; None for none.
    """
    use = section.get("use") if isinstance(section, Mapping) else None
    return use is not None and contributed is not None and use != contributed[0]


def _fill_in_use(data: dict[str, Any], plugins: PluginSet) -> None:
    """Fill in the default ``use`` of sections and replace aliases by registered names, in place."""
    for slot in SLOTS:
        if not slot.section:
            continue
        if slot.many:
            value = data.get(slot.section)
            if isinstance(value, dict):
                data[slot.section] = value = [value]
            for item in value if isinstance(value, list) else ():
                if isinstance(item, dict) and isinstance(item.get("use"), str):
                    item["use"] = canonical(slot, item["use"], plugins)
            continue
        value = data.setdefault(slot.section, {})
        if isinstance(value, dict):
            if "use" not in value:
                data[slot.section] = {"use": slot.default, **value}
            elif isinstance(value["use"], str):
                value["use"] = canonical(slot, value["use"], plugins)


def _unwritable(data: dict[str, Any], origins: Mapping[str, str]) -> list[Refusal]:
    """Remove values that a configuration file cannot hold, and return their refusals.

    Examples are half a surrogate pair, a number beyond 64 bits, or an object.
    """
    try:
        msgspec.json.encode(data)
        return []
    except (UnicodeEncodeError, OverflowError, TypeError, ValueError, RecursionError):
        return _refuse_unwritable(data, (), data, origins)


def _refuse_unwritable(
    value: Any, path: tuple[str | int, ...], data: dict[str, Any], origins: Mapping[str, str]
) -> list[Refusal]:
    """Remove unwritable values at or below ``path`` from ``data``, and return their refusals."""
    if isinstance(value, dict) and all(isinstance(key, str) and key.isprintable() for key in value):
        return [
            r
            for key, item in list(value.items())
            for r in _refuse_unwritable(item, (*path, key), data, origins)
        ]
    if isinstance(value, list):
        return [
            r
            for i, item in enumerate(value)
            for r in _refuse_unwritable(item, (*path, i), data, origins)
        ]
    try:
        msgspec.json.encode(value)
        return []
    except (UnicodeEncodeError, OverflowError, TypeError, ValueError):
        _drop(data, path)
        return [unwritable(path, value, origins)]


def _items_without_use(
    data: dict[str, Any], plugins: PluginSet, origins: Mapping[str, str]
) -> list[Refusal]:
    """Remove items without ``use`` from lists of components, and return their refusals."""
    refusals = []
    for slot in SLOTS:
        found = data.get(slot.section) if slot.many else None
        items: list[Any] = found if isinstance(found, list) else []
        for number, item in enumerate(items):
            if isinstance(item, dict) and "use" not in item:
                refusals.append(without_use(slot, (slot.section, number), plugins, origins))
                items[number] = None
    _compact(data)
    return refusals


def _outermost(found: list[Explained]) -> list[Explained]:
    """Return ``found`` without refusals inside a section that is refused as a whole."""
    gone = {one.path for one in found if one.slot}
    return [
        one for one in found if one.slot or not any(one.path[: len(path)] == path for path in gone)
    ]


def _drop_refused(data: dict[str, Any], found: Sequence[Explained]) -> None:
    """Remove the refused keys of ``found`` from ``data``."""
    for one in found:
        _drop(data, one.path)
    _compact(data)


_SINGLE = frozenset(slot.section for slot in SLOTS if slot.section and not slot.many)
_LISTS = frozenset(slot.section for slot in SLOTS if slot.many)


def _drop(data: dict[str, Any], path: Sequence[str | int]) -> None:
    """Remove one refused key from ``data``, so that the rest can still be checked.

    If the key is an item of a list of sections, the item becomes None. If it is an item of a list
    of plain values, the whole list is removed.
    """
    if not path or path[0] == "model":
        data["model"] = "?"
        return
    holder: Any = data
    for depth, part in enumerate(path[:-1]):
        if isinstance(holder, dict) and part not in holder:
            return  # already removed as a whole, because of another of its items
        plain = isinstance(holder[part], list) and (depth or part not in _LISTS)
        if plain or not isinstance(holder[part], dict | list):
            holder.pop(part)
            return
        holder = holder[part]
    if isinstance(holder, list):
        holder[int(path[-1])] = None
    elif len(path) == 1 and path[0] in _SINGLE:
        holder[path[0]] = _as_auto(str(path[0]), holder[path[0]])
    else:
        holder.pop(path[-1], None)


def _as_auto(section: str, value: Any) -> dict[str, Any]:
    """Return a section of unknown ``use`` with ``use = "auto"`` and only the common options."""
    common = auto_options(next(slot for slot in SLOTS if slot.section == section)).model_fields
    kept = value if isinstance(value, dict) else {}
    return {**{key: item for key, item in kept.items() if key in common}, "use": "auto"}


def _compact(data: dict[str, Any]) -> None:
    """Remove None from the lists of ``data``."""
    for key, value in data.items():
        if isinstance(value, list):
            data[key] = [item for item in value if item is not None]
