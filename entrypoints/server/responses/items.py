"""Conversion of the items of a conversation to messages."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from typing import Any

from glowplug.core.errors import RequestError
from glowplug.entrypoints.server.generate.conversation import plain_messages
from glowplug.entrypoints.server.generate.params import unsupported
from glowplug.entrypoints.server.protocol.chat import Message
from glowplug.entrypoints.server.protocol.response_request import InputItem, InputPart
from glowplug.entrypoints.server.protocol.tools import CalledFunction, MessageCall

TEXT_PARTS = frozenset({"input_text", "output_text", "text"})
_PLACE = re.compile(r"messages\.(\d+)(?:\.(?:tool_calls|tool_call_id|content)[\w.]*)?")


class Conversation:
    """The builder of messages from items.

    Reasoning, a message of the assistant and calls that follow one another are one message.

    Args:
        prefix: path of the items in the request, for errors.
    """

    def __init__(self, prefix: str = "input") -> None:
        self._prefix = prefix
        self._messages: list[Message] = []
        self._places: list[str] = []

    def system(self, text: str, place: str) -> None:
        """Add a system message. ``place``: its path in the request."""
        self._add(Message(role="system", content=text), place)

    def add(self, item: InputItem, place: str) -> None:
        """Add an item. ``place``: its path in the request.

        Raises:
            RequestError: the item has no support, or lacks a field.
        """
        kind = item.type or "message"
        if kind == "message":
            self._message(item, place)
        elif kind == "function_call":
            self._call(item, place)
        elif kind == "function_call_output":
            self._output(item, place)
        elif kind == "reasoning":
            self._reasoning(item, place)
        elif kind == "item_reference":
            raise unsupported(
                place, "refers to an item: send the item itself, or use previous_response_id"
            )
        else:
            raise unsupported(f"{place}.type", f"{kind!r} is not supported")

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages as chat templates take them.

        Raises:
            RequestError: a call has no output, or an output no call.
        """
        try:
            return plain_messages(self._messages)
        except RequestError as error:
            found = _PLACE.match(error.param or "")
            place = self._places[int(found[1])] if found else self._prefix
            message = _PLACE.sub(place, str(error))
            raise RequestError(message, param=place, code=error.code) from None

    def _add(self, message: Message, place: str) -> None:
        self._messages.append(message)
        self._places.append(place)

    def _assistant(self, place: str, *, begins: bool) -> Message:
        """Return the assistant's message that an item belongs to.

        ``begins``: the item cannot follow content or calls of the same message.
        """
        last = self._messages[-1] if self._messages else None
        if last is None or last.role != "assistant" or (begins and _is_begun(last)):
            last = Message(role="assistant", content="")
            self._add(last, place)
        return last

    def _message(self, item: InputItem, place: str) -> None:
        if item.role is None:
            raise RequestError(f"{place}.role is required", param=f"{place}.role")
        if item.content is None:
            raise RequestError(f"{place}.content is required", param=f"{place}.content")
        text = text_of(item.content, f"{place}.content")
        if item.role == "assistant":
            self._assistant(place, begins=True).content = text
        else:
            self._add(Message(role=item.role, content=text), place)

    def _reasoning(self, item: InputItem, place: str) -> None:
        text = _reasoning_text(item, place)
        if text:
            last = self._messages[-1] if self._messages else None
            begins = last is not None and (_is_begun(last) or last.reasoning_content is not None)
            self._assistant(place, begins=begins).reasoning_content = text

    def _call(self, item: InputItem, place: str) -> None:
        for name in ("call_id", "name", "arguments"):
            if getattr(item, name) is None:
                raise RequestError(f"{place}.{name} is required", param=f"{place}.{name}")
        message = self._assistant(place, begins=False)
        function = CalledFunction(name=item.name or "", arguments=item.arguments or "{}")
        call = MessageCall(id=item.call_id or "", function=function)
        if message.tool_calls is None:
            message.tool_calls = []
        message.tool_calls.append(call)

    def _output(self, item: InputItem, place: str) -> None:
        for name in ("call_id", "output"):
            if getattr(item, name) is None:
                raise RequestError(f"{place}.{name} is required", param=f"{place}.{name}")
        text = text_of(item.output or "", f"{place}.output")
        self._add(Message(role="tool", content=text, tool_call_id=item.call_id), place)


def _is_begun(message: Message) -> bool:
    """Return whether a message has content or calls."""
    return bool(message.content or message.tool_calls)


def text_of(content: str | Sequence[InputPart], place: str) -> str:
    """Return an item's content as one text. ``place``: its path in the request.

    Raises:
        RequestError: a part is no text.
    """
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content):
        if part.type == "refusal" and part.refusal is not None:
            texts.append(part.refusal)
        elif part.type in TEXT_PARTS and part.text is not None:
            texts.append(part.text)
        elif part.type in TEXT_PARTS:
            raise RequestError(f"{place}.{number}.text is required", param=f"{place}.{number}.text")
        else:
            raise unsupported(
                f"{place}.{number}.type", f"{part.type!r} is refused: this model takes text only"
            )
    return "".join(texts)


def _reasoning_text(item: InputItem, place: str) -> str:
    """Return the text of a reasoning item: its content, encrypted content or summary."""
    if isinstance(item.content, str):
        return item.content
    if item.content:
        return "".join(part.text or "" for part in item.content)
    if item.encrypted_content:
        try:
            return base64.b64decode(item.encrypted_content, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            raise RequestError(
                f"{place}.encrypted_content was not made by this server",
                param=f"{place}.encrypted_content",
            ) from None
    return "\n".join(part.text or "" for part in item.summary or ())


def encrypted(text: str) -> str:
    """Return reasoning as clients carry it that keep only ``encrypted_content``."""
    return base64.b64encode(text.encode()).decode()
