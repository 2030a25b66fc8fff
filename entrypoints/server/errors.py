"""Error responses in OpenAI's format.

Every error body is ``{"error": {"message", "type", "param", "code"}}``, except for the paths of
Anthropic's API. File paths and memory addresses are removed from messages.
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
from glowplug.entrypoints.server.messages.errors import has_own_form, in_own_form
from glowplug.entrypoints.server.request_log import RECORD, RequestRecord

logger = logging.getLogger("glowplug.server")

MESSAGE_CHARS_MAX = 1000  #: longest error message sent to a client, in characters
RETRY_AFTER_SECONDS = 5  #: ``Retry-After`` of 503 responses

_TYPE_BY_STATUS = {
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
    "grammar": 400,
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
    """The error of a server that is starting, draining, or without a live engine (503)."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message, code=code, status=503)


def sanitise(message: str) -> str:
    """Convert the message to one line without file paths or memory addresses.

    The line is cut to MESSAGE_CHARS_MAX characters.
    """
    line = " ".join(message.split())
    return _PATH.sub("[...]", line)[:MESSAGE_CHARS_MAX]


def _without_slashes(path: str) -> str:
    """Return a requested path without outer slashes (``v1/embeddings``), or "/" for the root.

    :func:`sanitise` would take a path that begins with a slash for a file path.
    """
    return path[:256].strip("/") or "/"


