"""Who may call what: one dependency on every route, deny by default.

It goes by the path that the router matched, never by a URL rebuilt from the ``Host`` header
(CVE-2026-48710).
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterable
from secrets import compare_digest

from fastapi import FastAPI, Request, routing
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from glowplug.core.errors import PluginLoadError, RequestError
from glowplug.core.plugin.options import ServerOptions


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


class Authoriser:
    """Three levels: open routes, routes for clients (``api_key``), routes for operators
    (``admin_api_key``).

    The admin key opens everything; without one, ``api_key`` opens the admin routes too; without any
    key all is open.
    """

    def __init__(self, options: ServerOptions, admin: Iterable[str]) -> None:
        """``admin``: exact paths of the operators' routes; every path that is not listed anywhere
        is the clients'.
        """
        self._admin_paths = frozenset(admin)
        self._open = frozenset(options.open_routes)
        self._key = _digest(options.api_key) if options.api_key else None
        self._admin = _digest(options.admin_api_key) if options.admin_api_key else None

    def level(self, path: str) -> str:
        """ "open", "client" or "admin" for a request's path."""
        if path in self._open:
            return "open"
        return "admin" if path in self._admin_paths else "client"

    def check(self, level: str, header: str | None) -> None:
        """RequestError 401 or 403 when the ``Authorization`` header does not open ``level``."""
        required = self._key if level == "client" else self._admin or self._key
        if level == "open" or required is None:
            return
        given = _digest(_token(header))
        is_admin = self._admin is not None and compare_digest(given, self._admin)
        if is_admin or compare_digest(given, required):
            return
        if level == "admin" and self._key is not None and compare_digest(given, self._key):
            raise RequestError(
                "this route needs the admin key", code="admin_key_required", status=403
            )
        raise RequestError(
            "missing or wrong API key: send Authorization: Bearer KEY",
            code="invalid_api_key",
            status=401,
        )

    def dependency(self) -> Callable[[Request], Awaitable[None]]:
        async def authorise(request: Request) -> None:
            self.check(self.level(request.scope["path"]), request.headers.get("authorization"))

        return authorise


def _token(header: str | None) -> str:
    scheme, _, token = (header or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def require_guarded(app: FastAPI) -> None:
    """PluginLoadError when a route exists that the dependency does not reach (mounted apps, bare
    Starlette routes).
    """
    for route in leaf_routes(app):
        if not isinstance(route, APIRoute):
            raise PluginLoadError(
                f"route {getattr(route, 'path', route)!r} is not an API route, so authentication "
                "would not cover it; use app.add_api_route or an APIRouter"
            )


def leaf_routes(app: FastAPI) -> list[BaseRoute]:
    """Every route, those of included routers too (newer FastAPI keeps routers as they are)."""
    iterate = getattr(routing, "iter_route_contexts", None)
    return (
        list(app.routes)
        if iterate is None
        else [found.original_route for found in iterate(app.routes)]
    )
