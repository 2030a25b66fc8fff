"""Protocol of objects that observe the server's requests, such as a writer of traces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from glowplug.core.step.request import SamplingParams


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
