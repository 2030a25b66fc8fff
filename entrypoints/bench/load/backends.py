"""Request formats and stream parsers, one row for each kind of server.

The load generator is independent of all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from glowplug.entrypoints.bench.load.datasets import BenchPrompt
from glowplug.entrypoints.bench.load.http_stream import (
    Piece,
    ServerTarget,
    events,
    exchange,
    read_answer,
)

Payload = dict[str, Any]


@dataclass
class Outcome:
    """The result of one request as the client saw it.

    Attributes:
        prompt_tokens: prompt length; the server's own count where it reports one.
        start: when the request was sent, in seconds of ``time.perf_counter``.
        end: when the last chunk with tokens arrived, or when the request failed; in the same clock.
        arrivals: arrival time of every chunk that carried tokens, in the same clock.
        output_tokens: from the server's usage when it reports one, else the number of chunks.
        text: the generated text.
        error: why the request failed; empty if it succeeded.
    """

    prompt_tokens: int
    start: float = 0.0
    end: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    output_tokens: int = 0
    text: str = ""
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def latency(self) -> float:
        return self.end - self.start

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.start if self.arrivals else 0.0

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first; 0 with fewer than two tokens."""
        return (
            (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0
        )

    @property
    def itls(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:])]


@dataclass(frozen=True)
class Request:
    """Settings that are the same for all requests of a benchmark run.

    Attributes:
        model: the model's name.
        temperature: sampling temperature.
        ignore_eos: generate past the end-of-sequence token.
        extra: further keys of the body.
        sampling: further sampling parameters by their name in the body.
        logprobs: number of most probable tokens to return at each position besides the generated
            one's log-probability; None: no log-probabilities.
        id_prefix: the request's id is this and its number, sent as X-Request-Id; "": none.
    """

    model: str
    temperature: float = 0.0
    ignore_eos: bool = True
    extra: Payload = field(default_factory=dict)
    sampling: Payload = field(default_factory=dict)
    logprobs: int | None = None
    id_prefix: str = ""


Build = Callable[[BenchPrompt, Request], Payload]
#: reads one event of the stream into an outcome; True if the event carried tokens
Read = Callable[[Payload, Outcome], bool]


def _completion(prompt: BenchPrompt, request: Request) -> Payload:
    """Return the request body for OpenAI's ``/v1/completions``."""
    return {
        "model": request.model,
        "prompt": prompt.text if prompt.ids is None else prompt.ids,
        "max_tokens": prompt.output_len,
        "temperature": request.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": request.ignore_eos,
        **request.sampling,
        **({} if request.logprobs is None else {"logprobs": request.logprobs}),
        **request.extra,
    }


def _chat(prompt: BenchPrompt, request: Request) -> Payload:
    """Return the request body for OpenAI's ``/v1/chat/completions``."""
    payload = _completion(prompt, replace(request, logprobs=None, extra={}))
    payload["messages"] = [{"role": "user", "content": payload.pop("prompt")}]
    if request.logprobs is not None:
        payload |= {"logprobs": True, "top_logprobs": request.logprobs}
    return payload | request.extra


def _generate(prompt: BenchPrompt, request: Request) -> Payload:
    """Return the request body for SGLang's ``/generate``."""
    source = {"text": prompt.text} if prompt.ids is None else {"input_ids": prompt.ids}
    sampling = {
        "temperature": request.temperature,
        "max_new_tokens": prompt.output_len,
        "ignore_eos": request.ignore_eos,
        **request.sampling,
    }
    scores: Payload = {}
    if request.logprobs is not None:
        scores = {"return_logprob": True, "top_logprobs_num": request.logprobs}
    return {**source, "sampling_params": sampling, "stream": True, **scores, **request.extra}


def _usage(event: Payload, outcome: Outcome) -> None:
    usage = event.get("usage")
    if usage:
        outcome.output_tokens = usage.get("completion_tokens", outcome.output_tokens)
        outcome.prompt_tokens = usage.get("prompt_tokens", outcome.prompt_tokens)


def _read_completion(event: Payload, outcome: Outcome) -> bool:
    """Add an event of ``/v1/completions`` to ``outcome``; return whether it adds a token."""
    _usage(event, outcome)
    choices = event.get("choices")
    if not choices:
        return False
    text = choices[0].get("text") or ""
    outcome.text += text
    # NOTE: a special token, or one that is half a character, arrives as a chunk without text; it
    # still counts as a token.
    return bool(text) or choices[0].get("finish_reason") is None


