"""Conversion and checks of a request's tools, its choice among them, and the results of calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from glowplug.core.errors import RequestError
from glowplug.core.step.tools import Tool, ToolChoice
from glowplug.entrypoints.server.protocol.chat import Message
from glowplug.entrypoints.server.protocol.tools import ToolFields, ToolSpec

MAX_SCHEMA_DEPTH = 64  #: levels of a schema of arguments
_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
#: keywords whose value is a schema
_SCHEMA = ("items", "additionalProperties", "not", "if", "then", "else", "contains")
#: keywords whose value is an object of schemas
_OBJECTS = ("properties", "patternProperties", "$defs", "definitions")
#: keywords whose value is a list of schemas
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")


def tools_of(given: Sequence[ToolSpec] | None) -> tuple[Tool, ...]:
    """Return the tools of a request.

    Raises:
        RequestError: two have the same name, or the schema of the arguments is malformed.
    """
    tools: dict[str, Tool] = {}
    for number, spec in enumerate(given or ()):
        function = spec.function
        where = f"tools.{number}.function"
        if function.name in tools:
            raise RequestError(
                f"{where}.name: {function.name!r} is the name of an earlier tool",
                param=f"{where}.name",
            )
        if function.parameters is not None:
            check_parameters(function.parameters, f"{where}.parameters")
        tools[function.name] = Tool(
            function.name, function.description or "", function.parameters, bool(function.strict)
        )
    return tuple(tools.values())


def choice_of(fields: ToolFields, tools: Sequence[Tool]) -> ToolChoice:
    """Return a request's choice among its tools.

    Raises:
        RequestError: it requires a call without tools, or of a function that is not among them.
    """
    given = fields.tool_choice
    parallel = fields.parallel_tool_calls is not False
    if given is None or isinstance(given, str):
        choice = ToolChoice(given or "auto", parallel=parallel)
    else:
        choice = ToolChoice("required", given.function.name, parallel)
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


def check_parameters(schema: Mapping[str, Any], where: str) -> None:
    """Check the form of a JSON schema of arguments. ``where``: its path in the request.

    The keywords' values must have the right type; the grammar library checks the rest of the
    schemas that it compiles.

    Raises:
        RequestError: the schema is malformed, nested too deeply, or does not describe an object.
    """
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
    given = schema.get("type", [])
    kinds = given if isinstance(given, list) else [given]
    if not all(isinstance(kind, str) and kind in _TYPES for kind in kinds):
        raise _malformed(f"{where}.type", "unknown type")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _malformed(f"{where}.required", "expected a list of names")
    if not isinstance(schema.get("enum", []), list):
        raise _malformed(f"{where}.enum", "expected a list")
    for keyword in _SCHEMA:
        if keyword in schema and not (keyword == "items" and isinstance(schema[keyword], list)):
            yield schema[keyword], f"{where}.{keyword}"
    for keyword in _OBJECTS:
        inner = schema.get(keyword, {})
        if not isinstance(inner, dict):
            raise _malformed(f"{where}.{keyword}", "expected an object of schemas")
        yield from ((one, f"{where}.{keyword}.{name}") for name, one in inner.items())
    for keyword in _LISTS:
        inner = schema.get(keyword, [])
        if not isinstance(inner, list):
            raise _malformed(f"{where}.{keyword}", "expected a list of schemas")
        yield from ((one, f"{where}.{keyword}.{i}") for i, one in enumerate(inner))


def _malformed(where: str, reason: str) -> RequestError:
    return RequestError(f"{where[:256]}: {reason}", param=where[:256])


def check_results(messages: Sequence[Message]) -> None:
    """Check that the calls of each message of the assistant are followed by their results.

    Raises:
        RequestError: a result has no call, or a call has no result.
    """
    open_calls: dict[str, None] = {}
    caller = 0
    for number, message in enumerate(messages):
        if message.role == "tool":
            _take_result(message, f"messages.{number}", open_calls)
            continue
        if open_calls:
            raise _unanswered(open_calls, caller)
        if message.role == "assistant" and message.tool_calls:
            open_calls = _ids(message, f"messages.{number}.tool_calls")
            caller = number
    # the last message may have calls without results, for templates and for counting tokens
    if open_calls and messages[-1].role == "tool":
        raise _unanswered(open_calls, caller)


def _ids(message: Message, where: str) -> dict[str, None]:
    """Return the ids of a message's calls, in order.

    Raises:
        RequestError: two calls have the same id.
    """
    ids: dict[str, None] = {}
    for number, call in enumerate(message.tool_calls or ()):
        if call.id in ids:
            path = f"{where}.{number}.id"
            raise RequestError(f"{path}: {call.id!r} is the id of an earlier call", param=path)
        ids[call.id] = None
    return ids


def _take_result(message: Message, where: str, open_calls: dict[str, None]) -> None:
    """Remove the call of a tool's result from ``open_calls``."""
    if message.tool_call_id is None:
        path = f"{where}.tool_call_id"
        raise RequestError(f"{path}: a message of role tool needs it", param=path)
    if message.tool_call_id not in open_calls:
        raise RequestError(
            f"{where}.tool_call_id: a message of role tool must answer one of the tool_calls of "
            f"the assistant's message before it, and {message.tool_call_id[:64]!r} is none of them",
            param=f"{where}.tool_call_id",
        )
    del open_calls[message.tool_call_id]


def _unanswered(open_calls: Iterable[str], caller: int) -> RequestError:
    names = ", ".join(one[:64] for one in list(open_calls)[:8])
    return RequestError(
        f"messages.{caller}.tool_calls: each call needs a message of role tool with its "
        f"tool_call_id behind it; missing: {names}",
        param=f"messages.{caller}.tool_calls",
    )
