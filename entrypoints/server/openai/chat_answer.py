"""Chat responses, whole or in chunks, built from the deltas of their sequences."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from glowplug.core.protocols import Piece
from glowplug.entrypoints.front.chat.answers import AnswerParser, AnswerParts
from glowplug.entrypoints.front.delta import Delta
from glowplug.entrypoints.server.context import Context
from glowplug.entrypoints.server.generate.events import NUL, ChoiceEvents, SplitEvent
from glowplug.entrypoints.server.generate.logprobs import chat_logprobs
from glowplug.entrypoints.server.generate.turns import PreparedTurn
from glowplug.entrypoints.server.generate.usage import UsageCount
from glowplug.entrypoints.server.protocol.chat import ChatRequest


def ending_fields(context: Context, delta: Delta, reason: str | None) -> dict[str, Any]:
    """Return the fields that state how a choice ended. ``reason``: its finish reason.

    The fields are OpenAI's ``finish_reason``, vLLM's ``stop_reason`` (None for eos) and SGLang's
    ``matched_stop``.
    """
    matched = delta.stop_reason
    return {
        "finish_reason": reason,
        "stop_reason": None if matched in context.eos_ids else matched,
        "matched_stop": matched,
    }


@dataclass
class ChatChoiceState:
    """The output so far of one sequence, a choice of the response.

    Attributes:
        parser: parser of the choice's text.
        parts, logprobs, token_ids: output so far, for a whole response.
        held: reasoning held back until it is complete (``stream_reasoning: false``).
        end: the last delta.
        started: the first chunk was sent.
        plain: the event of a chunk with only content: the bytes before and after the content.
    """

    parser: AnswerParser
    parts: AnswerParts = field(default_factory=AnswerParts)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    end: Delta | None = None
    started: bool = False
    plain: SplitEvent | None = None


class ChatAnswer:
    """The base class of whole and streamed chat responses.

    Attributes:
        counts_always: usage is needed after every delta, not only at the end of a sequence.
    """

    counts_always = False

    def __init__(
        self, context: Context, request: ChatRequest, prepared: PreparedTurn, rid: str
    ) -> None:
        n = request.n or 1
        self.request = request
        self.prompt = prepared.prompt
        self._context = context
        self.choices = [ChatChoiceState(prepared.form.start()) for _ in range(n)]
        self.usage = UsageCount(n)
        self._top = (request.top_logprobs or 0) if request.logprobs else 0
        self._head = {
            "id": f"chatcmpl-{rid}",
            "created": int(time.time()),
            "model": context.model_name,
            "system_fingerprint": context.fingerprint,
        }

    @property
    def echoed(self) -> str:
        """The text that ``echo`` repeats: the last message if it is the assistant's, else ""."""
        messages = self.request.messages
        if not self.request.echo or not messages or messages[-1].role != "assistant":
            return ""
        content = messages[-1].content
        return (
            content
            if isinstance(content, str)
            else "".join(part.text or "" for part in content or [])
        )

    def take(self, index: int, delta: Delta) -> tuple[list[Piece], list[dict[str, Any]] | None]:
        """Add a delta of choice ``index`` to the token counts and return the delta's output.

        Returns:
            New pieces, and log-probabilities (None if not requested).
        """
        choice = self.choices[index]
        pieces = choice.parser.feed(delta)
        if self.counts_always or delta.finish_reason is not None:
            self.usage.count(index, delta, choice.parser.reasoning_tokens)
        if not self.request.include_reasoning:
            pieces = [piece for piece in pieces if piece.kind != "reasoning"]
        logprobs = None
        if self.request.logprobs and delta.logprobs is not None:
            logprobs = chat_logprobs(
                self._context.names,
                delta.token_ids,
                delta.logprobs,
                self._top,
                bool(self.request.return_tokens_as_token_ids),
            )
        if delta.finish_reason is not None:
            choice.end = delta
        return pieces, logprobs

    def _with_reasoning(self, fields: dict[str, Any], reasoning: str | None) -> dict[str, Any]:
        """Add a message's reasoning to its fields, and return the fields.

        The field is ``reasoning_content``, and with ``emit_reasoning_alias`` also ``reasoning``.
        """
        fields["reasoning_content"] = reasoning
        if self._context.options.emit_reasoning_alias:
            fields["reasoning"] = reasoning
        return fields


class WholeChat(ChatAnswer):
    """A whole chat response, collected from deltas."""

    def add(self, index: int, delta: Delta) -> None:
        """Add a delta of choice ``index`` to the response."""
        pieces, logprobs = self.take(index, delta)
        choice = self.choices[index]
        choice.parts.add(pieces)
        choice.logprobs += logprobs or []
        choice.token_ids += delta.token_ids

    def body(self) -> dict[str, Any]:
        """Return the ``chat.completion`` object."""
        body = {
            **self._head,
            "object": "chat.completion",
            "usage": self.usage.body(),
            "choices": [self._choice(i, choice) for i, choice in enumerate(self.choices)],
        }
        if self.request.return_token_ids:
            body["prompt_token_ids"] = self.prompt.ids
        return body

    def _choice(self, index: int, choice: ChatChoiceState) -> dict[str, Any]:
        """Return the object of one choice in the ``chat.completion`` object."""
        assert choice.end is not None
        parts = choice.parts
        content = self.echoed + "".join(parts.content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content or (None if parts.calls else ""),
            "refusal": None,
        }
        self._with_reasoning(message, "".join(parts.reasoning) or None)
        if parts.calls:
            message["tool_calls"] = [call.described() for call in parts.calls]
        logprobs = {"content": choice.logprobs, "refusal": None} if self.request.logprobs else None
        out = {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            **ending_fields(self._context, choice.end, choice.parser.finish_reason(choice.end)),
        }
        if self.request.return_token_ids:
            out["token_ids"] = choice.token_ids
        return out


