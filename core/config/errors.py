"""Conversion of pydantic's validation errors to refusals. Plan zone: no torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel

from glowplug.core.errors import Refusal
from glowplug.core.plugin.slots import SLOTS, Slot

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from glowplug.core.plugin.registry import PluginSet

_BY_SECTION = {slot.section: slot for slot in SLOTS if slot.section}


def key_path(problem: ErrorDetails) -> tuple[str | int, ...]:
    """Return the configuration path of a validation error: its location without union tags."""
    loc = problem["loc"]
    slot = _BY_SECTION.get(str(loc[0])) if loc else None
    if slot is None:
        return loc
    at = 2 if slot.many else 1
    if len(loc) <= at or problem["type"].startswith("union_tag"):
        return loc
    # NOTE: locations in a union of one member have no tag, so only a text with a key after it is
    # taken for a tag.
    tagged = isinstance(loc[at], str) and len(loc) > at + 1
    return (*loc[:at], *loc[at + 1 :]) if tagged else loc


def dotted(path: Iterable[str | int]) -> str:
    return ".".join(str(part) for part in path)


def place(path: str, origins: Mapping[str, str]) -> str:
    """Return the origin of the value at ``path``, such as "engine.toml:12".

    If there is none, the origin of a key below ``path`` or of its nearest parent is returned, or
    "" if these have none either.
    """
    if path not in origins:
        below = f"{path}."
        for key, where in origins.items():
            if key.startswith(below):
                return where
    while path:
        if path in origins:
            return origins[path]
        path = path.rpartition(".")[0]
    return ""


class Explained(NamedTuple):
    """A refusal made from one of pydantic's validation errors.

    Attributes:
        refusal: the refusal.
        path: the path to remove so that the rest can be checked.
        slot: slot of an unknown ``use``, else "".
        name: name of an unknown ``use``, else "".
    """

    refusal: Refusal
    path: tuple[str | int, ...]
    slot: str = ""
    name: str = ""


def explain(
    problem: ErrorDetails,
    data: Mapping[str, Any],
    plugins: PluginSet,
    model: type[BaseModel],
    origins: Mapping[str, str],
) -> Explained:
    """Return the refusal for one of pydantic's validation errors."""
    path = key_path(problem)
    where = place(dotted(path), origins)
    slot = _BY_SECTION.get(str(path[0])) if path else None
    kind = problem["type"]
    unknown = _unknown_component(problem, path)
    if slot is not None and unknown is not None:
        section, name = unknown
        where = place(dotted((*section, "use")), origins)
        return Explained(
            _unknown_use(slot, section, name, plugins, where), section, slot.name, name
        )
    if kind == "extra_forbidden":
        return Explained(_unknown_key(path, slot, data, plugins, model, where), path)
    if path == ("model",) and kind == "missing":
        fix = 'model = "embedded" (--model embedded), or a folder'
        return Explained(_refusal(path, "no model is given", fix, where), path)
    return Explained(_refused_value(path, problem, slot, plugins, where), path)


def _refused_value(
    path: tuple[str | int, ...],
    problem: ErrorDetails,
    slot: Slot | None,
    plugins: PluginSet,
    where: str,
) -> Refusal:
    """Return the refusal of a value.

    A validator states the fix itself if it raises ``PydanticCustomError`` with the item "fix" in
    the context.
    """
    fix = problem.get("ctx", {}).get("fix")
    if fix is not None:
        return _refusal(path, problem["msg"], str(fix), where)
    return _wrong_value(path, problem, slot, plugins, where)


def _unknown_component(
    problem: ErrorDetails, path: tuple[str | int, ...]
) -> tuple[tuple[str | int, ...], str] | None:
    """Return the section's path and ``use`` if the error is an unknown ``use``, else None."""
    if problem["type"] == "union_tag_invalid":
        return path, str(problem.get("ctx", {}).get("tag", ""))
    if problem["type"] == "literal_error" and path and path[-1] == "use":  # a union of one member
        return path[:-1], str(problem["input"])
    return None


def without_use(
    slot: Slot, path: tuple[str | int, ...], plugins: PluginSet, origins: Mapping[str, str]
) -> Refusal:
    """Return the refusal of a list item without ``use``."""
    fix = f"write use = one of {_names(slot, plugins)}"
    return _refusal(path, "has no 'use'", fix, place(dotted(path), origins))


