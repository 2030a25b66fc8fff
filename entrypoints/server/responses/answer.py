"""Responses, whole or as a stream of events, built from the deltas of their sequence."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import orjson

from glowplug.entrypoints.front.delta import Delta
from glowplug.entrypoints.server.context import Context
from glowplug.entrypoints.server.errors import failure_of
from glowplug.entrypoints.server.generate.blocks import AnswerBlocks, Block, BlockChange
from glowplug.entrypoints.server.generate.logprobs import chat_logprobs
from glowplug.entrypoints.server.generate.turns import PreparedTurn
from glowplug.entrypoints.server.generate.usage import UsageCount
from glowplug.entrypoints.server.responses.objects import ResponseObject, part
from glowplug.entrypoints.server.responses.store import StoredResponse
from glowplug.entrypoints.server.transport.streaming import Deltas, named_event

Entries = list[dict[str, Any]]  #: log-probabilities of tokens

#: finish reason of the sequence -> status of the response
STATUS = {"stop": "completed", "length": "incomplete", "abort": "cancelled"}
#: status of the response -> its last event
LAST_EVENT = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "cancelled": "response.incomplete",
    "failed": "response.failed",
}
#: kind of block -> prefix of the events about its text, and the event's field with the whole text
TEXT_EVENTS = {
    "reasoning": ("response.reasoning_text", "text"),
    "content": ("response.output_text", "text"),
    "tool_call": ("response.function_call_arguments", "arguments"),
}


class ResponseAnswer:
    """The state of one response.

    Attributes:
        object: the maker of the response's objects.
        ended: the status of the ended response; "": it runs.
    """

    def __init__(
        self, context: Context, made: ResponseObject, prepared: PreparedTurn, top: int | None
    ) -> None:
        self.object = made
        self.ended = ""
        self._names = context.names
        self._top = top
        self._parser = prepared.form.start()
        self._blocks = AnswerBlocks()
        self._usage = UsageCount(1)
        self._logprobs: dict[int, Entries] = {}
        self._waiting: Entries = []
        self._body: dict[str, Any] | None = None

    @property
    def announced(self) -> bool:
        """True if the client may know the id of the response."""
        return bool(self.ended)

    def take(self, delta: Delta) -> Iterator[tuple[BlockChange, Entries]]:
        """Add a delta, and yield the changes of the answer with their log-probabilities."""
        if delta.logprobs is not None and self._top is not None:
            shown = len(delta.token_ids) - isinstance(delta.stop_reason, int)
            self._waiting += chat_logprobs(
                self._names, delta.token_ids[:shown], delta.logprobs, self._top, False
            )
        changes = self._blocks.feed(self._parser.feed(delta))
        self._usage.count(0, delta, self._parser.reasoning_tokens)
        if delta.finish_reason is not None:
            self.ended = STATUS[delta.finish_reason]
            changes += self._blocks.end(self.ended == "completed")
        yield from zip(changes, self._entries(changes), strict=True)

    def _entries(self, changes: Sequence[BlockChange]) -> list[Entries]:
        """Return the log-probabilities of each change's text, and forget those of other tokens.

        Without a new text, tokens wait for the next one.
        """
        found: list[Entries] = [[] for _ in changes]
        texts = [number for number, change in enumerate(changes) if change.action == "add"]
        if not texts or not self._waiting:
            return found
        rest = self._waiting
        self._waiting = []
        for number in reversed(texts):
            block = changes[number].block
            rest, own = split_at(rest, changes[number].text)
            if block.kind == "content":
                found[number] = own
        for number in texts:
            self._logprobs.setdefault(changes[number].block.index, []).extend(found[number])
        return found

    def logprobs(self, block: Block) -> Sequence[dict[str, Any]]:
        """Return the log-probabilities of a block's text so far."""
        return self._logprobs.get(block.index, ())

    def item(self, block: Block) -> dict[str, Any]:
        """Return the item of a closed block."""
        status = "completed" if block.complete else "incomplete"
        return self.object.item(block, status, self.logprobs(block))

    def body(self) -> dict[str, Any]:
        """Return the object of the ended response; without an end it is cancelled."""
        if self._body is None:
            status = self.ended or "cancelled"
            reason = "max_output_tokens" if status == "incomplete" else None
            self._body = self._object(status, reason=reason)
        return self._body

    def failed(self, error: Exception) -> dict[str, Any]:
        """Return the object of a response that failed."""
        detail = failure_of(error)
        found = {"code": detail["code"] or "server_error", "message": detail["message"]}
        return self._object("failed", error=found)

    def _object(self, status: str, **details: Any) -> dict[str, Any]:
        items = [self.item(block) for block in self._blocks.blocks]
        return self.object.of(status, items, self._usage.body(), **details)