def error_body(
    message: str, status: int, *, param: str | None = None, code: str | None = None
) -> bytes:
    """Return the OpenAI error object as JSON bytes."""
    detail = {
        "message": sanitise(message),
        "type": _TYPE_BY_STATUS.get(status, "server_error"),
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
    """Return a response whose body is :func:`error_body`."""
    return Response(
        error_body(message, status, param=param, code=code), status, headers, "application/json"
    )


def from_exception(error: Exception) -> Response:
    """Return the response to a failed request.

    An exception other than RequestError and EngineDead becomes "internal error", without details.
    """
    if isinstance(error, RequestError):
        headers = {"Retry-After": str(error.retry_after)} if isinstance(error, QueueFull) else {}
        if error.status == 503:
            headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
        return error_response(
            str(error), error.status, param=error.param, code=error.code, headers=headers
        )
    if isinstance(error, EngineDead):
        return error_response("the engine has stopped", 500, code="engine_dead")
    return error_response("internal error", 500, code="internal_error")


def failure_of(error: Exception) -> dict[str, Any]:
    """Return the fields of an exception's error body: message, type, param and code."""
    detail: dict[str, Any] = orjson.loads(from_exception(error).body)["error"]
    return detail


def from_delta(delta: Delta) -> RequestError | None:
    """Return the error that a sequence's last delta reports; None if the delta has no error."""
    if delta.finish_reason == "timeout" and delta.error_code == "queue_timeout":
        return Unavailable("the request waited too long in the queue", "queue_timeout")
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
    """Return the error for a body that pydantic refused. It reports one problem and its field.

    The first problem other than a wrong type is chosen. A field may allow several types, and
    pydantic then reports a wrong type for each type that the value does not have. If all problems
    are wrong types, one inside an object is preferred. If a field that allows several types has
    none of them, the message lists them all.

    Args:
        errors: ``ValidationError.errors()``.
    """
    first = next((error for error in errors if not error["type"].endswith("_type")), None)
    first = first or next(
        (error for error in errors if _in_field_of_union_member(error["loc"])), errors[0]
    )
    where = [str(part) for part in first["loc"] if not _is_union_member(str(part))]
    param = ".".join(where) or None
    message = str(first["msg"])
    members = [_type_in_words(member) for member in _union_members_at(first["loc"], errors)]
    if first["type"].endswith("_type") and len(members) > 1:
        message = f"Input should be {', '.join(members[:-1])} or {members[-1]}"
    # NOTE: token ids are the only numbers in lists that have bounds.
    an_id = isinstance(first["loc"][-1], int) and first["type"] in (
        "greater_than_equal",
        "less_than_equal",
    )
    return RequestError(
        f"{param}: {message}" if param else message,
        param=param,
        code="invalid_token_id" if an_id else None,
    )


def _in_field_of_union_member(loc: tuple[Any, ...]) -> bool:
    """Return whether an error is in a field of an object that is one of a union's types.

    ``loc``: pydantic's location of the error.
    """
    member = next(
        (place for place, part in enumerate(loc) if _is_union_member(str(part))), len(loc)
    )
    return any(isinstance(part, str) and not _is_union_member(part) for part in loc[member:])


def _union_members_at(loc: tuple[Any, ...], errors: list[Any]) -> list[str]:
    """Return the names of all types that the field at ``loc`` allows.

    pydantic reports at least one error for each allowed type. The names are collected from
    the locations of these errors, in order.

    Args:
        loc: pydantic's location of one of the errors. If it does not end with the name of a type,
            the result is [].
        errors: all errors.
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


def _type_in_words(member: str, many: bool = False) -> str:
    """Return a pydantic type name in words.

    ``list[list[constrained-int]]`` becomes "a list of lists of integers". ``many``: in the plural.
    """
    if member.startswith("list["):
        return ("lists of " if many else "a list of ") + _type_in_words(member[5:-1], many=True)
    words = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
    word = words.get(member.removeprefix("constrained-"), "object")
    return word + "s" if many else f"{'an' if word[0] in 'io' else 'a'} {word}"


def _is_union_member(part: str) -> bool:
    """Return whether a part of an error's location is the name of a union's type, not a field.

    pydantic adds such names to locations: "str", "list[int]", "NativeSampling".
    """
    plain = part.removeprefix("constrained-")
    return plain in ("str", "int", "float", "bool", "body") or "[" in part or part[:1].isupper()


def in_form_of(path: str, answer: Response, request_id: str) -> Response:
    """Return an error response in the form that its path has: OpenAI's, or Anthropic's.

    Args:
        path: the requested path.
        answer: the response in OpenAI's form.
        request_id: id of the request.
    """
    return in_own_form(answer, request_id) if has_own_form(path) else answer


def _answer(request: Request, answer: Response) -> Response:
    """Return an error response in the form of the requested path."""
    id = str(request.scope.get("glowplug.request_id", ""))
    return in_form_of(request.scope["path"], answer, id)


def _record_failure(request: Request, error: Exception) -> None:
    """Store the reason of a failed request in the request's log record."""
    record: RequestRecord | None = request.scope.get(RECORD)
    if record is not None:
        record.fail(error)


async def _on_deliberate(request: Request, error: Exception) -> Response:
    """Record a RequestError or EngineDead in the request's log record, and return its response."""
    answer = from_exception(error)
    _record_failure(request, error)
    request.app.state.context.metrics.rejected.inc(labels=(str(answer.status_code),))
    return _answer(request, answer)


async def _on_validation(request: Request, error: Exception) -> Response:
    """Return the response to a request whose body pydantic refuses."""
    assert isinstance(error, RequestValidationError | ValidationError)
    return await _on_deliberate(request, from_validation(list(error.errors())))


def _method(request: Request) -> str:
    return str(request.scope.get("method", "WEBSOCKET"))


async def _on_http(request: Request, error: Exception) -> Response:
    """Return the response to a request for an unknown route or an unsupported method."""
    assert isinstance(error, HTTPException)
    _record_failure(request, RequestError(str(error.detail)))
    message = {
        404: f"no such route: {_method(request)} {_without_slashes(request.url.path)}",
        405: f"method {request.method} is not allowed here",
    }.get(error.status_code, str(error.detail))
    return _answer(request, error_response(message, error.status_code, headers=error.headers))


async def _on_unexpected(request: Request, error: Exception) -> Response:
    """Return the response to any other exception, without details."""
    headers = {"X-Request-Id": str(request.scope.get("glowplug.request_id", ""))}
    answer = error_response("internal error", 500, code="internal_error", headers=headers)
    return _answer(request, answer)


def install(app: FastAPI) -> None:
    """Install handlers for all exceptions in ``app``; no response then has FastAPI's status 422."""
    app.add_exception_handler(RequestError, _on_deliberate)
    app.add_exception_handler(EngineDead, _on_deliberate)
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(ValidationError, _on_validation)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_unexpected)