def unwritable(path: tuple[str | int, ...], value: object, origins: Mapping[str, str]) -> Refusal:
    """Return the refusal of a value that is not text, a number, a bool, a list or a section."""
    shown = repr(value) if len(repr(value)) <= 40 else type(value).__name__
    return _refusal(
        path or ("configuration",),
        f"{shown} cannot be written in a configuration",
        "text, a number of at most 64 bits, true or false, a list, or a section",
        place(dotted(path), origins),
    )


def _refusal(path: Iterable[str | int], reason: str, fix: str, where: str) -> Refusal:
    return Refusal(
        by="config", field=dotted(path), reason=f"{where}: {reason}" if where else reason, fix=fix
    )


def _names(slot: Slot, plugins: PluginSet) -> str:
    names = [found.component.name for found in plugins.components(slot.name)]
    return ", ".join(names) or "nothing: no plugin registers one"


def _unknown_use(
    slot: Slot, path: tuple[str | int, ...], name: str, plugins: PluginSet, where: str
) -> Refusal:
    names = [found.component.name for found in plugins.components(slot.name)]
    close = difflib.get_close_matches(name.lower(), names, 1, 0.6) or [
        n for n in names if name and name.lower() in n
    ]
    field = (*path, "use")
    reason = f"no component named {name!r} is registered (registered: {_names(slot, plugins)})"
    if close:
        fix = f"did you mean {close[0]!r}?"
    elif slot.many:
        fix = (
            f"leave it out, or install a plugin that registers {name!r} "
            "(glowplug plugins lists the registered ones)"
        )
    else:
        default = slot.default if slot.default in names else "auto"
        fix = (
            f'{slot.section}.use = "{default}", or install a plugin that registers {name!r} '
            "(see glowplug plugins)"
        )
    return _refusal(field, reason, fix, where)


def _unknown_key(
    path: tuple[str | int, ...],
    slot: Slot | None,
    data: Mapping[str, Any],
    plugins: PluginSet,
    model: type[BaseModel],
    where: str,
) -> Refusal:
    key = str(path[-1])
    if slot is not None:
        holder = _section(data, path[:-1])
        return _refusal(path, "unknown key", _option_hint(path, slot, holder, plugins), where)
    fields = _fields(model, path[:-1])
    close = difflib.get_close_matches(key, fields, 1, 0.6)
    if close:
        return _refusal(path, "unknown key", f"did you mean {close[0]!r}?", where)
    homes = [home for home in leaf_paths(plugins, model) if home.rpartition(".")[2] == key]
    close = homes or difflib.get_close_matches(key, leaf_paths(plugins, model), 1, 0.8)
    fix = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(fields)}"
    return _refusal(path, "unknown key", fix, where)


def _section(data: Mapping[str, Any], path: Iterable[str | int]) -> Mapping[str, Any]:
    holder: Any = data
    for part in path:
        holder = holder[part]
    return holder if isinstance(holder, Mapping) else {}


def _option_hint(
    path: tuple[str | int, ...], slot: Slot, holder: Mapping[str, Any], plugins: PluginSet
) -> str:
    """Return the fix for an unknown option of a component.

    Args:
        holder: the section with the option.
    """
    key = str(path[-1])
    use = str(holder.get("use", slot.default))
    owners = {
        found.component.name: list(found.component.options.model_fields)
        for found in plugins.components(slot.name)
    }
    having = [name for name, fields in owners.items() if key in fields and name != use]
    if having:
        return _option_of_others(dotted(path[:-1]), having, "use" in holder)
    fields = owners.get(use) or sorted({name for fields in owners.values() for name in fields})
    close = difflib.get_close_matches(key, fields, 1, 0.6)
    return f"did you mean {close[0]!r}?" if close else _known_options(use, fields)


def _option_of_others(section: str, having: Sequence[str], chosen: bool) -> str:
    """Return the fix for an option of other components than the section's.

    Args:
        section: dotted path of the section.
        having: names of the components with the option.
        chosen: the section names a component.
    """
    fix = f'it is an option of {", ".join(having)}: write {section}.use = "{having[0]}"'
    return f"{fix}, or leave it out" if chosen else fix


def _known_options(use: str, fields: Iterable[str]) -> str:
    """Return the fix for an option that no component has: a list of the known options."""
    known = ", ".join(name for name in fields if name != "use")
    if use == "auto":
        return (
            "auto has no such option: write use = the component that has it "
            f"(options here: {known})"
        )
    if not known:
        return f"leave it out: {use} has no options"
    return f"leave it out; options of {use}: {known}"


