"""The request log: one line for each HTTP request, when it has been answered. Prompts and answers
never appear.

A :class:`RequestRecord` travels in the ASGI scope under ``RECORD``. The outermost layer makes it
and logs it. The
layers below fill in their part: the job the counts of tokens, the error handlers the reason of a
refusal.
"""

from __future__ import annotations

import logging
import re
import time
from dataclasses import dataclass, field
from typing import Any

import orjson

from glowplug.core.errors import EngineDead, RequestError
from glowplug.entrypoints.front.delta import Delta
from glowplug.entrypoints.server.logs import printable

logger = logging.getLogger("glowplug.request")

RECORD = "glowplug.record"  #: key of the ASGI scope
CLIENT_CLOSED = 499  #: status of a request whose client left before the answer; nobody reads it
UNANSWERED = 500  #: status until the answer starts, as of a server error that never got that far
MAX_TEXT = 300  #: characters of a path or a reason

_PLAIN = re.compile(
    r"[!#-~]{1,300}"
)  #: what a line shows without quotes: visible ASCII, no quotation mark


@dataclass(slots=True)
class RequestRecord:
    """The log entry of one request.

    Attributes:
        id: the id in the response header ``X-Request-Id``.
        route: path of the matched route, else the requested path.
        client: address and port of the peer.
        started, first: arrival of the request and of its first token, seconds (monotonic).
        status: HTTP status; a stream that fails after its start keeps 200.
        seconds: from arrival to the end of the answer.
        job: the id in the body, where it differs from ``id``.
        streamed: the answer is a stream of events.
        generates: the request runs sequences. The counts cover all of them, a shared prompt once.
        cached: prompt tokens found in the prefix cache, by number of the prompt.
        finish: finish reasons of the sequences, each once.
        code, reason: error code and message of a refusal or failure.
        left: the client left before the answer was complete.
    """

    id: str
    method: str
    route: str
    client: str = ""
    started: float = field(default_factory=time.monotonic)
    status: int = UNANSWERED
    seconds: float = 0.0
    job: str = ""
    streamed: bool = False
    generates: bool = False
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached: dict[int, int] = field(default_factory=dict)
    first: float | None = None
    finish: dict[str, None] = field(default_factory=dict)
    code: str | None = None
    reason: str | None = None
    left: bool = False

    def begin(self, job: str, prompt_tokens: int) -> None:
        """Note that the request has been accepted and will run."""
        self.generates = True
        self.job = job if job != self.id else ""
        self.prompt_tokens = prompt_tokens

    def leave(self) -> None:
        """Note that the client has left. Without an answer so far the status becomes 499."""
        self.left = True
        if self.status == UNANSWERED:
            self.status = CLIENT_CLOSED

    def end_sequence(self, prompt: int, last: Delta) -> None:
        """Add the counts of a sequence of prompt number ``prompt`` from its last delta, finished or
        not.
        """
        self.output_tokens += last.output_tokens
        self.cached[prompt] = max(self.cached.get(prompt, 0), last.cached_tokens)
        if last.finish_reason is not None:
            self.finish[last.finish_reason] = None

    def fail(self, error: Exception) -> None:
        """Note why the request failed: code and message of a RequestError, the type alone of an
        unexpected error.
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
        """Return the record's fields for the JSON format, with text from the client escaped and
        cut.
        """
        found: dict[str, Any] = {
            "message": f"{_shown(self.method)} {_shown(self.route)} {self.status}",
            "id": self.id,
            "method": _cut(self.method),
            "route": _cut(self.route),
            "status": self.status,
            "client": _cut(self.client),
            "seconds": round(self.seconds, 6),
        }
        if self.job:
            found["rid"] = self.job
        if self.generates:
            found |= {
                "prompt_tokens": self.prompt_tokens,
                "output_tokens": self.output_tokens,
                "cached_tokens": sum(self.cached.values()),
                "stream": self.streamed,
                "first_token_seconds": None
                if self.first is None
                else round(self.first - self.started, 6),
                "finish_reason": ",".join(self.finish) or None,
            }
        if self.code is not None or self.reason is not None:
            found |= {"code": self.code, "error": _cut(self.reason or "")}
        if self.left:
            found["client_left"] = True
        return found

    def __str__(self) -> str:
        """Return the record for the human format: ``POST /v1/completions 200 id=... in=5 out=16 ...
        finish=length``.
        """
        parts = [_shown(self.method), _shown(self.route), str(self.status), f"id={_shown(self.id)}"]
        if self.job:
            parts.append(f"rid={_shown(self.job)}")
        parts.append(f"client={_shown(self.client)}")
        if self.generates:
            first = "-" if self.first is None else f"{self.first - self.started:.3f}s"
            parts += [
                f"in={self.prompt_tokens}",
                f"out={self.output_tokens}",
                f"cached={sum(self.cached.values())}",
                f"first={first}",
            ]
        parts.append(f"total={self.seconds:.3f}s")
        if self.generates:
            parts += [
                f"finish={','.join(self.finish) or '-'}",
                *(["stream"] if self.streamed else []),
            ]
        if self.left:
            parts.append("client left")
        if self.code is not None:
            parts.append(f"code={_shown(self.code)}")
        if self.reason is not None:
            parts.append(f"error={_shown(self.reason)}")
        return " ".join(parts)


class RequestLog:
    """Writes records. Polls (health, metrics) have level debug, unless they are refused with a 4xx
    status.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled

    def write(self, record: RequestRecord, poll: bool = False) -> None:
        """Log an answered request: server errors and failed streams as warnings, others at level
        info.
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


def _cut(text: str) -> str:
    return printable(text[:MAX_TEXT])


def _shown(text: str) -> str:
    """Return ``text`` as one word of a line, quoted where it could be read as several."""
    return text if _PLAIN.fullmatch(text) else orjson.dumps(_cut(text)).decode() if text else "-"
