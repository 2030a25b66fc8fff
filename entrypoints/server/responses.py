"""The ``responses=`` of routes: what ``/openapi.json`` says each status carries."""
from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from glowplug.entrypoints.server.protocol.responses import ErrorBody

_ERRORS = {
    400: "The request is wrong; `error.param` names the field.", 401: "Missing or wrong API key.",
    403: "The route needs the admin key.", 404: "Unknown model.", 408: "The body took too long to arrive.",
    413: "The body is too large.", 415: "The body is not JSON.", 429: "The queue is full; see `Retry-After`.",
    431: "Too many or too large headers.", 500: "Our fault.", 503: "Starting, draining, or the engine has stopped.",
    504: "The request ran out of time."}


def of(model: type[BaseModel], *, stream: bool = False) -> dict[int | str, dict[str, Any]]:
    """200 with ``model`` (and an event stream), and every error with the one error body."""
    good: dict[str, Any] = {"model": model, "description": "The answer."}
    if stream:
        good["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
    return {200: good, **errors()}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """All errors, or only those named."""
    return {status: {"model": ErrorBody, "description": text} for status, text in _ERRORS.items()
            if not statuses or status in statuses}