def _fields(model: type[BaseModel], path: Iterable[str | int]) -> list[str]:
    """Return the keys of the section at ``path``; the section is not one of a slot."""
    current: Any = model
    for part in path:
        info = getattr(current, "model_fields", {}).get(str(part))
        current = info.annotation if info is not None else None
    return list(getattr(current, "model_fields", {}))


def leaf_paths(plugins: PluginSet, model: type[BaseModel]) -> list[str]:
    """Return the dotted path of every key of the configuration."""
    found = list(model.model_fields)
    for name, info in model.model_fields.items():
        if (
            name not in _BY_SECTION
            and isinstance(info.annotation, type)
            and issubclass(info.annotation, BaseModel)
        ):
            found += [f"{name}.{key}" for key in info.annotation.model_fields]
    for slot in SLOTS:
        for registration in plugins.components(slot.name) if slot.section else ():
            found += [
                f"{slot.section}.{key}" for key in registration.component.options.model_fields
            ]
    return list(dict.fromkeys(found))


def _wrong_value(
    path: tuple[str | int, ...],
    problem: ErrorDetails,
    slot: Slot | None,
    plugins: PluginSet,
    where: str,
) -> Refusal:
    """Return the refusal of a value of a wrong type or out of its bounds.

    ``where``: origin of the value, for the refusal.
    """
    value = problem["input"]
    message = problem["msg"].removeprefix("Value error, ")
    expected = _expected(problem)
    if expected:
        message = f"Input should be {expected}"
    message = message[:1].lower() + message[1:]
    reason = message.replace("input", f"the value {_shown(path, problem)}", 1)
    fix = _close_option(value, expected) or f"write {_kind(problem)} for {dotted(path)}"
    is_section = slot is not None and not slot.many and len(path) == 1
    if slot is not None and is_section and plugins.find(slot.name, str(value)):
        fix = f'write {slot.section}.use = "{value}"'
    return _refusal(path, reason, fix, where)


def _shown(path: tuple[str | int, ...], problem: ErrorDetails) -> str:
    """Convert a refused value to text; for an API key, state only that one is given."""
    text = repr(problem["input"])
    text = text if len(text) <= 80 else text[:77] + "..."
    if path and str(path[-1]) in ("api_key", "admin_api_key"):
        text = "given"
    return _in_files(text) if _expected(problem) else text


def _close_option(value: Any, expected: str) -> str:
    """Return the fix that names the accepted value closest to ``value``; "" if none is close.

    Args:
        expected: the accepted values, as ``_expected`` returns them.
    """
    options = [part.strip() for part in expected.replace(" or ", ", ").split(",")]
    names = {option.strip("'"): option for option in options}
    close = difflib.get_close_matches(str(value).lower(), names, 1, 0.5) if expected else []
    return f"did you mean {names[close[0]]}?" if close else ""


#: Python's constants as configuration files spell them
_SPELLED = {"True": "true", "False": "false", "None": "null"}


def _in_files(text: str) -> str:
    """Return ``text`` with Python's constants spelled as in TOML, YAML, JSON and ``--set``.

    Text in quotes is kept.
    """
    return re.sub(
        r"'[^']*'|\b(?:True|False|None)\b", lambda word: _SPELLED.get(word[0], word[0]), text
    )


def _expected(problem: ErrorDetails) -> str:
    """Return the accepted values as in a file; "" if the error does not list accepted values."""
    return _in_files(str(problem.get("ctx", {}).get("expected", "")))


_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "tuple": "a list",
    "model": "a section with keys",
    "dict": "a section with keys",
}


def _kind(problem: ErrorDetails) -> str:
    """Return the expected kind of value as text, such as "a list" or "a number" with its bound."""
    bounds = {
        "greater_than": ">",
        "greater_than_equal": ">=",
        "less_than": "<",
        "less_than_equal": "<=",
    }
    context = problem.get("ctx", {})
    if problem["type"] in bounds:
        bound = next((context[key] for key in ("gt", "ge", "lt", "le") if key in context), "")
        return f"a number {bounds[problem['type']]} {bound}"
    if problem["type"] == "literal_error":
        expected = _expected(problem)
        return f"one of {expected}" if " or " in expected else expected
    return _KINDS.get(problem["type"].partition("_")[0], "another value")
