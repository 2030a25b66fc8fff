"""Reading of request bodies.

A body is read with a deadline, parsed by orjson (a large one in a thread), limited in depth and
validated. FastAPI's own body parsing would run before authentication and on the event loop, and
its errors have status 422.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.requests import ClientDisconnect

from glowplug import __version__
from glowplug.core.errors import RequestError
from glowplug.entrypoints.server.errors import from_validation

M = TypeVar("M", bound=BaseModel)
BODY_SECONDS = 60.0  #: time limit for reading a body
MAX_DEPTH = 64  #: levels of nested arrays and objects
THREAD_BYTES = 64 << 10  #: bodies larger than this are parsed off the event loop


def body_of(model: type[M], *, optional: bool = False) -> Callable[[Request], Awaitable[M]]:
    """Return a FastAPI dependency that reads and validates the request's body as ``model``.

    Args:
        model: model of the body.
        optional: a missing body is accepted and has default values.
    """

    async def read(request: Request) -> M:
        raw = await _read(request)
        if optional and not raw:
            return model()
        _check_content_type(request)
        if len(raw) > THREAD_BYTES:
            return await asyncio.to_thread(_parse, raw, model)
        return _parse(raw, model)

    return read


async def _read(request: Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.body()
    except TimeoutError:
        raise RequestError(
            "the request body took too long to arrive", code="body_timeout", status=408
        ) from None
    except ClientDisconnect:
        raise RequestError(
            "the client disconnected before its request was complete", code="client_closed"
        ) from None


def _check_content_type(request: Request) -> None:
    # NOTE: any web page can send text/plain or a form to localhost; for JSON a browser first needs
    # the server's permission (CORS).
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise RequestError(
            "send the body with Content-Type: application/json",
            code="unsupported_media_type",
            status=415,
        )


def _parse(raw: bytes, model: type[M]) -> M:
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH:
        _check_depth(value)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise from_validation(list(error.errors(include_url=False, include_input=False))) from None


def _check_depth(value: Any) -> None:
    """Raise RequestError if ``value`` is nested deeper than MAX_DEPTH levels."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise RequestError(f"the body is nested deeper than {MAX_DEPTH} levels", code="invalid_json")


def install_schema(
    app: FastAPI, bodies: Iterable[type[BaseModel]], replies: Iterable[type[BaseModel]]
) -> None:
    """Add the schemas of request bodies and of replies to the components of ``app.openapi()``."""
    models: list[tuple[type[BaseModel], JsonSchemaMode]] = [
        *((model, "validation") for model in dict.fromkeys(bodies)),
        *((model, "serialization") for model in dict.fromkeys(replies)),
    ]

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title="glowplug", version=__version__, routes=app.routes)
            _, schemas = models_json_schema(models, ref_template="#/components/schemas/{model}")
            document.setdefault("components", {}).setdefault("schemas", {}).update(
                schemas.get("$defs", {})
            )
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
