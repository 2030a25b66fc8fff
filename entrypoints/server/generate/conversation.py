"""Conversion of a request's messages, tools and template keywords to a turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from glowplug.core.errors import RequestError
from glowplug.core.text.tokenizer import TEMPLATE_ARGUMENTS
from glowplug.entrypoints.front.chat.turn import Turn
from glowplug.entrypoints.server.generate.tools import check_results, choice_of, tools_of
from glowplug.entrypoints.server.protocol.chat import ChatRequest, Message


def turn_of(request: ChatRequest) -> Turn:
    """Return the turn of a chat request.

    The messages are empty if the request gives ``input_ids``.

    Raises:
        RequestError: a field is invalid, or contradicts another one.
    """
    messages = request.messages or []
    if request.messages is None and request.input_ids is None:
        raise RequestError("messages is required", param="messages")
    if request.continue_final_message and request.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    if request.continue_final_message and (not messages or messages[-1].role != "assistant"):
        raise RequestError(
            "continue_final_message needs a last message of role assistant",
            param="continue_final_message",
        )
    tools = tools_of(request.tools)
    return Turn(
        plain_messages(messages),
        tools,
        choice_of(request, tools),
        template_arguments(request),
        request.add_generation_prompt is not False and not request.continue_final_message,
        request.continue_final_message,
        request.separate_reasoning,
    )


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Convert a request's messages to the dicts that chat templates take.

    Raises:
        RequestError: a message has content other than text, or a tool's result has no call.
    """
    check_results(messages)
    return [_plain(message, i) for i, message in enumerate(messages)]


def _plain(message: Message, index: int) -> dict[str, Any]:
    """Convert a request's message to the dict that chat templates take.

    Its content is text, unknown keys are dropped, and the role "developer" becomes "system".
    ``index`` is the message's place in the request, for errors.
    """
    where = f"messages.{index}.content"
    plain: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(message, where),
    }
    reasoning = (
        message.reasoning_content if message.reasoning_content is not None else message.reasoning
    )
    if reasoning is not None:
        plain["reasoning_content"] = reasoning
    for name in ("name", "tool_call_id"):
        value = getattr(message, name)
        if value is not None:
            plain[name] = value
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
        ]
    return plain


def _text(message: Message, where: str) -> str | None:
    """Return a message's content as one text; None for an assistant's message with tool calls only.

    ``where``: path of the content in the request, for errors.
    """
    content = message.content
    if content is None:
        if message.role == "assistant" and (
            message.tool_calls or message.reasoning_content or message.reasoning
        ):
            return None if message.tool_calls else ""
        raise RequestError(f"a message of role {message.role} needs content", param=where)
    if isinstance(content, str):
        return content
    for part in content:
        if part.type != "text":
            raise RequestError(
                f"content of type {part.type[:64]!r} is refused: this model takes text only",
                param=where,
            )
        if part.text is None:
            raise RequestError("a content part of type text needs text", param=where)
    return "".join(part.text or "" for part in content)


def template_arguments(request: ChatRequest) -> dict[str, Any]:
    """Return the keywords that a request sets for the chat template.

    The keywords are those of ``chat_template_kwargs``, and ``reasoning_effort``. The latter also
    sets ``thinking`` and ``enable_thinking``, of which templates use one or the other.

    Raises:
        RequestError: a keyword is not in the allow-list, or its value has a wrong type.
    """
    arguments = dict(request.chat_template_kwargs or {})
    for name, value in arguments.items():
        if name not in TEMPLATE_ARGUMENTS:
            raise RequestError(
                f"chat_template_kwargs: {name[:64]!r} is not allowed; allowed: "
                + ", ".join(sorted(TEMPLATE_ARGUMENTS)),
                param="chat_template_kwargs",
            )
        if not isinstance(value, bool) and not (isinstance(value, str) and len(value) <= 64):
            raise RequestError(
                f"chat_template_kwargs: {name} must be a boolean or a short string",
                param="chat_template_kwargs",
            )
    if request.reasoning_effort is not None:
        arguments.setdefault("reasoning_effort", request.reasoning_effort)
        arguments.setdefault("thinking", request.reasoning_effort != "none")
    given = [arguments[name] for name in ("thinking", "enable_thinking") if name in arguments]
    if given:
        arguments["thinking"] = bool(given[0])
        arguments["enable_thinking"] = bool(given[0])
    return arguments
