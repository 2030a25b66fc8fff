"""The server as plugins use it: the engine behind their routes, and observers of requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.step.messages import Stats
from glowplug.core.step.request import DEFAULT_ADMISSION, Admission, SamplingParams


@dataclass(frozen=True)
class OutputPart:
    """New output of a sequence; the last part has ``finish_reason``.

    Attributes:
        text: new text, without stop strings; "" without a tokenizer.
        token_ids: new tokens, which may be ahead of ``text``.
        finish_reason: "stop", "length", "abort", "timeout" or "error"; None while it runs.
        error: the message of an end with "error".
        error_code: its code.
        prompt_tokens: number of tokens of the prompt.
        output_tokens: number of tokens so far.
        cached_tokens: tokens of the prompt found in the prefix cache.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    error_code: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0


class EngineHandle(Protocol):
    """The running engine and the server around it, for routes of plugins.

    Use it on the server's event loop. Requests, ``stats`` and ``tokenize`` work from the first
    request on, the other methods while ``extend_app`` runs.

    Attributes:
        plan: the plan.
    """

    plan: EnginePlan

    def stream(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        request_id: str = "",
        admission: Admission = DEFAULT_ADMISSION,
    ) -> AsyncIterator[OutputPart]:
        """Submit one sequence and yield its output; leaving the iteration aborts the sequence.

        Args:
            prompt: a text or token ids.
            params: sampling parameters, with ``n`` 1.
            request_id: id for the log and ``abort``; "" for a new one.
            admission: priority, prefix-cache salt and limits in time.

        Raises:
            RequestError: the request cannot be served. Raised from a route, it becomes an answer
                in OpenAI's form.
        """
        ...

    async def submit(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        request_id: str = "",
        admission: Admission = DEFAULT_ADMISSION,
    ) -> OutputPart:
        """Run one sequence to its end and return its whole output; arguments as in ``stream``.

        Raises:
            RequestError: the request cannot be served, or ended with an error.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End the sequences of a request; an unknown id is ignored."""
        ...

    async def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text.

        Raises:
            RequestError: the engine runs without a tokenizer.
        """
        ...

    async def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the token ids of a conversation by the model's chat template.

        Args:
            messages: dicts with "role" and "content", as OpenAI's chat API has them. A last message
                of the assistant is continued; otherwise the prompt ends with the beginning of one.

        Raises:
            RequestError: the engine runs without a tokenizer, or the template failed.
        """
        ...

    def stats(self) -> Stats:
        """Return the latest statistics."""
        ...

    def admin(self, path: str) -> None:
        """Have the routes of this exact path need the admin key."""
        ...

    def on_start(self, act: Callable[[], Awaitable[None]]) -> None:
        """Await ``act()`` before the engine starts and the server takes requests."""
        ...

    def on_stop(self, act: Callable[[], Awaitable[None]]) -> None:
        """Await ``act()`` after the last request; in reverse order of registration."""
        ...

    def mount(self, path: str, app: Any, *, admin: bool = False) -> None:
        """Mount an ASGI app under ``path``; the server checks the key of each request first.

        Args:
            path: beginning of the paths, such as "/dashboard".
            app: the ASGI app; it gets HTTP requests only.
            admin: the paths need the admin key.
        """
        ...


@dataclass(frozen=True)
class EndedRequest:
    """An HTTP request that ran sequences and has been answered.

    Attributes:
        id: id of the request, as in the response header ``X-Request-Id``.
        job: id of the request in the body, or ``id`` if there is none.
        model: name of the model in the API.
        route: path of the route.
        status: HTTP status; a stream that fails after its start keeps 200.
        streamed: the response was a stream of events.
        started: arrival of the request, seconds since the epoch.
        seconds: time from arrival to the end of the response.
        first_token: seconds from arrival to the first token of any sequence; None without a token.
        queue, prefill, decode: seconds in each phase, the largest of any sequence; None if no
            sequence ended after that phase.
        prompt_tokens, output_tokens, cached_tokens: token counts of all sequences; a shared prompt
            counts once.
        sequences: number of sequences.
        params: sampling parameters of the first sequence.
        finish_reasons: finish reasons of the sequences, each once.
        error: code of the failure; None if the request did not fail.
        trace: the headers ``traceparent`` and ``tracestate`` that the client sent.
    """

    id: str
    job: str
    model: str
    route: str
    status: int
    streamed: bool
    started: float
    seconds: float
    first_token: float | None
    queue: float | None
    prefill: float | None
    decode: float | None
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    sequences: int
    params: SamplingParams
    finish_reasons: tuple[str, ...]
    error: str | None
    trace: Mapping[str, str]


class RequestObserver(Protocol):
    """An object that a plugin registers (hook ``request_observers``) to receive ended requests."""

    def ended(self, request: EndedRequest) -> None:
        """Receive a request after its response.

        The call runs on the server's event loop, so it may take microseconds only.
        """
        ...

    def close(self) -> None:
        """Finish within seconds; the server ends."""
        ...
