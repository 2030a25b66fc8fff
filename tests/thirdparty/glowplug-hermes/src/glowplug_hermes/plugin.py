"""The output parser "hermes_calls": declaration and runtime, neither of which imports torch."""

import json
import re
from contextlib import suppress
from typing import Any, Literal

from glowplug.core.api import Component, OutputOffers, OutputOptions, RequestError, hookimpl
from glowplug.core.protocols import OutputParser, OutputRequest, Piece, Worker

OPEN, CLOSE, PART = "<tool_call>", "</tool_call>", 4096  # characters read at a time
#: a call up to its arguments, which are then passed on as they arrive
HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"arguments"\s*:\s*')
MARKS = re.compile(r'\\.?|["{}]', re.DOTALL)
END = re.compile(f"{CLOSE}|(?={OPEN})")


class HermesOptions(OutputOptions):
    use: Literal["hermes_calls"] = "hermes_calls"


@hookimpl
def register_output_parsers() -> list[Component]:
    name, factory = "hermes_calls", "glowplug_hermes.plugin:HermesParsers"
    offers = OutputOffers(kinds=frozenset({"tool_call"}))
    return [Component(name, HermesOptions, factory, offers, contract=2, summary="Hermes' calls")]


class HermesParsers:
    """The ``ToolParserFactory`` of ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

    shows_special = False

    def __init__(self, options: OutputOptions, plan: Any, worker: Worker) -> None:
        pass

    def start(self, request: OutputRequest) -> OutputParser:
        return HermesParser(bool(request.tools) and request.response_format is None)

    def call_grammar(self, request: OutputRequest) -> None:
        """Refuse strict tools. Without a grammar, required calls are refused by the server."""
        if request.tool_choice.mode != "required":
            raise RequestError("this parser has no grammar of strict tools", param="tools")


class HermesParser:
    """The parser of one answer. ``_state`` reads a text and returns the part to read again."""

    def __init__(self, has_calls: bool) -> None:
        self._state: Any = self._content if has_calls else self._add
        self._text, self._pieces, self._index = "", list[Piece](), -1
        self._blank, self._body, self._after_call = list[str](), list[str](), False
        self._depth, self._quoted, self._escaped, self._stops = 0, False, False, (0, 2)

    def feed(self, text: str) -> list[Piece]:
        for at in range(0, len(text), PART):
            self._text, before = self._text + text[at : at + PART], None
            while self._text and (self._text, self._state) != before:
                before = self._text, self._state
                self._text = self._state(self._text) or ""
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[Piece]:
        """Return held text. A call whose name has not arrived is dropped."""
        if self._state in (self._content, self._tag):
            self._add("".join(self._body) + self._text)
        pieces, blank = self._pieces, "" if self._after_call else "".join(self._blank)
        return [*pieces, Piece("content", blank)] if blank else pieces

    def _add(self, text: str) -> None:
        """Add content; white space is returned only if content follows it."""
        text = text.lstrip() if self._after_call else text
        if solid := text.rstrip():
            self._pieces.append(Piece("content", "".join(self._blank) + solid))
            self._blank, self._after_call = [], False
        self._blank.append(text[len(solid) :])

    def _content(self, text: str) -> str:
        before, tag, after = text.partition(OPEN)
        at = text.rfind("<")
        if not tag and at >= 0 and OPEN.startswith(text[at:]):
            before, after = text[:at], text[at:]
        self._add(before)
        self._state, self._body = self._tag if tag else self._content, [tag]
        return after

    def _tag(self, text: str) -> str:
        body = text.lstrip()
        self._body.append(text[: len(text) - len(body)])
        if body.startswith("{"):
            self._state, self._depth, self._stops = self._object, 0, (0, 2)
        elif body:
            self._add("".join(self._body))
            self._state = self._content
        return body

    def _object(self, text: str) -> str:
        end = self._end(text)
        self._body.append(text[:end])
        if self._depth == 2 and 2 in self._stops:
            self._stops = (0, 0)
            if found := HEAD.fullmatch("".join(self._body)[:-1].removeprefix(OPEN).lstrip()):
                self._begin(found[1])
                self._state, self._depth, self._stops = self._arguments, 1, (1, 1)
                return text[end - 1 :]
        elif self._depth == 0:
            self._whole("".join(self._body))
        return text[end:]

    def _whole(self, text: str) -> None:
        self._state, self._body, call = self._rest, [], {}
        with suppress(ValueError, RecursionError):
            call = json.loads(text.removeprefix(OPEN), strict=False)
        given = call.get("arguments", {})
        if isinstance(call.get("name"), str):
            self._begin(call["name"], given if isinstance(given, str) else json.dumps(given))
        else:
            self._state = self._content
            self._add(text)

    def _begin(self, name: str, arguments: str = "") -> None:
        self._index, self._blank, self._body, self._after_call = self._index + 1, [], [], True
        self._pieces.append(Piece("tool_call", arguments, {"index": self._index, "name": name}))

    def _arguments(self, text: str) -> str:
        end = self._end(text)
        self._pieces.append(Piece("tool_call", text[:end], {"index": self._index}))
        self._state = self._rest if self._depth == 1 else self._arguments
        return text[end:]

    def _rest(self, text: str) -> str:
        found = END.search(text)
        self._state = self._content if found else self._rest
        return text[found.end() :] if found else text[1 - len(CLOSE) :]

    def _end(self, text: str) -> int:
        """Follow strings and braces; return the first place with a depth of ``_stops``."""
        start, self._escaped = int(self._escaped), False
        for mark in MARKS.finditer(text, start):
            if mark[0][0] == "\\":
                self._escaped = len(mark[0]) == 1
            elif mark[0] == '"':
                self._quoted = not self._quoted
            elif not self._quoted:
                self._depth += 1 if mark[0] == "{" else -1
                if self._depth in self._stops:
                    return mark.end()
        return len(text)
