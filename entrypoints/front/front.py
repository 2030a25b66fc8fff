"""The front's bookkeeping, without I/O.

It numbers sequences, checks requests and converts engine output to deltas. ``LLM`` (synchronous)
and ``EngineClient`` (asyncio) each have one :class:`Front` and differ only in how bytes are sent
and received.
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
    Reply,
    Stats,
    StepOutput,
    Submit,
    packed_ids,
    total,
)
from glowplug.core.step.request import DEFAULT_ADMISSION, Admission, SamplingParams
from glowplug.core.text.stop_strings import OutputProcessor
from glowplug.core.text.tokenizer import Tokenizer
from glowplug.entrypoints.front.delta import Delta, Times, VerifiedDrafts
from glowplug.entrypoints.front.request_fields import RequestFields


@dataclass(frozen=True, slots=True, eq=False)
class CheckedRequest:
    """A prompt and its parameters that :meth:`Front.check` has accepted.

    Attributes:
        ids: token ids of the prompt, int64 [tokens].
        params: sampling parameters as requested.
        max_tokens: tokens that may be generated: as requested, or as many as fit.
    """

    ids: NDArray[np.int64]
    params: SamplingParams
    max_tokens: int


@dataclass(slots=True, eq=False)
class Stream:
    """The front's state of one sequence.

    Attributes:
        id: number of the sequence.
        params: sampling parameters.
        prompt_tokens, output_tokens, cached_tokens: token counts so far.
        text: converter of tokens to text, which also finds stop strings; None without a tokenizer.
        arrival: time of :meth:`Front.submit`, seconds (monotonic).
        queued, prefill: seconds in the phases ``queue`` and ``prefill`` of :class:`Times`.
        first, last: time of the first and of the latest token, seconds (monotonic).
        done: the sequence has ended or was aborted.
        drafts: its drafts so far; None if the engine drafts nothing.
        prompt_logprobs: log-probabilities of the prompt received so far.
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
    drafts: VerifiedDrafts | None = None
    prompt_logprobs: Logprobs | None = None

    def count(self, tokens: int, now: float) -> None:
        """Add ``tokens``, the number of tokens received at the time ``now``, to the counts."""
        self.output_tokens += tokens
        self.last = now
        if self.first is None:
            self.first = now

    def verify(self, drafted: int, accepted: int) -> None:
        """Add a verify step to the drafts; without a draft (0) it is none."""
        if not drafted:
            return
        self.drafts = (self.drafts or VerifiedDrafts()).plus(drafted, accepted)

    def times(self) -> Times:
        """Return the seconds that the sequence has spent in each phase so far."""
        decode = None if self.first is None else self.last - self.first
        return Times(self.queued, self.prefill, decode)


@dataclass(slots=True)
class Received:
    """The processed contents of one frame: deltas with their streams, and replies to controls."""

    deltas: list[tuple[Stream, Delta]] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)


