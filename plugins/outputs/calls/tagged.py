"""Calls between tags, with the name in a header and the arguments as JSON.

Formats of DeepSeek V3 and V3.1, and of Kimi K2.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass

from glowplug.core.protocols import OutputRequest
from glowplug.plugins.outputs.calls.base import CallParser
from glowplug.plugins.outputs.calls.source import Steps, ignore

_FENCE = "`"
_NUMBER = re.compile(r":\d*$")


@dataclass(frozen=True)
class Tags:
    """The tags of a format.

    Attributes:
        opening: tags before a section of calls.
        closing: tags after a section of calls.
        call: tag before a call.
        separator: tag after the header of a call.
        end: tag after a call.
        typed: the header is the type of the call, and the name is the line after it.
        numbered: the header is an id, "functions.NAME:NUMBER", and calls are numbered over the
            whole conversation.
    """

    opening: tuple[str, ...]
    closing: tuple[str, ...]
    call: str
    separator: str
    end: str
    typed: bool = False
    numbered: bool = False


class TaggedParser(CallParser):
    """The parser of formats with :class:`Tags`.

    A section that begins without its tag, and calls that end without theirs, are accepted.
    """

    def __init__(self, tags: Tags, request: OutputRequest) -> None:
        super().__init__(request)
        self._tags = tags
        self._borders = (tags.end, tags.call, *tags.closing)  # tags that end a call

    def run(self) -> Steps:
        tags = self._tags
        while True:
            tag = yield from self.source.until((*tags.opening, tags.call), self.content)
            if not tag:
                return
            self.beside_call()
            while tag and tag not in tags.closing:
                if tag == tags.call:
                    yield from self._call()
                tag = yield from self.source.until((tags.call, *tags.closing), ignore)

    def _call(self) -> Steps:
        """Parse a call behind its opening tag. A call that is cut within its name is dropped."""
        header = yield from self._header((self._tags.separator, *self._borders))
        if header is not None and self._tags.typed:
            header = yield from self._header(("\n", _FENCE, "{", *self._borders))
        name = (header or "").strip()
        if self._tags.numbered:
            name = _NUMBER.sub("", name).removeprefix("functions.")
        if not name:
            return
        if self._tags.numbered:
            number = self.request.earlier_calls + self.index + 1
            self.call(name, id=f"functions.{name}:{number}")
        else:
            self.call(name)
        yield from self._body()

    def _header(self, ends: tuple[str, ...]) -> Generator[None, None, str | None]:
        """Consume text up to the first of ``ends`` and return it; None at the end of the text.

        The position is then behind a separator or a line break, and before other tags.
        """
        parts: list[str] = []
        tag = yield from self.source.until(ends, parts.append)
        if not tag:
            return None
        if tag not in ("\n", self._tags.separator):
            self.source.back(len(tag))
        return "".join(parts)

    def _body(self) -> Steps:
        """Parse the arguments: a JSON object, possibly within a fence of code.

        Anything else is taken as it is, up to the next tag; nothing at all is an empty object.
        """
        first = yield from self.source.next()
        while first == _FENCE:
            if not (yield from self._skip_fence()):
                break
            first = yield from self.source.next()
        if first == "{":
            yield from self.source.json(self.arguments)
            return
        parts: list[str] = []
        tag = yield from self.source.until(self._borders, parts.append, cut=ignore)
        if tag and tag != self._tags.end:
            self.source.back(len(tag))
        text = "".join(parts).strip().strip(_FENCE).strip()
        self.arguments(text or ("{}" if tag else ""))

    def _skip_fence(self) -> Generator[None, None, bool]:
        """Consume the line of a fence, such as "```json"; return False if the call ends in it."""
        tag = yield from self.source.until(("\n", "{", *self._borders), ignore)
        if tag != "\n":
            self.source.back(len(tag))
        return tag in ("\n", "{")
