"""Streamed chunks of the OpenAI routes as server-sent events: one choice each, and usage where it
is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from glowplug.entrypoints.server.generate.usage import UsageCount
from glowplug.entrypoints.server.protocol.fields import StreamOptions
from glowplug.entrypoints.server.transport.streaming import DONE, event

NUL = "\0"
Halves = tuple[
    bytes, bytes
]  #: what stands before and behind the text in an event that carries nothing but text


class ChoiceEvents:
    """``head``: the fields that all chunks of a stream share. ``continuous``: every chunk brings
    the usage so far.
    """

    def __init__(
        self, head: Mapping[str, Any], usage: UsageCount, options: StreamOptions | None
    ) -> None:
        self._head = head
        self._usage = usage
        self._at_end = options is not None and options.include_usage
        self.continuous = options is not None and options.continuous_usage_stats

    def of(self, choice: Mapping[str, Any], extra: Mapping[str, Any] | None = None) -> bytes:
        chunk = {**self._head, "choices": [choice], **(extra or {})}
        if self.continuous:
            chunk["usage"] = self._usage.body()
        elif self._at_end:
            chunk["usage"] = None
        return event(chunk)

    def halves(self, choice: Mapping[str, Any]) -> Halves:
        """The event of ``choice``, whose text is NUL, to be written around the texts of a stream."""
        before, after = self.of(choice).split(orjson.dumps(NUL))
        return before, after

    def end(self) -> bytes:
        if not self._at_end:
            return DONE
        return event({**self._head, "choices": [], "usage": self._usage.body()}) + DONE
