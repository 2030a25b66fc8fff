"""Websockets of plugins' routes: refusals before they are accepted, and errors afterwards."""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.types import Message, Send

from glowplug.core.errors import RequestError
from glowplug.entrypoints.server.errors import sanitise
from glowplug.entrypoints.server.request_log import RequestRecord

WEBSOCKET = "websocket"  #: type of the ASGI scope
SWITCHING = 101  #: HTTP status of a websocket that was accepted
REFUSED = 403  #: HTTP status of a websocket that a route closes before it accepts it

POLICY_VIOLATION = 1008  #: close code after an error of the request (RFC 6455, section 7.4.1)
INTERNAL_ERROR = 1011  #: close code after an error of the server
MAX_REASON_BYTES = 123  #: size of the reason in a close frame

Headers = list[tuple[bytes, bytes]]


def refuse_origin(headers: Headers, origins: Collection[str]) -> RequestError | None:
    """Return an error if a page of another site opens the websocket; None otherwise.

    Browsers apply the rules of CORS to HTTP requests only, and let the pages of any site open a
    websocket. Clients other than browsers send no ``Origin``.

    Args:
        headers: headers of the request, with one ``Host``.
        origins: origins of other sites that are allowed; "*" for any.
    """
    given = dict(headers)
    origin = given.get(b"origin", b"").decode("latin-1")
    host = given[b"host"].decode("latin-1")
    if not origin or {"*", origin} & set(origins) or urlsplit(origin).netloc == host:
        return None
    return RequestError(
        "pages of this origin may not open websockets: add it to server.cors_origins",
        code="origin_not_allowed",
        status=403,
    )


def tagged_websocket(send: Send, record: RequestRecord) -> Send:
    """Return an ASGI ``send`` that adds the request id to the handshake and records its status.

    A response to an error, sent after the websocket was accepted, becomes a close frame: its code
    is 1008 for errors of the request and 1011 for others, its reason the error's message.
    """
    id_header = (b"x-request-id", record.id.encode())

    async def tagged(message: Message) -> None:
        kind = message["type"]
        accepted = record.status == SWITCHING
        if kind == "websocket.accept":
            record.status = SWITCHING
            message["headers"] = [*message.get("headers", ()), id_header]
        elif kind == "websocket.http.response.start":
            if accepted:
                message = _closing(message["status"], record)
            else:
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), id_header]
        elif kind == "websocket.http.response.body" and accepted:
            return
        elif kind == "websocket.close" and not accepted:
            record.status = REFUSED
        await send(message)

    return tagged


def _closing(status: int, record: RequestRecord) -> Message:
    """Return the message that closes a websocket after an error with this HTTP status."""
    reason = sanitise(record.reason or "").encode()[:MAX_REASON_BYTES].decode(errors="ignore")
    code = POLICY_VIOLATION if status < 500 else INTERNAL_ERROR
    return {"type": "websocket.close", "code": code, "reason": reason}
