"""The request log: one line for each HTTP request, written after its response.

Prompts and generated text are never logged.

A :class:`RequestRecord` is stored in the ASGI scope under ``RECORD``. The outermost layer creates
and logs it. Inner layers fill in their part: jobs add token counts, error handlers the reason of a
failure.
"""

from __future__ import annotations

import logging
import re
import time
from dataclasses import dataclass, field
from typing import Any

import orjson

from glowplug.core.errors import EngineDead, RequestError
from glowplug.core.step.request import SamplingParams
from glowplug.entrypoints.front.delta import Delta, Times
from glowplug.entrypoints.server.logs import printable

logger = logging.getLogger("glowplug.request")

RECORD = "glowplug.record"  #: key of the ASGI scope
CLIENT_CLOSED = 499  #: logged status if the client disconnected before the response; never sent
UNANSWERED = 500  #: status until the response starts; it stays after an unexpected error
TEXT_CHARS_MAX = 300  #: characters logged of a path or a reason

#: W3C trace context: version, trace id, id of the parent span, flags
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
#: text that is logged without quotes: visible ASCII without a quotation mark
_UNQUOTED = re.compile(r"[!#-~]{1,300}")


@dataclass(slots=True)
class RequestRecord:
    """The log entry of one request.

    Attributes:
        id: the id in the response header ``X-Request-Id``.
        method: the HTTP method.
        route: path of the matched route, else the requested path.
        client: address and port of the peer.
        started, first: arrival time of the request and time of its first token, seconds
            (monotonic).
        status: HTTP status; a stream that fails after its start keeps 200.
        seconds: time from arrival to the end of the response.
        trace: the headers ``traceparent`` and ``tracestate`` of the client.
        trace_id: the trace id in a valid ``traceparent``, else "".
        job: the id in the body if it differs from ``id``, else "".
        streamed: the response is a stream of events.
        generates: the request runs sequences.
        params: sampling parameters of the first sequence; None if no sequence ran.
        sequences: number of sequences.
        times: the longest time of any sequence in each phase.
        prompt_tokens, output_tokens: token counts of all sequences; a shared prompt counts once.
        cached: prompt tokens found in the prefix cache, by index of the prompt.
        finish: finish reasons of the sequences, each once (the keys of a dict, for their order).
        code, reason: error code and message of a failed request.
        left: the client disconnected before the response was complete.
    """

    id: str
    method: str
    route: str
    client: str = ""
    started: float = field(default_factory=time.monotonic)
    status: int = UNANSWERED
    seconds: float = 0.0
    trace: dict[str, str] = field(default_factory=dict)
    trace_id: str = ""
    job: str = ""
    streamed: bool = False
    generates: bool = False
    params: SamplingParams | None = None
    sequences: int = 0
    times: Times = Times()
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached: dict[int, int] = field(default_factory=dict)
    first: float | None = None
    finish: dict[str, None] = field(default_factory=dict)
    code: str | None = None
    reason: str | None = None
    left: bool = False

    def begin(self, job: str, prompt_tokens: int, params: SamplingParams, sequences: int) -> None:
        """Record that the request was accepted.

        Args:
            job: the id given to its sequences.
            prompt_tokens: tokens of its prompts.
            params: sampling parameters of the first sequence.
            sequences: number of sequences.
        """
        self.generates = True
        self.job = job if job != self.id else ""
        self.prompt_tokens = prompt_tokens
        self.params = params
        self.sequences = sequences

    def set_trace(self, trace: dict[str, str]) -> None:
        """Record the client's trace headers."""
        self.trace = trace
        match = _TRACEPARENT.fullmatch(trace.get("traceparent", ""))
        self.trace_id = match.group(1) if match else ""

    def leave(self) -> None:
        """Record a disconnect of the client. If no response has started, the status becomes 499."""
        self.left = True
        if self.status == UNANSWERED:
            self.status = CLIENT_CLOSED

    def end_sequence(self, prompt: int, last: Delta) -> None:
        """Add the token counts and finish reason of a sequence, which may have been cut short.

        Args:
            prompt: index of the sequence's prompt.
            last: the last delta that was received; its counts are the sequence's.
        """
        self.output_tokens += last.output_tokens
        self.cached[prompt] = max(self.cached.get(prompt, 0), last.cached_tokens)
        self.times = self.times.longest(last.times)
        if last.finish_reason is not None:
            self.finish[last.finish_reason] = None

    def fail(self, error: Exception) -> None:
        """Record the reason for the request's failure.

        The reason is the code and message of a RequestError, or only the type of another error.
        """
        if isinstance(error, EngineDead):
            self.code = "engine_dead"
            self.reason = "the engine has stopped"
        elif not isinstance(error, RequestError):
            self.code = "internal_error"
            self.reason = type(error).__name__
        elif error.code == "client_closed":
            self.leave()
        else:
            self.code = error.code
            self.reason = None if error.confidential else str(error)

    def fields(self) -> dict[str, Any]:
        """Return the record's fields for the JSON format.

        Text that comes from the client is escaped and truncated.
        """
        found: dict[str, Any] = {
            "message": f"{_quoted(self.method)} {_quoted(self.route)} {self.status}",
            "id": self.id,
            "method": _truncated(self.method),
            "route": _truncated(self.route),
            "status": self.status,
            "client": _truncated(self.client),
            "seconds": round(self.seconds, 6),
        }
        if self.job:
            found["rid"] = self.job
        if self.trace_id:
            found["trace_id"] = self.trace_id
        if self.generates:
            found |= self._count_fields()
        if self.code is not None or self.reason is not None:
            found |= {"code": self.code, "error": _truncated(self.reason or "")}
        if self.left:
            found["client_left"] = True
        return found

    def _count_fields(self) -> dict[str, Any]:
        """Return the fields of a request that runs sequences."""
        first = None if self.first is None else round(self.first - self.started, 6)
        return {
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "cached_tokens": sum(self.cached.values()),
            "stream": self.streamed,
            "first_token_seconds": first,
            "finish_reason": ",".join(self.finish) or None,
        }

    def __str__(self) -> str:
        """Return the record for the human format.

        Example: ``POST /v1/completions 200 id=... in=5 out=16 ... finish=length``.
        """
        parts = [_quoted(self.method), _quoted(self.route), str(self.status)]
        parts.append(f"id={_quoted(self.id)}")
        if self.job:
            parts.append(f"rid={_quoted(self.job)}")
        if self.trace_id:
            parts.append(f"trace={self.trace_id}")
        parts.append(f"client={_quoted(self.client)}")
        total = f"total={self.seconds:.3f}s"
        parts += [*self._counts(), total, *self._end()] if self.generates else [total]
        if self.left:
            parts.append("client left")
        if self.code is not None:
            parts.append(f"code={_quoted(self.code)}")
        if self.reason is not None:
            parts.append(f"error={_quoted(self.reason)}")
        return " ".join(parts)

    def _counts(self) -> list[str]:
        """Return the token counts and the time of the first token, for the human format."""
        first = "-" if self.first is None else f"{self.first - self.started:.3f}s"
        return [
            f"in={self.prompt_tokens}",
            f"out={self.output_tokens}",
            f"cached={sum(self.cached.values())}",
            f"first={first}",
        ]

    def _end(self) -> list[str]:
        """Return the finish reasons, and "stream" for a streamed response, for the human format."""
        finish = f"finish={','.join(self.finish) or '-'}"
        return [finish, "stream"] if self.streamed else [finish]


class RequestLog:
    """The writer of request records to the log. ``enabled``: option ``log.requests``."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled

    def write(self, record: RequestRecord, poll: bool = False) -> None:
        """Log an answered request.

        The level is warning for server errors and failed streams, else info. Polls (health,
        metrics) have level debug, except with a 4xx status.
        """
        if not self._enabled:
            return
        failed = record.status >= 500 or (record.status == 200 and record.code is not None)
        level = logging.WARNING if failed else logging.INFO
        if poll and not 400 <= record.status < 500:
            level = logging.DEBUG
        logger.log(level, record)


def peer(client: tuple[str, int] | None) -> str:
    """Return ``address:port``, or "" for an unknown client."""
    return f"{client[0]}:{client[1]}" if client else ""


def _truncated(text: str) -> str:
    """Return the first TEXT_CHARS_MAX characters of ``text``, escaped."""
    return printable(text[:TEXT_CHARS_MAX])


def _quoted(text: str) -> str:
    """Return ``text`` as one word of the line: "-" if empty, a JSON string if it needs quotes."""
    return (
        text
        if _UNQUOTED.fullmatch(text)
        else orjson.dumps(_truncated(text)).decode()
        if text
        else "-"
    )