def _call_delta(piece: Piece) -> dict[str, Any]:
    """Return the object of a piece of a tool call in a chunk.

    Only the first piece of a call has its id, its type and the name of the function.
    """
    data = piece.data or {}
    function = {"arguments": piece.text}
    if "name" not in data:
        return {"index": data["index"], "function": function}
    head = {"index": data["index"], "id": data["id"], "type": "function"}
    return {**head, "function": {"name": data["name"], **function}}


class ChatChunks(ChatAnswer):
    """A streamed chat response. ``end`` returns the usage and ``[DONE]``."""

    def __init__(
        self, context: Context, request: ChatRequest, prepared: PreparedTurn, rid: str
    ) -> None:
        super().__init__(context, request, prepared, rid)
        self._events = ChoiceEvents(
            {**self._head, "object": "chat.completion.chunk"}, self.usage, request.stream_options
        )
        self.counts_always = self._events.continuous
        self.end = self._events.end

    def add(self, index: int, delta: Delta) -> bytes:
        """Return the events for a delta of choice ``index``; b"" if there is nothing to send."""
        choice = self.choices[index]
        pieces, logprobs = self.take(index, delta)
        parts: list[bytes] = [] if choice.started else [self._first(index)]
        choice.started = True
        if not self.request.stream_reasoning:
            pieces = _hold(choice, pieces, delta.finish_reason is not None)
        ids = delta.token_ids if self.request.return_token_ids else None
        messages = list(self._messages(pieces))
        if not messages and (logprobs or ids):
            messages.append({"content": ""})
        for message in messages:
            if "content" in message and not (logprobs or ids or self.counts_always):
                parts.append(self._plain(index, choice, message["content"]))
            else:
                parts.append(self._event(index, message, logprobs, ids))
            logprobs = None
            ids = None
        if delta.finish_reason is not None:
            parts.append(self._last(index, delta))
        return b"".join(parts)

    def _messages(self, pieces: list[Piece]) -> Iterator[dict[str, Any]]:
        """Yield the ``delta`` of a chunk for each piece."""
        for piece in pieces:
            if piece.kind == "reasoning":
                yield self._with_reasoning({}, piece.text)
            elif piece.kind == "content":
                yield {"content": piece.text}
            else:
                yield {"tool_calls": [_call_delta(piece)]}

    def _event(
        self,
        index: int,
        message: dict[str, Any],
        logprobs: list[dict[str, Any]] | None,
        ids: list[int] | None,
    ) -> bytes:
        """Return the event of a chunk whose ``delta`` has the fields ``message``."""
        return self._events.of(self._fields(index, message, logprobs, ids))

    def _last(self, index: int, delta: Delta) -> bytes:
        """Return the event of the last chunk, with the finish reason."""
        reason = self.choices[index].parser.finish_reason(delta)
        ending = ending_fields(self._context, delta, reason)
        return self._events.of({**self._fields(index, {}), **ending})

    def _plain(self, index: int, choice: ChatChoiceState, content: str) -> bytes:
        """Return the event of a chunk with only content.

        All but the content is equal in each such event, and is serialised once per choice.
        """
        if choice.plain is None:
            choice.plain = self._events.split_at_text(self._fields(index, {"content": NUL}))
        return choice.plain[0] + orjson.dumps(content) + choice.plain[1]

    def _first(self, index: int) -> bytes:
        """Return the event of the first chunk, with the role."""
        fields = {"role": "assistant", "content": self.echoed}
        extra = {"prompt_token_ids": self.prompt.ids} if self.request.return_token_ids else None
        return self._events.of(self._fields(index, fields), extra)

    @staticmethod
    def _fields(
        index: int,
        message: dict[str, Any],
        logprobs: list[dict[str, Any]] | None = None,
        ids: list[int] | None = None,
    ) -> dict[str, Any]:
        """Return the choice object of a chunk. ``message``: the fields of its key ``delta``."""
        choice = {
            "index": index,
            "delta": message,
            "logprobs": {"content": logprobs, "refusal": None} if logprobs else None,
            "finish_reason": None,
        }
        return {**choice, "token_ids": ids} if ids else choice


def _hold(choice: ChatChoiceState, pieces: list[Piece], ended: bool) -> list[Piece]:
    """Hold back a choice's reasoning until another kind of piece follows, or the choice ended."""
    rest = [piece for piece in pieces if piece.kind != "reasoning"]
    choice.held += [piece.text for piece in pieces if piece.kind == "reasoning"]
    if not choice.held or not (rest or ended):
        return rest
    whole = Piece("reasoning", "".join(choice.held))
    choice.held = []
    return [whole, *rest]
