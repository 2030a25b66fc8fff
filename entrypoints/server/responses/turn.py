"""Conversion of a response's request, and of the responses before it, to a turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from glowplug.core.errors import RequestError
from glowplug.core.step.tools import Tool, ToolChoice
from glowplug.entrypoints.front.chat.tools import check_choice, check_parameters
from glowplug.entrypoints.front.chat.turn import Turn
from glowplug.entrypoints.server.generate.conversation import template_arguments
from glowplug.entrypoints.server.generate.params import unsupported
from glowplug.entrypoints.server.protocol.chat import ChatRequest
from glowplug.entrypoints.server.protocol.response_request import (
    InputItem,
    NamedTool,
    ResponseRequest,
)
from glowplug.entrypoints.server.responses.items import Conversation
from glowplug.entrypoints.server.responses.objects import new_id
from glowplug.entrypoints.server.responses.store import StoredResponse


def turn_of(body: ResponseRequest, earlier: Sequence[StoredResponse]) -> Turn:
    """Return the turn of a request.

    Args:
        body: the request.
        earlier: the responses that it continues, oldest first.

    Raises:
        RequestError: a field or an item is invalid, or has no support.
    """
    conversation = Conversation()
    if body.instructions:
        conversation.system(body.instructions, "instructions")
    for response in earlier:
        for item in history(response):
            conversation.add(item, "previous_response_id")
    for number, item in enumerate(input_items(body)):
        place = "input" if isinstance(body.input, str) else f"input.{number}"
        conversation.add(item, place)
    tools = _tools(body)
    choice = _choice(body, tools)
    if isinstance(body.tool_choice, NamedTool) and body.tool_choice.type == "allowed_tools":
        tools = _allowed(body.tool_choice, tools)
    return Turn(conversation.messages(), tools, choice, _template(body))


def input_items(body: ResponseRequest) -> list[InputItem]:
    """Return the items of a request's input.

    Raises:
        RequestError: there is no input.
    """
    if body.input is None:
        raise RequestError("input is required", param="input")
    if isinstance(body.input, str):
        return [InputItem(type="message", role="user", content=body.input)]
    return body.input


def stored_items(items: Sequence[InputItem]) -> bytes:
    """Return the items of an input as they are stored: as JSON, each with an id and a type."""
    return orjson.dumps([_stored(item) for item in items])


def _stored(item: InputItem) -> dict[str, Any]:
    found = item.model_dump(exclude_none=True)
    found.setdefault("type", "message")
    prefixes = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}
    found.setdefault("id", new_id(prefixes.get(found["type"], "fco_")))
    if isinstance(item.content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        found["content"] = [{"type": kind, "text": item.content}]
    return found


def history(response: StoredResponse) -> list[InputItem]:
    """Return the items of a stored response: its input, then its output.

    Raises:
        RequestError: the response is in progress.
    """
    if response.rid:
        raise RequestError(
            f"the response {response.id[:64]!r} is in progress", param="previous_response_id"
        )
    stored = [*orjson.loads(response.items), *orjson.loads(response.body)["output"]]
    return [InputItem.model_validate(item) for item in stored]


def _tools(body: ResponseRequest) -> tuple[Tool, ...]:
    """Return the tools of a request."""
    tools: dict[str, Tool] = {}
    for number, given in enumerate(body.tools or ()):
        place = f"tools.{number}"
        if given.type != "function":
            raise unsupported(
                f"{place}.type",
                f"{given.type!r} is refused: this server runs no tools itself; it offers the "
                "model tools of type function, which the client runs",
            )
        if given.name is None:
            raise RequestError(f"{place}.name is required", param=f"{place}.name")
        if given.name in tools:
            raise RequestError(
                f"{place}.name: {given.name!r} is the name of an earlier tool",
                param=f"{place}.name",
            )
        if given.parameters is not None:
            check_parameters(given.parameters, f"{place}.parameters")
        tools[given.name] = Tool(
            given.name, given.description or "", given.parameters, bool(given.strict)
        )
    return tuple(tools.values())


def _choice(body: ResponseRequest, tools: Sequence[Tool]) -> ToolChoice:
    """Return a request's choice among its tools."""
    given = body.tool_choice
    parallel = body.parallel_tool_calls is not False
    if given is None or isinstance(given, str):
        choice = ToolChoice(given or "auto", parallel=parallel)
    elif given.type == "function" and given.name is not None:
        choice = ToolChoice("required", given.name, parallel)
    elif given.type == "allowed_tools":
        choice = ToolChoice(given.mode or "auto", parallel=parallel)
    else:
        raise unsupported(
            "tool_choice", "must be a word, a function with its name, or allowed_tools"
        )
    check_choice(choice, tools)
    return choice


def _allowed(choice: NamedTool, tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """Return the tools that a choice of type "allowed_tools" leaves."""
    names = [_allowed_name(given) for given in choice.tools or ()]
    known = {tool.name for tool in tools}
    for name in names:
        if name not in known:
            raise RequestError(
                f"tool_choice.tools: {str(name)[:128]!r} is not the name of one of the tools",
                param="tool_choice.tools",
            )
    if not names:
        raise RequestError("tool_choice.tools is empty", param="tool_choice.tools")
    return tuple(tool for tool in tools if tool.name in names)


def _allowed_name(given: Mapping[str, Any]) -> Any:
    name = given.get("name")
    return name if given.get("type") == "function" and isinstance(name, str) else None


def _template(body: ResponseRequest) -> dict[str, Any]:
    """Return the keywords that a request sets for the chat template."""
    effort = body.reasoning.effort if body.reasoning is not None else None
    fields = ChatRequest.model_construct(
        reasoning_effort=effort, chat_template_kwargs=body.chat_template_kwargs
    )
    return template_arguments(fields)
