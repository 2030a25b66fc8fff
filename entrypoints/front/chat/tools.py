"""Checks of a request's tools, and the tools of the offline engine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, cast

from glowplug.core.errors import RequestError
from glowplug.core.step.tools import Tool, ToolChoice

NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")  #: pattern of a function's name
MAX_SCHEMA_DEPTH = 24  #: levels of a schema of arguments
_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
#: keywords whose value is a schema
_SCHEMA = ("items", "additionalProperties", "not", "if", "then", "else", "contains")
#: keywords whose value is an object of schemas
_OBJECTS = ("properties", "patternProperties", "$defs", "definitions")
#: keywords whose value is a list of schemas
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")


def tools_from(given: Sequence[Mapping[str, Any]] | None) -> tuple[Tool, ...]:
    """Return tools that are given as in OpenAI's chat API.

    Raises:
        RequestError: a tool is malformed, or two have the same name.
    """
    tools: dict[str, Tool] = {}
    for number, one in enumerate(given or ()):
        where = f"tools.{number}.function"
        function = one.get("function") if isinstance(one, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if function is None or not isinstance(name, str) or not NAME.fullmatch(name):
            raise RequestError(
                f'{where}.name: a tool is {{"type": "function", "function": {{"name": ...}}}}',
                param=f"{where}.name",
            )
        if name in tools:
            raise RequestError(
                f"{where}.name: {name!r} is the name of an earlier tool", param=f"{where}.name"
            )
        parameters = function.get("parameters")
        if parameters is not None:
            check_parameters(parameters, f"{where}.parameters")
        tools[name] = Tool(
            name, function.get("description") or "", parameters, bool(function.get("strict"))
        )
    return tuple(tools.values())


def choice_from(
    given: str | Mapping[str, Any], tools: Sequence[Tool], parallel: bool
) -> ToolChoice:
    """Return the choice among tools, given as in OpenAI's chat API.

    Raises:
        RequestError: it is malformed, or the tools do not fulfil it.
    """
    if given in ("auto", "none", "required"):
        mode = cast(Literal["auto", "none", "required"], given)
        choice = ToolChoice(mode, parallel=parallel)
    else:
        function = given.get("function") if isinstance(given, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str):
            raise RequestError(
                "tool_choice must be auto, none, required or "
                '{"type": "function", "function": {"name": ...}}',
                param="tool_choice",
            )
        choice = ToolChoice("required", name, parallel)
    check_choice(choice, tools)
    return choice


def check_choice(choice: ToolChoice, tools: Sequence[Tool]) -> None:
    """Check that the tools fulfil the choice.

    Raises:
        RequestError: a call is required without tools, or of a function that is not among them.
    """
    if choice.mode == "required" and not tools:
        raise RequestError("tool_choice needs tools", param="tool_choice")
    if choice.name and choice.name not in {tool.name for tool in tools}:
        raise RequestError(
            f"tool_choice: {choice.name[:128]!r} is not the name of one of the tools",
            param="tool_choice",
        )


def check_parameters(schema: Any, where: str) -> None:
    """Check the form of a JSON schema of arguments. ``where``: its path in the request.

    The keywords' values must have the right type; the grammar library checks the rest of the
    schemas that it compiles.

    Raises:
        RequestError: the schema is malformed, nested too deeply, or does not describe an object.
    """
    if not isinstance(schema, Mapping):
        raise _malformed(where, "expected a JSON schema")
    if schema.get("type", "object") != "object":
        raise RequestError(f'{where}.type must be "object"', param=f"{where}.type")
    levels: list[tuple[Any, str]] = [(schema, where)]
    for _ in range(MAX_SCHEMA_DEPTH):
        levels = [below for one, path in levels for below in _subschemas(one, path)]
        if not levels:
            return
    raise RequestError(f"{where} is nested too deeply", param=where)


def _subschemas(schema: Any, where: str) -> Iterable[tuple[Any, str]]:
    """Yield the schemas within a schema, with their paths.

    Raises:
        RequestError: the value of a keyword has a wrong type.
    """
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise _malformed(where, "a schema must be an object or a boolean")
    _check_values(schema, where)
    for keyword in _SCHEMA:
        if keyword in schema and not (keyword == "items" and isinstance(schema[keyword], list)):
            yield schema[keyword], f"{where}.{keyword}"
    for keyword in _OBJECTS:
        named = schema.get(keyword, {})
        yield from ((one, f"{where}.{keyword}.{name}") for name, one in named.items())
    for keyword in _LISTS:
        several = schema.get(keyword, [])
        yield from ((one, f"{where}.{keyword}.{i}") for i, one in enumerate(several))


def _check_values(schema: Mapping[str, Any], where: str) -> None:
    """Check the types of the keywords' values, except those that are schemas.

    Raises:
        RequestError: the value of a keyword has a wrong type.
    """
    given = schema.get("type", [])
    kinds = given if isinstance(given, list) else [given]
    if not all(isinstance(kind, str) and kind in _TYPES for kind in kinds):
        raise _malformed(f"{where}.type", "unknown type")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _malformed(f"{where}.required", "expected a list of names")
    if not isinstance(schema.get("enum", []), list):
        raise _malformed(f"{where}.enum", "expected a list")
    for keyword in (*_OBJECTS, *_LISTS):
        kind, words = (dict, "an object") if keyword in _OBJECTS else (list, "a list")
        if not isinstance(schema.get(keyword, kind()), kind):
            raise _malformed(f"{where}.{keyword}", f"expected {words} of schemas")


def _malformed(where: str, reason: str) -> RequestError:
    return RequestError(f"{where[:256]}: {reason}", param=where[:256])