def _read_chat(event: Payload, outcome: Outcome) -> bool:
    """Add an event of ``/v1/chat/completions`` to ``outcome``; return whether it adds text."""
    _usage(event, outcome)
    choices = event.get("choices")
    if not choices:
        return False
    delta = choices[0].get("delta") or {}
    text = (delta.get("reasoning_content") or delta.get("reasoning") or "") + (
        delta.get("content") or ""
    )
    outcome.text += text
    return bool(text)


def _read_generate(event: Payload, outcome: Outcome) -> bool:
    """Add an event of ``/generate`` to ``outcome``; return whether it adds text."""
    meta = event.get("meta_info") or {}
    before = outcome.output_tokens
    outcome.output_tokens = meta.get("completion_tokens", before)
    outcome.prompt_tokens = meta.get("prompt_tokens", outcome.prompt_tokens)
    outcome.text = event.get("text") or outcome.text  # cumulative
    return outcome.output_tokens > before


@dataclass(frozen=True)
class Backend:
    """The request and response format of one kind of server and route.

    Attributes:
        path: the route.
        build: makes the JSON body of a request.
        read: reads one event of the stream into an ``Outcome``.
        takes_ids: True if prompts may be token ids.
    """

    path: str
    build: Build
    read: Read
    takes_ids: bool = True


_COMPLETIONS = Backend("/v1/completions", _completion, _read_completion)
_CHAT = Backend("/v1/chat/completions", _chat, _read_chat, takes_ids=False)
_NATIVE = Backend("/generate", _generate, _read_generate)
BACKENDS = {
    "glowplug": _COMPLETIONS,
    "glowplug-chat": _CHAT,
    "openai": _COMPLETIONS,
    "openai-chat": _CHAT,
    "vllm": _COMPLETIONS,
    "vllm-chat": _CHAT,
    "lmdeploy": _COMPLETIONS,
    "lmdeploy-chat": _CHAT,
    "sglang": _NATIVE,
    "sglang-native": _NATIVE,
    "sglang-oai": _COMPLETIONS,
    "sglang-oai-chat": _CHAT,
}


@dataclass
class RawAnswer:
    """The unparsed answer to one request, complete or failed.

    Attributes:
        prompt_tokens: prompt length in tokens.
        start: when the request was sent, in seconds of ``time.perf_counter``.
        end: when the exchange ended, in the same clock.
        pieces: the bytes of the answer with their arrival times.
        error: why there is no answer; empty if there is one.
    """

    prompt_tokens: int
    start: float = 0.0
    end: float = 0.0
    pieces: list[Piece] = field(default_factory=list)
    error: str = ""

    @property
    def size(self) -> int:
        return sum(len(piece) for _, piece in self.pieces)


async def send_prompt(
    target: ServerTarget,
    backend: Backend,
    prompt: BenchPrompt,
    request: Request,
    number: int | None = None,
) -> RawAnswer:
    """Send one prompt and receive the whole stream that answers it.

    ``number`` is that of the request, for its id; None: a warm-up, which has no id.

    A failure of the server raises nothing; it is described in ``RawAnswer.error``.
    """
    raw = RawAnswer(prompt.input_len)
    payload = backend.build(prompt, request)
    if request.id_prefix and number is not None:
        target = target.with_header("X-Request-Id", f"{request.id_prefix}{number}")
    raw.start = time.perf_counter()
    try:
        raw.pieces = await exchange(target, "POST", backend.path, payload)
    except OSError as error:
        raw.error = f"{type(error).__name__}: {error}"
    raw.end = time.perf_counter()
    return raw


def outcome_of(raw: RawAnswer, backend: Backend) -> Outcome:
    """Parse a received answer and return the outcome of its request.

    A failure of the server raises nothing; it is described in ``Outcome.error``.
    """
    outcome = Outcome(raw.prompt_tokens, start=raw.start, error=raw.error)
    try:
        if not outcome.error:
            _read(raw, backend, outcome)
    except (OSError, EOFError, ValueError) as error:
        outcome.error = outcome.error or f"{type(error).__name__}: {error}"
    outcome.end = outcome.arrivals[-1] if outcome.ok and outcome.arrivals else raw.end
    if outcome.ok and not outcome.arrivals:
        outcome.error = "the server sent no token"
    return outcome


def _read(raw: RawAnswer, backend: Backend, outcome: Outcome) -> None:
    """Parse an answer into ``outcome``."""
    answer = read_answer(raw.pieces)
    if answer.status != 200:
        outcome.error = f"HTTP {answer.status}: {answer.read().decode(errors='replace')[:500]}"
        return
    for at, data in events(answer.pieces):
        event = orjson.loads(data)
        if "error" in event:
            outcome.error = f"in the stream: {event['error']}"[:500]
        elif backend.read(event, outcome):
            outcome.arrivals.append(at)
    outcome.output_tokens = outcome.output_tokens or len(outcome.arrivals)
