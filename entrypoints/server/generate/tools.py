"""Conversion and checks of a request's tools, its choice among them, and the results of calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from glowplug.core.errors import RequestError
from glowplug.core.step.tools import Tool, ToolChoice
from glowplug.entrypoints.front.chat.tools import check_choice, check_parameters
from glowplug.entrypoints.server.protocol.chat import Message
from glowplug.entrypoints.server.protocol.tools import ToolFields, ToolSpec


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
