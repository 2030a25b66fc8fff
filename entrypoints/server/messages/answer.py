"""Messages, whole or as a stream of events, built from the deltas of their sequence."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

from glowplug.core.errors import RequestError
from glowplug.entrypoints.front.delta import Delta
from glowplug.entrypoints.server.context import Context
from glowplug.entrypoints.server.errors import from_exception
from glowplug.entrypoints.server.generate.blocks import AnswerBlocks, Block, BlockChange
from glowplug.entrypoints.server.generate.turns import PreparedTurn
from glowplug.entrypoints.server.generate.usage import UsageCount
from glowplug.entrypoints.server.messages.errors import message_error
from glowplug.entrypoints.server.protocol.messages import MessagesRequest
from glowplug.entrypoints.server.transport.streaming import named_event


class MessageAnswer:
    """The state of one message."""

    def __init__(
        self,
        context: Context,
        body: MessagesRequest,
        prepared: PreparedTurn,
        rid: str,
        max_tokens: int,
    ) -> None:
        self._shown = body.thinking is None or body.thinking.display != "omitted"
        self._cut = max_tokens < body.max_tokens
        self._parser = prepared.form.start()
        self._usage = UsageCount(1)
        self._end: Delta | None = None
        self.blocks = AnswerBlocks()
        self.id = f"msg_{rid}"
        self._head = {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": context.model_name,
        }

    def take(self, delta: Delta) -> list[BlockChange]:
        """Add a delta, and return the changes of the message.

        Raises:
            RequestError: the sequence was aborted.
        """
        if delta.finish_reason == "abort":
            raise RequestError("the request was aborted", code="aborted", status=503)
        changes = self.blocks.feed(self._parser.feed(delta))
        self._usage.count(0, delta, self._parser.reasoning_tokens)
        if delta.finish_reason is not None:
            self._end = delta
            changes += self.blocks.end(delta.finish_reason == "stop")
        return changes

    def message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the message's object with some content."""
        return {**self._head, "content": content, **self.ending(), "usage": self.usage()}

    def ending(self) -> dict[str, Any]:
        """Return the fields that state how the message ended; None in each if it runs."""
        end = self._end
        if end is None:
            return {"stop_reason": None, "stop_sequence": None}
        matched = end.stop_reason if isinstance(end.stop_reason, str) else None
        reason = "end_turn"
        if end.finish_reason == "length":
            reason = "model_context_window_exceeded" if self._cut else "max_tokens"
        elif matched is not None:
            reason = "stop_sequence"
        elif self._parser.calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": matched}

    def usage(self) -> dict[str, Any]:
        """Return the token counts. Cached tokens of the prompt do not count as input."""
        counts = self._usage.body()
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        thinking = counts["completion_tokens_details"]["reasoning_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": thinking},
        }

    def text(self, block: Block, text: str) -> str:
        """Return a block's text as the message shows it."""
        return text if self._shown or block.kind != "reasoning" else ""

    def block(self, block: Block) -> dict[str, Any]:
        """Return the object of a closed block."""
        if block.kind == "tool_call":
            return _tool_use(block, _arguments(block.text))
        if block.kind == "reasoning":
            thinking = self.text(block, block.text)
            return {"type": "thinking", "thinking": thinking, "signature": _signature(block)}
        return {"type": "text", "text": block.text}


class WholeMessage(MessageAnswer):
    """A whole message, collected from deltas."""

    def add(self, index: int, delta: Delta) -> None:
        """Add a delta to the message."""
        self.take(delta)

    def body(self) -> dict[str, Any]:
        """Return the message's object."""
        return self.message([self.block(block) for block in self.blocks.blocks])


class MessageEvents(MessageAnswer):
    """A streamed message."""

    _begun = False

    def add(self, index: int, delta: Delta) -> bytes:
        """Return the events for a delta; b"" if there is nothing to send."""
        changes = self.take(delta)
        events = [] if self._begun else [self._begin()]
        self._begun = True
        for change in changes:
            events += self._change(change)
        return b"".join(events)

    def end(self) -> bytes:
        """Return the last events."""
        last = {"type": "message_delta", "delta": self.ending(), "usage": self.usage()}
        return named_event("message_delta", last) + named_event(
            "message_stop", {"type": "message_stop"}
        )

    def failure(self, error: Exception) -> bytes:
        """Return the last event of a message that failed."""
        return named_event("error", message_error(from_exception(error)))

    def _begin(self) -> bytes:
        """Return the first two events."""
        start: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self.usage(),
        }
        return named_event(
            "message_start", {"type": "message_start", "message": start}
        ) + named_event("ping", {"type": "ping"})

    def _change(self, change: BlockChange) -> Iterator[bytes]:
        """Yield the events of a change."""
        block = change.block
        if change.action == "open":
            yield _event("content_block_start", block, content_block=_empty(block))
        elif change.action == "add":
            text = self.text(block, change.text)
            if text:
                yield _event("content_block_delta", block, delta=_delta(block, text))
        else:
            if block.kind == "reasoning":
                signed = {"type": "signature_delta", "signature": _signature(block)}
                yield _event("content_block_delta", block, delta=signed)
            yield _event("content_block_stop", block)


def _event(kind: str, block: Block, **fields: Any) -> bytes:
    """Return an event about a block."""
    return named_event(kind, {"type": kind, "index": block.index, **fields})


def _empty(block: Block) -> dict[str, Any]:
    """Return the object of a block that begins."""
    if block.kind == "tool_call":
        return _tool_use(block, {})
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _delta(block: Block, text: str) -> dict[str, str]:
    """Return the delta of a block with new text."""
    if block.kind == "tool_call":
        return {"type": "input_json_delta", "partial_json": text}
    if block.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "text_delta", "text": text}


def _tool_use(block: Block, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call; those of an unfinished call as far as they are complete."""
    try:
        found = from_json(text or "{}", allow_partial="trailing-strings")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _signature(block: Block) -> str:
    """Return the signature of a thinking block. It is a digest, which no request is checked for."""
    return hashlib.sha256(block.text.encode()).hexdigest()
