"""Formats whose calls are JSON objects: Hermes and Qwen, Llama 3, and required calls."""

from __future__ import annotations

from glowplug.plugins.outputs.calls.objects import ObjectParser
from glowplug.plugins.outputs.calls.source import Steps, ignore

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


class HermesParser(ObjectParser):
    """The parser of ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

    A tag without an object behind it, as in a text about the format, is content.
    """

    def run(self) -> Steps:
        while (yield from self.source.until((OPEN,), self.content)):
            blank: list[str] = []
            first = yield from self.source.next(blank.append)
            if not first:
                return
            if first != "{":
                self.content(OPEN + "".join(blank))
                continue
            self.beside_call()
            yield from self.call_object()
            tag = yield from self.source.until((CLOSE, OPEN), ignore)
            if tag == OPEN:
                self.source.back(len(OPEN))


class LlamaParser(ObjectParser):
    """The parser of ``{"name": ..., "parameters": {...}}``, with or without ``<|python_tag|>``.

    Several calls are separated by semicolons. Without the tag, only a text that begins with a call
    of one of the request's tools is parsed; all other text is content.
    """

    def run(self) -> Steps:
        first = yield from self.source.next(self.content)
        if first == "{" and (yield from self.source.begins_with(self._beginnings())):
            self.beside_call()
            yield from self._calls()
        while (yield from self.source.until((PYTHON_TAG,), self.content)):
            self.beside_call()
            yield from self._calls()

    def _calls(self) -> Steps:
        """Parse calls until something other than an object follows."""
        while (yield from self.source.next()) == "{":
            yield from self.call_object()
            if (yield from self.source.next()) in (";", ","):
                self.source.take()

    def _beginnings(self) -> list[str]:
        """Return the texts, without white space, with which a call may begin."""
        return [
            f'{{{kind}"name":"{tool.name}"'
            for tool in self.request.tools
            for kind in ("", '"type":"function",')
        ]


class ArrayParser(ObjectParser):
    """The parser of a JSON list of calls, which a grammar has forced."""

    def run(self) -> Steps:
        if (yield from self.source.next(self.content)) != "[":
            return
        self.source.take()
        self.beside_call()
        while True:
            first = yield from self.source.next()
            if first == "{":
                yield from self.call_object()
            elif first == ",":
                self.source.take()
            else:
                if first == "]":
                    self.source.take()
                return
