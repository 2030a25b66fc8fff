"""Every error body is ``{"error": {"message", "type", "param", "code"}}``, and none tells of paths
or addresses.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from glowplug.core.errors import EngineDead, QueueFull, RequestError
from glowplug.entrypoints.front.delta import Delta
from glowplug.entrypoints.server.request_log import RECORD, RequestRecord

logger = logging.getLogger("glowplug.server")

MAX_MESSAGE = 1000  #: characters of a message that come from outside
RETRY_AFTER = 5  #: seconds a client should wait while the server starts or drains

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_STATUS_BY_CODE = {
    "queue_full": 429,
    "queue_timeout": 503,
    "timeout": 504,
    "request_timeout": 504,
    "context_length_exceeded": 400,
    "kv_too_small": 400,
    "invalid_request": 400,
    "nan_logits": 500,
}
_PATH = re.compile(r"(?:(?<![\w.])|(?<=\s))/(?:[\w.@+-]+/)+[\w.@+-]*|\b0x[0-9a-fA-F]{6,}\b")


class Unavailable(RequestError):
    """The server takes no work now: it starts, drains, or its engine has died."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message, code=code, status=503)


def sanitise(message: str) -> str:
    """One line, capped, without file paths or memory addresses."""
    line = " ".join(message.split())
    return _PATH.sub("[...]", line)[:MAX_MESSAGE]


def _shown(path: str) -> str:
    """A requested path, spelled so that it is not taken for a file's: ``v1/embeddings``."""
    return path[:256].strip("/") or "/"


def error_body(
    message: str, status: int, *, param: str | None = None, code: str | None = None
) -> bytes:
    """The OpenAI error object as JSON bytes."""
    detail = {
        "message": sanitise(message),
        "type": _TYPES.get(status, "server_error"),
        "param": param,
        "code": code,
    }
    return orjson.dumps({"error": detail})


def error_response(
    message: str,
    status: int,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    return Response(
        error_body(message, status, param=param, code=code), status, headers, "application/json"
    )


def from_exception(error: Exception) -> Response:
    """The answer to a failed request. What we did not raise on purpose is "internal error" and
    nothing more.
    """
    if isinstance(error, RequestError):
        headers = {"Retry-After": str(error.retry_after)} if isinstance(error, QueueFull) else {}
        if error.status == 503:
            headers["Retry-After"] = str(RETRY_AFTER)
        return error_response(
            str(error), error.status, param=error.param, code=error.code, headers=headers
        )
    if isinstance(error, EngineDead):
        return error_response("the engine has stopped", 500, code="engine_dead")
    return error_response("internal error", 500, code="internal_error")


def from_delta(delta: Delta) -> RequestError | None:
    """The error that a sequence's last delta stands for, or None for a regular end."""
    if delta.finish_reason == "timeout":
        return RequestError("the request ran out of time", code="request_timeout", status=504)
    if delta.finish_reason != "error":
        return None
    code = delta.error_code or "engine_error"
    return RequestError(
        delta.error or "the engine could not finish this request",
        code=code,
        status=_STATUS_BY_CODE.get(code, 500),
    )


def from_validation(errors: list[Any]) -> RequestError:
    """The first problem pydantic found, as a sentence with the field's name.

    Of a union every member complains; one that got past the type says more than one that did not,
    as does one that came as far as a field of an object. When none did, all are named.
    """
    first = next((error for error in errors if not error["type"].endswith("_type")), None)
    first = first or next(
        (error for error in errors if _in_a_members_field(error["loc"])), errors[0]
    )
    where = [str(part) for part in first["loc"] if not _is_union_member(str(part))]
    param = ".".join(where) or None
    message = str(first["msg"])
    members = [_kind(member) for member in _members(first["loc"], errors)]
    if first["type"].endswith("_type") and len(members) > 1:
        message = f"Input should be {', '.join(members[:-1])} or {members[-1]}"
    # NOTE: of numbers in lists only token ids have bounds.
    an_id = isinstance(first["loc"][-1], int) and first["type"] in (
        "greater_than_equal",
        "less_than_equal",
    )
    return RequestError(
        f"{param}: {message}" if param else message,
        param=param,
        code="invalid_token_id" if an_id else None,
    )


def _in_a_members_field(loc: tuple[Any, ...]) -> bool:
    member = next(
        (place for place, part in enumerate(loc) if _is_union_member(str(part))), len(loc)
    )
    return any(isinstance(part, str) and not _is_union_member(part) for part in loc[member:])


def _members(loc: tuple[Any, ...], errors: list[Any]) -> list[str]:
    """Members of the union in which ``loc`` ends, in order: they complain beside it, at the same
    place or below.
    """
    if not _is_union_member(str(loc[-1])):
        return []
    place = len(loc) - 1
    beside = (
        error["loc"]
        for error in errors
        if error["loc"][:place] == loc[:place] and len(error["loc"]) > place
    )
    return list(dict.fromkeys(str(found[place]) for found in beside))


def _kind(member: str, many: bool = False) -> str:
    """``list[list[constrained-int]]`` in words."""
    if member.startswith("list["):
        return ("lists of " if many else "a list of ") + _kind(member[5:-1], many=True)
    words = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
    word = words.get(member.removeprefix("constrained-"), "object")
    return word + "s" if many else f"{'an' if word[0] in 'io' else 'a'} {word}"


def _is_union_member(part: str) -> bool:
    """pydantic names the member of a union in the location ("str", "list[int]", "NativeSampling")."""
    plain = part.removeprefix("constrained-")
    return plain in ("str", "int", "float", "bool", "body") or "[" in part or part[:1].isupper()


def _note(request: Request, error: Exception) -> None:
    """Note the error in the request's log record."""
    record: RequestRecord | None = request.scope.get(RECORD)
    if record is not None:
        record.fail(error)


def install(app: FastAPI) -> None:
    """Every way an error leaves the app, in one place. 422 does not exist here."""

    async def deliberate(request: Request, error: Exception) -> Response:
        answer = from_exception(error)
        _note(request, error)
        request.app.state.context.metrics.rejected.inc(labels=(str(answer.status_code),))
        return answer

    async def validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError | ValidationError)
        return await deliberate(request, from_validation(list(error.errors())))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        _note(request, RequestError(str(error.detail)))
        message = {
            404: f"no such route: {request.method} {_shown(request.url.path)}",
            405: f"method {request.method} is not allowed here",
        }.get(error.status_code, str(error.detail))
        return error_response(message, error.status_code, headers=error.headers)

    async def unexpected(request: Request, error: Exception) -> Response:
        headers = {"X-Request-Id": str(request.scope.get("glowplug.request_id", ""))}
        return error_response("internal error", 500, code="internal_error", headers=headers)

    app.add_exception_handler(RequestError, deliberate)
    app.add_exception_handler(EngineDead, deliberate)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(ValidationError, validation)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, unexpected)
