"""Errors of ``/v1/messages`` in Anthropic's form."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response

PREFIX = "/v1/messages"  #: paths whose errors have this form

_TYPE_BY_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def has_own_form(path: str) -> bool:
    """Return whether errors of a path have Anthropic's form."""
    return path == PREFIX or path.startswith(PREFIX + "/")


def message_error(answer: Response, request_id: str | None = None) -> dict[str, Any]:
    """Return the body of an error response in Anthropic's form.

    Args:
        answer: the response in OpenAI's form.
        request_id: id of the request; None leaves it out.
    """
    status = answer.status_code
    other = "api_error" if status >= 500 else "invalid_request_error"
    message = orjson.loads(answer.body)["error"]["message"]
    body = {
        "type": "error",
        "error": {"type": _TYPE_BY_STATUS.get(status, other), "message": message},
    }
    return body if request_id is None else {**body, "request_id": request_id}


def in_own_form(answer: Response, request_id: str) -> Response:
    """Return an error response in Anthropic's form; ``answer`` has OpenAI's."""
    headers = {
        name: value
        for name, value in answer.headers.items()
        if name not in ("content-length", "content-type")
    }
    body = orjson.dumps(message_error(answer, request_id))
    return Response(body, answer.status_code, headers, "application/json")
