"""The base of all parsers of tool calls."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from glowplug.core.protocols import OutputRequest, Piece
from glowplug.plugins.outputs.calls.source import Source, Steps


class PlainParser:
    """The parser of an answer that cannot have calls: all text is content."""

    def feed(self, text: str) -> list[Piece]:
        return [Piece("content", text)] if text else []

    def finish(self) -> list[Piece]:
        return []


class CallParser:
    """A parser of one answer with tool calls; subclasses define ``run``.

    White space between content and a call counts as part of the format and is dropped.

    Args:
        request: the part of the request that parsers get.

    Attributes:
        source: the text to parse.
        index: number of the current call, -1 before the first.
    """

    def __init__(self, request: OutputRequest) -> None:
        self.request = request
        self.source = Source()
        self.index = -1
        self._pieces: list[Piece] = []
        self._blank: list[str] = []  # white space that is returned only if content follows it
        self._beside_call = False
        self._steps: Iterator[None] = self._all()

    @abstractmethod
    def run(self) -> Steps:
        """Parse the text; the method is a generator that yields when it needs more."""
        raise NotImplementedError

    def feed(self, text: str) -> list[Piece]:
        if text:
            self.source.feed(text)
            next(self._steps, None)
        return self._taken()

    def finish(self) -> list[Piece]:
        self.source.ended = True
        for _ in self._steps:
            pass
        if self._blank and not self._beside_call:
            self._pieces.append(Piece("content", "".join(self._blank)))
            self._blank = []
        return self._taken()

    def content(self, text: str) -> None:
        """Add content."""
        if self._beside_call:
            text = text.lstrip()
        solid = text.rstrip()
        if solid:
            self._pieces.append(Piece("content", "".join(self._blank) + solid))
            self._blank = []
            self._beside_call = False
        if len(text) > len(solid):
            self._blank.append(text[len(solid) :])

    def beside_call(self) -> None:
        """Drop the white space before this position, and that after it."""
        self._blank = []
        self._beside_call = True

    def call(self, name: str, **fields: Any) -> None:
        """Begin a call. ``fields``: further fields of its first piece."""
        self.beside_call()
        self.index += 1
        self._pieces.append(Piece("tool_call", "", {"index": self.index, "name": name, **fields}))

    def arguments(self, text: str) -> None:
        """Add a piece of the current call's arguments."""
        if text:
            self._pieces.append(Piece("tool_call", text, {"index": self.index}))

    def _taken(self) -> list[Piece]:
        pieces = self._pieces
        self._pieces = []
        return pieces

    def _all(self) -> Steps:
        """Parse the text; what the format leaves is content."""
        yield from self.run()
        yield from self.source.rest(self.content)
