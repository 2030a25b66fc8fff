"""Conversion of a request for a message to a turn."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import orjson

from glowplug.core.errors import RequestError
from glowplug.core.step.tools import Tool, ToolChoice
from glowplug.entrypoints.front.chat.tools import check_choice, check_parameters
from glowplug.entrypoints.front.chat.turn import Turn
from glowplug.entrypoints.server.generate.conversation import plain_messages, template_arguments
from glowplug.entrypoints.server.generate.params import unsupported
from glowplug.entrypoints.server.protocol.chat import ChatRequest, Message
from glowplug.entrypoints.server.protocol.messages import (
    ContentBlock,
    ContentBlocks,
    CountRequest,
    InputMessage,
)
from glowplug.entrypoints.server.protocol.tools import CalledFunction, MessageCall

_PLACE = re.compile(r"messages\.(\d+)(?:\.(?:tool_calls|tool_call_id|content)[\w.]*)?")
_MODES = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


def turn_of(body: CountRequest, *, complete: bool = True) -> Turn:
    """Return the turn of a request.

    Args:
        body: the request.
        complete: the turn is to be answered, so that each tool_use needs its tool_result.

    Raises:
        RequestError: a field or a block is invalid, or has no support.
    """
    messages: list[Message] = []
    places: list[str] = []
    system = _system(body)
    if system:
        messages.append(Message(role="system", content=system))
        places.append("system")
    for number, given in enumerate(body.messages):
        place = f"messages.{number}"
        made = _messages(given, place)
        messages += made
        places += [place] * len(made)
    last = messages[-1] if messages else None
    if complete and last is not None and last.tool_calls:
        raise RequestError(f"{places[-1]}: each tool_use needs a tool_result", param=places[-1])
    tools = _tools(body)
    prefilled = last is not None and last.role == "assistant" and not last.tool_calls
    return Turn(
        _plain(messages, places),
        tools,
        _choice(body, tools),
        _template(body),
        add_generation_prompt=not prefilled,
        continue_final_message=prefilled,
    )


def _plain(messages: Sequence[Message], places: Sequence[str]) -> list[dict[str, Any]]:
    """Return the messages as chat templates take them. ``places``: their paths in the request."""
    try:
        return plain_messages(messages)
    except RequestError as error:
        found = _PLACE.match(error.param or "")
        place = places[int(found[1])] if found else "messages"
        raise RequestError(_PLACE.sub(place, str(error)), param=place, code=error.code) from None


def _system(body: CountRequest) -> str:
    """Return the system prompt."""
    if body.system is None or isinstance(body.system, str):
        return body.system or ""
    return "\n\n".join(_text(block, f"system.{number}") for number, block in enumerate(body.system))


def _messages(given: InputMessage, place: str) -> list[Message]:
    """Return the messages of one message of the request: results of tools come first."""
    if isinstance(given.content, str):
        return [Message(role=given.role, content=given.content)]
    if given.role == "assistant":
        return [_assistant(given.content, place)]
    results = []
    texts = []
    for number, block in enumerate(given.content):
        where = f"{place}.content.{number}"
        if block.type == "tool_result" and given.role == "user":
            results.append(_result(block, where))
        else:
            texts.append(_text(block, where))
    if texts or not results:
        results.append(Message(role=given.role, content="\n".join(texts)))
    return results


def _assistant(blocks: ContentBlocks, place: str) -> Message:
    """Return a message of the assistant."""
    texts = []
    thoughts = []
    calls = []
    for number, block in enumerate(blocks):
        where = f"{place}.content.{number}"
        if block.type == "thinking":
            thoughts.append(_required(block, "thinking", where))
        elif block.type == "tool_use":
            arguments = orjson.dumps(_required(block, "input", where)).decode()
            function = CalledFunction(name=_required(block, "name", where), arguments=arguments)
            calls.append(MessageCall(id=_required(block, "id", where), function=function))
        else:
            texts.append(_text(block, where))
    return Message(
        role="assistant",
        content="".join(texts),
        reasoning_content="".join(thoughts) or None,
        tool_calls=calls or None,
    )


def _result(block: ContentBlock, place: str) -> Message:
    """Return the message with a tool's result. That of a failed call begins with "Error: "."""
    content = block.content or ""
    if not isinstance(content, str):
        parts = [ContentBlock.model_validate(part) for part in content]
        content = "\n".join(
            _text(part, f"{place}.content.{number}") for number, part in enumerate(parts)
        )
    text = f"Error: {content}" if block.is_error else content
    return Message(role="tool", content=text, tool_call_id=_required(block, "tool_use_id", place))


def _text(block: ContentBlock, place: str) -> str:
    """Return the text of a block. ``place``: its path in the request.

    Raises:
        RequestError: the block is no text.
    """
    if block.type != "text":
        known = block.type in ("tool_use", "tool_result", "thinking")
        reason = "does not belong here" if known else "is refused: this model takes text only"
        raise unsupported(f"{place}.type", f"{block.type!r} {reason}")
    text: str = _required(block, "text", place)
    return text


def _required(block: ContentBlock, name: str, place: str) -> Any:
    value = getattr(block, name)
    if value is None:
        raise RequestError(f"{place}.{name} is required", param=f"{place}.{name}")
    return value


def _tools(body: CountRequest) -> tuple[Tool, ...]:
    """Return the tools of a request."""
    tools: dict[str, Tool] = {}
    for number, given in enumerate(body.tools or ()):
        place = f"tools.{number}"
        if given.type not in (None, "custom"):
            raise unsupported(
                f"{place}.type",
                f"{given.type!r} is refused: this server has no tools of its own; describe the "
                "tool with input_schema",
            )
        if given.input_schema is None:
            raise RequestError(f"{place}.input_schema is required", param=f"{place}.input_schema")
        for name in ("defer_loading", "input_examples"):
            if getattr(given, name):
                raise unsupported(f"{place}.{name}", "is not supported")
        if given.allowed_callers not in (None, ["direct"]):
            raise unsupported(f"{place}.allowed_callers", 'must be ["direct"]')
        if given.name in tools:
            raise RequestError(
                f"{place}.name: {given.name!r} is the name of an earlier tool",
                param=f"{place}.name",
            )
        check_parameters(given.input_schema, f"{place}.input_schema")
        tools[given.name] = Tool(
            given.name, given.description or "", given.input_schema, bool(given.strict)
        )
    return tuple(tools.values())


def _choice(body: CountRequest, tools: Sequence[Tool]) -> ToolChoice:
    """Return a request's choice among its tools."""
    given = body.tool_choice
    if given is None:
        return ToolChoice()
    if (given.type == "tool") != (given.name is not None):
        raise RequestError(
            "tool_choice.name belongs to the type tool, which needs it", param="tool_choice.name"
        )
    choice = ToolChoice(
        _MODES[given.type],  # type: ignore[arg-type]
        given.name or "",
        not given.disable_parallel_tool_use,
    )
    check_choice(choice, tools)
    return choice


def _template(body: CountRequest) -> dict[str, Any]:
    """Return the keywords that a request sets for the chat template."""
    given = dict(body.chat_template_kwargs or {})
    if body.thinking is not None:
        given.setdefault("thinking", body.thinking.type != "disabled")
    if body.output_config is not None and body.output_config.effort is not None:
        given.setdefault("reasoning_effort", body.output_config.effort)
    return template_arguments(ChatRequest.model_construct(chat_template_kwargs=given))
