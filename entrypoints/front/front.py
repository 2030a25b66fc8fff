"""The front's bookkeeping, without any I/O: numbers sequences, checks requests, turns engine output
into deltas.

``LLM`` (synchronous) and ``EngineClient`` (asyncio) both drive one :class:`Front`; they differ only
in how bytes move.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from glowplug.core.errors import RequestError, context_exceeded, prompt_too_long
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.step.messages import (
    Abort,
    Finished,
    Inbound,
    Logprobs,
    Outbound,
    Progress,
    Reply,
    Stats,
    StepOutput,
    Submit,
    packed_ids,
    total,
)
from glowplug.core.step.request import SamplingParams
from glowplug.core.text.stop_strings import OutputProcessor
from glowplug.core.text.tokenizer import Tokenizer
from glowplug.entrypoints.front.delta import Delta, Times


@dataclass(slots=True, eq=False)
class Stream:
    """One sequence as the front knows it. ``text`` is None when there is no tokenizer.

    ``queued`` and ``prefill``: seconds that the engine measured, see :class:`Times`. ``first`` and
    ``last``: when the first and the last token came, seconds (monotonic).
    """

    id: int
    params: SamplingParams
    prompt_tokens: int
    text: OutputProcessor | None
    arrival: float
    output_tokens: int = 0
    cached_tokens: int = 0
    queued: float | None = None
    prefill: float | None = None
    first: float | None = None
    last: float = 0.0
    done: bool = False
    prompt_logprobs: Logprobs | None = None


@dataclass(slots=True)
class Received:
    """What one frame brought: news by stream, answers to controls."""

    deltas: list[tuple[Stream, Delta]] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)


class Front:
    """Not thread-safe; its owner calls it from one thread.

    ``outbox`` collects messages the front wants sent (ends of sequences whose stop string matched).
    """

    def __init__(
        self, plan: EnginePlan, tokenizer: Tokenizer | None, eos_ids: tuple[int, ...]
    ) -> None:
        self.plan = plan
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.streams: dict[int, Stream] = {}
        self.outbox: list[Inbound] = []
        self.groups: dict[int, Stats] = {}  # latest statistics by data-parallel group
        self.stats = Stats()  # of all groups together
        self.heard = time.monotonic()
        self.progress: dict[int, Progress] = {}
        self._next_id = 1
        self._seeds = random.Random(plan.seed)

    # ---- requests --------------------------------------------------------------------------------

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        salt: str = "",
        timeout: float = 0.0,
        queue_timeout: float = 0.0,
    ) -> tuple[Stream, Submit]:
        """A new sequence (``params.n`` is ignored: one call, one sequence). RequestError when it
        cannot be served.
        """
        ids, params = self._checked(prompt, params)
        text = OutputProcessor(self.tokenizer, params) if self.tokenizer is not None else None
        stream = Stream(self._next_id, params, len(prompt), text, time.monotonic())
        self._next_id += 1
        self.streams[stream.id] = stream
        stop_ids = list(params.stop_token_ids) + ([] if params.ignore_eos else list(self.eos_ids))
        return stream, Submit(
            stream.id, packed_ids(ids), params, priority, salt, stop_ids, timeout, queue_timeout
        )

    def check_request(self, prompt: list[int], params: SamplingParams) -> SamplingParams:
        """The parameters with ``max_tokens`` and ``seed`` filled in. RequestError when it cannot be
        served.
        """
        return self._checked(prompt, params)[1]

    def _checked(
        self, prompt: list[int], params: SamplingParams
    ) -> tuple[NDArray[np.int64], SamplingParams]:
        ids = self._ids(prompt)
        if self.tokenizer is None and params.stop:
            raise RequestError(
                "stop strings need a tokenizer, and this engine runs without one", param="stop"
            )
        return ids, self._filled(params, len(prompt))

    def _ids(self, prompt: list[int]) -> NDArray[np.int64]:
        """RequestError for an empty prompt or an id outside the model's vocabulary."""
        if not prompt:
            raise RequestError("the prompt is empty", param="prompt")
        vocab = self.plan.facts.model.vocab_size
        try:
            ids = np.asarray(prompt, np.int64)
            low = int(ids.min())
            high = int(ids.max())
        except OverflowError:
            low = min(prompt)
            high = max(prompt)
        if low < 0 or high >= vocab:
            wrong = low if low < 0 else high
            raise RequestError(
                f"token id {wrong} is outside the model's vocabulary of {vocab}",
                param="prompt",
                code="invalid_token_id",
            )
        return ids

    def _filled(self, params: SamplingParams, prompt: int) -> SamplingParams:
        context = self.plan.sizes.context_length
        room = context - prompt
        if room < 1:
            raise prompt_too_long(context, prompt)
        if params.max_tokens is not None and params.max_tokens > room:
            raise context_exceeded(
                context,
                f"you requested {prompt + params.max_tokens} tokens ({prompt} in the prompt, "
                f"{params.max_tokens} for the completion): the prompt is too long for that many; max_tokens may be "
                f"{room}",
                "max_tokens",
            )
        self._check_vocabulary(params)
        sizes = self.plan.sizes
        pool = (
            sizes.num_pages - 1
        ) * sizes.page_size - prompt  # what "as many as fit" can mean when the pool is small
        return params.replace(
            n=1,
            max_tokens=params.max_tokens or max(1, min(room, pool)),
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
        )

    def _check_vocabulary(self, params: SamplingParams) -> None:
        vocab = self.plan.facts.model.vocab_size
        named = (
            ("logit_bias", params.logit_bias or ()),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("stop_token_ids", params.stop_token_ids),
        )
        for name, ids in named:
            for token in ids:
                if not 0 <= token < vocab:
                    raise RequestError(
                        f"{name}: token id {token} is outside the model's vocabulary of {vocab}",
                        param=name,
                    )

    def abandon(self, streams: list[Stream]) -> Abort | None:
        """The client is gone: forget these; returns the message that frees them in the engine."""
        ids = [
            stream.id
            for stream in streams
            if self.streams.pop(stream.id, None) is not None and not stream.done
        ]
        for stream in streams:
            stream.done = True
        return Abort(ids) if ids else None

    # ---- engine output ---------------------------------------------------------------------------

    def receive(self, messages: list[Outbound]) -> Received:
        self.heard = time.monotonic()
        received = Received()
        for message in messages:
            if isinstance(message, StepOutput):
                self._step(message, received)
            elif isinstance(message, Reply):
                received.replies.append(message)
            elif isinstance(message, Progress):
                self.progress[message.rank] = message
        return received

    def _step(self, output: StepOutput, received: Received) -> None:
        if output.stats is not None:
            self.groups[output.stats.group] = output.stats
            self.stats = total(self.groups.values())
        for admitted in output.admitted:
            stream = self.streams.get(admitted.id)
            if stream is not None:
                stream.queued = admitted.queued
                stream.cached_tokens = admitted.cached_tokens
        for id, seconds in output.prefilled:
            stream = self.streams.get(id)
            if stream is not None:
                stream.prefill = seconds
        for id, scores in output.prompt_logprobs:
            self._prompt_scores(id, scores)
        ends = {finished.id: finished for finished in output.finished}
        logprobs = dict(output.logprobs)
        at = 0
        for i, id in enumerate(output.ids):
            count = output.counts[i] if output.counts else 1
            tokens = output.tokens[at : at + count]
            at += count
            stream = self.streams.get(id)
            if stream is not None:
                received.deltas.append(
                    (stream, self._delta(stream, tokens, logprobs.get(id), ends.pop(id, None)))
                )
        for finished in ends.values():
            stream = self.streams.get(finished.id)
            if stream is not None:
                received.deltas.append((stream, self._delta(stream, [], None, finished)))

    def _prompt_scores(self, id: int, scores: Logprobs) -> None:
        stream = self.streams.get(id)
        if stream is None:
            return
        if stream.prompt_logprobs is None:
            stream.prompt_logprobs = scores
        else:
            stream.prompt_logprobs.extend(scores)

    def _delta(
        self, stream: Stream, tokens: list[int], logprobs: Logprobs | None, end: Finished | None
    ) -> Delta:
        if tokens:
            stream.output_tokens += len(tokens)
            stream.last = self.heard
            if stream.first is None:
                stream.first = self.heard
        delta = Delta(
            token_ids=tokens,
            logprobs=logprobs,
            prompt_tokens=stream.prompt_tokens,
            cached_tokens=stream.cached_tokens,
            output_tokens=stream.output_tokens,
        )
        if stream.prompt_logprobs is not None and stream.output_tokens == len(tokens):
            delta.prompt_logprobs = stream.prompt_logprobs
        if stream.text is not None:
            self._text(stream, tokens, delta, end)
        if end is not None and delta.finish_reason is None:
            delta.finish_reason = end.reason
            delta.stop_reason = end.stop_id
            delta.error = end.error
            delta.error_code = end.error_code
        if delta.finish_reason is not None:
            decode = None if stream.first is None else stream.last - stream.first
            delta.times = Times(stream.queued, stream.prefill, decode)
            stream.done = True
            self.streams.pop(stream.id, None)
        return delta

    def _text(self, stream: Stream, tokens: list[int], delta: Delta, end: Finished | None) -> None:
        assert stream.text is not None
        shown = tokens
        if end is not None and end.stop_id is not None and tokens and tokens[-1] == end.stop_id:
            shown = tokens[:-1]  # the token that ends a sequence by id is not part of its text
        got = stream.text.feed(shown)
        delta.text = got.text
        if not got.finished and end is not None:
            tail = stream.text.finish(end.reason)
            delta.text += tail.text
            got = tail if tail.finished else got
        if got.finished and got.stop_reason is not None:
            delta.finish_reason = "stop"
            delta.stop_reason = got.stop_reason
            if end is None:
                self.outbox.append(Abort([stream.id], "stop"))