class Front:
    """The bookkeeping of all sequences of an engine. It is not thread-safe.

    Requests become messages to the engine, and the engine's messages become deltas with text.

    Args:
        plan: the engine's plan.
        tokenizer: None if the engine runs without one.
        eos_ids: token ids that end a sequence.

    Attributes:
        streams: running sequences by number.
        outbox: messages to send: aborts of sequences whose stop string matched. The owner of the
            front sends them and empties the list.
        groups: latest statistics by data-parallel group.
        stats: latest statistics over all data-parallel groups.
        last_received: time of the last frame, seconds (monotonic).
    """

    def __init__(
        self, plan: EnginePlan, tokenizer: Tokenizer | None, eos_ids: tuple[int, ...]
    ) -> None:
        self.plan = plan
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.streams: dict[int, Stream] = {}
        self.outbox: list[Inbound] = []
        self.groups: dict[int, Stats] = {}
        self.stats = Stats()
        self.last_received = time.monotonic()
        self._next_id = 1
        self._fields = RequestFields(plan)
        self._seeds = random.Random(plan.seed)

    # ---- requests --------------------------------------------------------------------------------

    def check(self, prompt: list[int], params: SamplingParams) -> CheckedRequest:
        """Check a prompt (token ids) and its parameters, of which ``n`` is ignored.

        Returns:
            The request, which :meth:`submit` takes any number of times without another check.

        Raises:
            RequestError: the request cannot be served.
        """
        ids, params = self._ids(prompt), self._fields.checked(params)
        if self.tokenizer is None and params.stop:
            raise RequestError(
                "stop strings need a tokenizer, and this engine runs without one", param="stop"
            )
        max_tokens = self._max_tokens(params, len(prompt))
        self._check_vocabulary(params)
        return CheckedRequest(ids, params, max_tokens)

    def submit(
        self, request: CheckedRequest, admission: Admission = DEFAULT_ADMISSION
    ) -> tuple[Stream, Submit]:
        """Return a new sequence and the message that submits it to the engine.

        Args:
            request: the prompt and its parameters; without a seed, a random one is drawn.
            admission: priority, prefix-cache salt and limits in time.
        """
        params = request.params
        params = params.replace(
            n=1,
            max_tokens=request.max_tokens,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
        )
        text = OutputProcessor(self.tokenizer, params) if self.tokenizer else None
        stream = Stream(self._next_id, params, len(request.ids), text, time.monotonic())
        if self.plan.sizes.width > 1:
            stream.drafts = VerifiedDrafts()
        self._next_id += 1
        self.streams[stream.id] = stream
        # an eos ends a grammar even if it is ignored
        ends = () if params.ignore_eos and not params.grammar else self.eos_ids
        return stream, Submit(
            id=stream.id,
            prompt=packed_ids(request.ids),
            params=params,
            priority=admission.priority,
            salt=admission.salt,
            stop_ids=[*params.stop_token_ids, *ends],
            timeout=admission.timeout,
            queue_timeout=admission.queue_timeout,
        )

    def _ids(self, prompt: list[int]) -> NDArray[np.int64]:
        """Convert the prompt to an array, int64 [tokens], and check its ids.

        Raises:
            RequestError: the prompt is empty or has an id outside the model's vocabulary.
        """
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

    def _max_tokens(self, params: SamplingParams, prompt: int) -> int:
        """Return the number of tokens that may be generated after a prompt of ``prompt`` tokens.

        Raises:
            RequestError: the context cannot hold the prompt and ``params.max_tokens``.
        """
        sizes = self.plan.sizes
        context = sizes.context_length
        room = context - prompt
        if room < 1:
            raise prompt_too_long(context, prompt)
        if params.max_tokens is None:
            # a small KV pool limits the output (one page is the scratch page)
            pool = (sizes.num_pages - 1) * sizes.page_size - prompt
            return max(1, min(room, pool))
        if params.max_tokens > room:
            raise context_exceeded(
                context,
                f"you requested {prompt + params.max_tokens} tokens ({prompt} in the prompt, "
                f"{params.max_tokens} for the completion): the prompt is too long for that many; "
                f"max_tokens may be {room}",
                "max_tokens",
            )
        return params.max_tokens

    def _check_vocabulary(self, params: SamplingParams) -> None:
        """Raise RequestError if the parameters name a token id outside the vocabulary."""
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
        """Remove sequences whose output is no longer read.

        Returns:
            The message that aborts them in the engine; None if none of them runs.
        """
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
        """Process the engine's messages of one frame; return their deltas and replies."""
        self.last_received = time.monotonic()
        received = Received()
        for message in messages:
            if isinstance(message, StepOutput):
                self._step(message, received)
            elif isinstance(message, Reply):
                received.replies.append(message)
        return received

    def _step(self, output: StepOutput, received: Received) -> None:
        """Add the deltas of one engine step to ``received``."""
        self._note_progress(output)
        ends = {finished.id: finished for finished in output.finished}
        logprobs = dict(output.logprobs)
        at = 0
        for i, id in enumerate(output.ids):
            count = output.counts[i] if output.counts else 1
            tokens = output.tokens[at : at + count]
            at += count
            stream = self.streams.get(id)
            if stream is not None:
                if output.drafts:
                    stream.verify(output.drafts_of(id), count - 1)
                delta = self._delta(stream, tokens, logprobs.get(id), ends.pop(id, None))
                received.deltas.append((stream, delta))
        for finished in ends.values():
            stream = self.streams.get(finished.id)
            if stream is not None:
                received.deltas.append((stream, self._delta(stream, [], None, finished)))

    def _note_progress(self, output: StepOutput) -> None:
        """Store what a step reports besides tokens: statistics, admissions, prompt logprobs."""
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

    def _prompt_scores(self, id: int, scores: Logprobs) -> None:
        """Append log-probabilities of further prompt tokens to those of sequence ``id``."""
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
        """Return the delta with a sequence's new tokens and, if the sequence ended, its end.

        ``end``: the engine's report of the end; None while the sequence runs.
        """
        if tokens:
            stream.count(len(tokens), self.last_received)
        delta = Delta(
            token_ids=tokens,
            logprobs=logprobs,
            prompt_tokens=stream.prompt_tokens,
            cached_tokens=stream.cached_tokens,
            output_tokens=stream.output_tokens,
            drafts=stream.drafts,
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
            delta.times = stream.times()
            stream.done = True
            self.streams.pop(stream.id, None)
        return delta

    def _text(self, stream: Stream, tokens: list[int], delta: Delta, end: Finished | None) -> None:
        """Set the text of a delta, and end the sequence if a stop string matched.

        ``tokens``: the new tokens. ``end``: the engine's report of the end; None while the sequence
        runs.
        """
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
