"""Completion responses, whole or in chunks, built from the deltas of their sequences."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import orjson

from glowplug.entrypoints.front.delta import Delta
from glowplug.entrypoints.server.context import Context
from glowplug.entrypoints.server.generate.events import NUL, ChoiceEvents, SplitEvent
from glowplug.entrypoints.server.generate.logprobs import CompletionLogprobs
from glowplug.entrypoints.server.generate.prompts import TokenizedPrompt
from glowplug.entrypoints.server.generate.usage import UsageCount
from glowplug.entrypoints.server.openai.chat_answer import ending_fields
from glowplug.entrypoints.server.protocol.completions import CompletionRequest


@dataclass
class CompletionChoiceState:
    """The output so far of one sequence, a choice of the response.

    ``echoed``: the prompt as text if ``echo`` was requested, else "".
    """

    prompt: TokenizedPrompt
    echoed: str
    logprobs: CompletionLogprobs | None
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    end: Delta | None = None
    started: bool = False
    plain: SplitEvent | None = None  #: the event of a chunk with nothing but text


class CompletionAnswer:
    """The base class of whole and streamed completion responses.

    Choice ``p * n + i`` is the i-th choice of prompt p.

    Args:
        context: the server's context.
        request: the request body.
        prompts: the prompts.
        echoed: each prompt as text, or "" without ``echo``. With ``max_tokens`` 0, the echoed
            prompt is the only text of the response.
        rid: id of the request.

    Attributes:
        counts_always: usage is needed after every delta, not only at the end of a sequence.
    """

    counts_always = False

    def __init__(
        self,
        context: Context,
        request: CompletionRequest,
        prompts: list[TokenizedPrompt],
        echoed: list[str],
        rid: str,
    ) -> None:
        self.n = request.n or 1
        self.request = request
        self._context = context
        self.usage = UsageCount(self.n)
        self._only_prompt = request.max_tokens == 0
        self.choices = [
            self._choice(prompt, text)
            for prompt, text in zip(prompts, echoed, strict=True)
            for _ in range(self.n)
        ]
        self._head = {
            "id": f"cmpl-{rid}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": context.model_name,
            "system_fingerprint": context.fingerprint,
        }

    def _choice(self, prompt: TokenizedPrompt, text: str) -> CompletionChoiceState:
        """Return the initial state of a choice. ``text``: the echoed prompt; "" without echo."""
        logprobs = None
        if self.request.logprobs is not None:
            logprobs = CompletionLogprobs(
                self._context.names,
                self.request.logprobs,
                bool(self.request.return_tokens_as_token_ids),
            )
        return CompletionChoiceState(prompt, text, logprobs)

    def take(self, index: int, delta: Delta) -> tuple[str, list[int]]:
        """Add a delta of choice ``index`` to token counts and logprobs, and return its output.

        Returns:
            New text and new token ids of the choice.
        """
        choice = self.choices[index]
        text, ids = ("", []) if self._only_prompt else (delta.text, delta.token_ids)
        if self.counts_always or delta.finish_reason is not None:
            self.usage.count(index, delta, output_tokens=0 if self._only_prompt else None)
        if choice.logprobs is not None:
            if delta.prompt_logprobs is not None:
                choice.logprobs.add_prompt(choice.prompt.ids, delta.prompt_logprobs)
            if delta.logprobs is not None:
                choice.logprobs.add(ids, delta.logprobs)
        if not choice.started:
            choice.started = True
            text = choice.echoed + text
        if delta.finish_reason is not None:
            choice.end = delta
        return text, ids

    def _ending(self, delta: Delta) -> dict[str, Any]:
        """Return the fields that state how a choice ended.

        With ``max_tokens`` 0 the reason is always "length": the one token that the engine then
        generates is not returned.
        """
        if self._only_prompt:
            return {"finish_reason": "length", "stop_reason": None, "matched_stop": None}
        return ending_fields(self._context, delta, delta.finish_reason)


class WholeCompletion(CompletionAnswer):
    """A whole completion response, collected from deltas."""

    def add(self, index: int, delta: Delta) -> None:
        """Add a delta of choice ``index`` to the response."""
        text, ids = self.take(index, delta)
        self.choices[index].text.append(text)
        self.choices[index].token_ids += ids

    def body(self) -> dict[str, Any]:
        """Return the ``text_completion`` object."""
        return {
            **self._head,
            "choices": [self._body(i, choice) for i, choice in enumerate(self.choices)],
            "usage": self.usage.body(),
        }

    def _body(self, index: int, choice: CompletionChoiceState) -> dict[str, Any]:
        """Return the object of one choice in the ``text_completion`` object."""
        assert choice.end is not None
        out: dict[str, Any] = {
            "index": index,
            "text": "".join(choice.text),
            "logprobs": choice.logprobs.take() if choice.logprobs is not None else None,
            **self._ending(choice.end),
        }
        if self.request.return_token_ids:
            out["token_ids"] = choice.token_ids
            out["prompt_token_ids"] = choice.prompt.ids
        return out


class CompletionChunks(CompletionAnswer):
    """A streamed completion response. ``end`` returns the usage and ``[DONE]``."""

    def __init__(
        self,
        context: Context,
        request: CompletionRequest,
        prompts: list[TokenizedPrompt],
        echoed: list[str],
        rid: str,
    ) -> None:
        super().__init__(context, request, prompts, echoed, rid)
        self._events = ChoiceEvents(self._head, self.usage, request.stream_options)
        self.counts_always = self._events.continuous
        self.end = self._events.end

    def add(self, index: int, delta: Delta) -> bytes:
        """Return the event for a delta of choice ``index``; b"" if there is nothing to send yet."""
        choice = self.choices[index]
        first = not choice.started
        text, ids = self.take(index, delta)
        last = delta.finish_reason is not None
        wanted_ids = bool(self.request.return_token_ids)
        logprobs = choice.logprobs.take() if choice.logprobs is not None else None
        if not (text or last or (logprobs and logprobs["tokens"]) or (wanted_ids and ids)):
            return b""
        if not (last or logprobs or wanted_ids or self.counts_always):
            return self._plain(index, choice, text)
        body: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": None,
        }
        if last:
            body.update(self._ending(delta))
        if wanted_ids:
            body["token_ids"] = ids
            if first:
                body["prompt_token_ids"] = choice.prompt.ids
        return self._events.of(body)

    def _plain(self, index: int, choice: CompletionChoiceState, text: str) -> bytes:
        """Return the event of a chunk with only text.

        All but the text is equal in each such event, and is serialised once per choice.
        """
        if choice.plain is None:
            choice.plain = self._events.split_at_text(
                {"index": index, "text": NUL, "logprobs": None, "finish_reason": None}
            )
        return choice.plain[0] + orjson.dumps(text) + choice.plain[1]
