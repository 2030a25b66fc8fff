"""Files of the page at ``/``, as routes that need no key.

The files are static and contain no data of the server; ``SETTINGS`` only states whether the other
routes need a key. Every response has a Content-Security-Policy
that allows the server's own scripts and styles only: nothing inline, and nothing of other hosts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.resources import files

import orjson
from fastapi import Request
from starlette.responses import Response

INDEX = "index.html"  #: the file at ``/``
SETTINGS = "/page/settings.json"  #: path of ``{"key_required": ...}``
#: media type by suffix of a file; files with other suffixes are not served
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class PageFile:
    """A file of the page.

    Attributes:
        path: path of its route.
        respond: coroutine that handles a request.
    """

    path: str
    respond: Callable[[Request], Awaitable[Response]]


def page_files(key_required: bool) -> list[PageFile]:
    """Return the files of the page: ``/`` for INDEX, ``/page/NAME`` for the others, and SETTINGS.

    Args:
        key_required: the routes that the page calls need a key. The page then shows its form for
            the key before it calls them.
    """
    folder = files(__package__) / "static"
    settings = orjson.dumps({"key_required": key_required})
    found = [PageFile(SETTINGS, _responder(settings, "application/json"))]
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        media_type = MEDIA_TYPES.get(file.name[file.name.rfind(".") :])
        if media_type is not None:
            path = "/" if file.name == INDEX else f"/page/{file.name}"
            found.append(PageFile(path, _responder(file.read_bytes(), media_type)))
    return found


def _responder(content: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    """Return a coroutine function that sends ``content``, or 304 to a browser that has it."""
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {**HEADERS, "ETag": tag}

    async def respond(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=media_type)

    return respond
