"""Streamed chunks of the OpenAI routes as server-sent events.

Each chunk has one choice, and the usage if the request asked for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from glowplug.entrypoints.server.generate.usage import UsageCount
from glowplug.entrypoints.server.protocol.fields import StreamOptions
from glowplug.entrypoints.server.transport.streaming import DONE, event

NUL = "\0"  #: text that marks where an event is split
SplitEvent = tuple[bytes, bytes]  #: the bytes before and after the text of an event


class ChoiceEvents:
    """The maker of the server-sent events of one stream.

    Args:
        head: the fields that all chunks of the stream share.
        usage: the request's token counts.
        options: the request's ``stream_options``.

    Attributes:
        continuous: every chunk has the usage so far.
    """

    def __init__(
        self, head: Mapping[str, Any], usage: UsageCount, options: StreamOptions | None
    ) -> None:
        self._head = head
        self._usage = usage
        self._at_end = options is not None and options.include_usage
        self.continuous = options is not None and options.continuous_usage_stats

    def of(self, choice: Mapping[str, Any], extra: Mapping[str, Any] | None = None) -> bytes:
        """Return the event of a chunk with a single choice. ``extra``: more fields of the chunk."""
        chunk = {**self._head, "choices": [choice], **(extra or {})}
        if self.continuous:
            chunk["usage"] = self._usage.body()
        elif self._at_end:
            chunk["usage"] = None
        return event(chunk)

    def split_at_text(self, choice: Mapping[str, Any]) -> SplitEvent:
        """Return the event of a choice in two parts: the bytes before and after the choice's text.

        The text of ``choice`` must be NUL: the event is split at this character.
        """
        before, after = self.of(choice).split(orjson.dumps(NUL))
        return before, after

    def end(self) -> bytes:
        """Return the last events: the usage if it was requested, and ``[DONE]``."""
        if not self._at_end:
            return DONE
        return event({**self._head, "choices": [], "usage": self._usage.body()}) + DONE