def split_at(entries: Entries, text: str) -> tuple[Entries, Entries]:
    """Return the entries before the last occurrence of a text, and those of the text.

    If the text does not occur, as with arguments that a parser has rewritten, all entries come
    before it.
    """
    content = bytes(byte for entry in entries for byte in entry["bytes"])
    begin = content.rfind(text.encode())
    if begin < 0:
        return entries, []
    end = begin + len(text.encode())
    before: Entries = []
    own: Entries = []
    place = 0
    for entry in entries:
        size = len(entry["bytes"])
        if place + size <= begin:
            before.append(entry)
        elif place < end:
            own.append(entry)
        place += size
    return before, own


class WholeResponse(ResponseAnswer):
    """A whole response, collected from deltas."""

    def add(self, index: int, delta: Delta) -> None:
        """Add a delta to the response."""
        for _ in self.take(delta):
            pass


class ResponseEvents(ResponseAnswer):
    """A streamed response."""

    _number = -1

    @property
    def announced(self) -> bool:
        """True if the client may know the id of the response."""
        return self._number >= 0

    def add(self, index: int, delta: Delta) -> bytes:
        """Return the events for a delta; b"" if there is nothing to send."""
        events = [] if self._number >= 0 else [self._begin()]
        for change, entries in self.take(delta):
            events += self._change(change, entries)
        return b"".join(events)

    def end(self) -> bytes:
        """Return the last event."""
        return self._event(LAST_EVENT[self.ended], response=self.body())

    def failure(self, error: Exception) -> bytes:
        """Return the last event of a response that failed."""
        return self._event("response.failed", response=self.failed(error))

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return named_event(kind, {"type": kind, "sequence_number": self._number, **fields})

    def _begin(self) -> bytes:
        """Return the first two events."""
        begun = self.object.of("in_progress")
        return self._event("response.created", response=begun) + self._event(
            "response.in_progress", response=begun
        )

    def _change(self, change: BlockChange, entries: Entries) -> Iterator[bytes]:
        """Yield the events of a change."""
        block = change.block
        if change.action == "open":
            item = self.object.item(block, "in_progress")
            yield self._event("response.output_item.added", output_index=block.index, item=item)
            if block.kind != "tool_call":
                yield self._part("response.content_part.added", block, part(block.kind, ""))
        elif change.action == "add":
            yield self._text(block, "delta", {"delta": change.text}, entries)
        else:
            _, name = TEXT_EVENTS[block.kind]
            yield self._text(block, "done", {name: block.text}, self.logprobs(block))
            if block.kind != "tool_call":
                whole = part(block.kind, block.text, self.logprobs(block))
                yield self._part("response.content_part.done", block, whole)
            yield self._event(
                "response.output_item.done", output_index=block.index, item=self.item(block)
            )

    def _text(
        self, block: Block, ending: str, fields: dict[str, str], entries: Sequence[dict[str, Any]]
    ) -> bytes:
        """Return an event about a block's text."""
        place: dict[str, Any] = {
            "item_id": self.object.item_id(block),
            "output_index": block.index,
        }
        if block.kind != "tool_call":
            place["content_index"] = 0
        if block.kind == "content":
            place["logprobs"] = list(entries)
        if block.kind == "tool_call" and ending == "done":
            place["name"] = block.name
        prefix, _ = TEXT_EVENTS[block.kind]
        return self._event(f"{prefix}.{ending}", **place, **fields)

    def _part(self, kind: str, block: Block, content: dict[str, Any]) -> bytes:
        """Return an event about a block's content part."""
        return self._event(
            kind,
            item_id=self.object.item_id(block),
            output_index=block.index,
            content_index=0,
            part=content,
        )


async def recorded(
    context: Context, deltas: Deltas, answer: ResponseAnswer, entry: StoredResponse | None
) -> AsyncGenerator[tuple[int, Delta], None]:
    """Yield the deltas of a response, and store its object when they end.

    A response whose client disconnects before the end is stored as cancelled if the client may know
    its id, and is not stored otherwise.

    Args:
        context: the server's context.
        deltas: the deltas.
        answer: the answer made of them.
        entry: the response as it is stored while it is in progress; None: it is not stored.
    """
    error: Exception | None = None
    begun = False
    try:
        async with aclosing(deltas) as source:
            async for item in source:
                if not begun and entry is not None:
                    context.stored.add(entry)
                begun = True
                yield item
    except Exception as caught:
        error = caught
        raise
    finally:
        if begun and entry is not None:
            _finish(context, answer, entry.id, error)


def _finish(context: Context, answer: ResponseAnswer, id: str, error: Exception | None) -> None:
    """Store the object of an ended response, or remove a response with an unknown id."""
    if answer.announced:
        body = answer.body() if error is None else answer.failed(error)
        context.stored.finish(id, orjson.dumps(body))
    else:
        context.stored.discard(id)
