"""Authentication: one dependency on every route; routes not listed as open need a key.

The level depends on the path that the router matched, never on a URL rebuilt from the ``Host``
header (CVE-2026-48710).
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterable
from secrets import compare_digest
from typing import NamedTuple

from fastapi import FastAPI, routing
from fastapi.routing import APIRoute, APIWebSocketRoute
from starlette.requests import HTTPConnection
from starlette.routing import BaseRoute, Mount

from glowplug.core.errors import PluginLoadError, RequestError
from glowplug.core.plugin.options import ServerOptions


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


class Authoriser:
    """The check of API keys, which divides the routes into three levels of access.

    Open routes need no key, client routes ``api_key``, admin routes ``admin_api_key``. The admin
    key is valid for all routes. Without an admin key, ``api_key`` is valid for admin routes too.
    Without ``api_key``, client routes are open; without any key, all routes are open.
    """

    def __init__(
        self, options: ServerOptions, admin: Iterable[str], opened: Iterable[str] = ()
    ) -> None:
        """Store the keys and the paths of each level.

        Args:
            options: section ``server`` of the configuration.
            admin: exact paths of the admin routes.
            opened: exact paths of routes that need no key, besides ``open_routes``. All other
                paths are client routes.
        """
        self._admin_paths = set(admin)
        self._open = frozenset((*options.open_routes, *opened))
        self._key = _digest(options.api_key) if options.api_key else None
        self._admin = _digest(options.admin_api_key) if options.admin_api_key else None

    def close(self, path: str) -> None:
        """Add an admin route, by its exact path."""
        self._admin_paths.add(path)

    def level(self, path: str) -> str:
        """Return the level of a path: "open", "client" or "admin"."""
        if path in self._open:
            return "open"
        return "admin" if path in self._admin_paths else "client"

    def check(self, level: str, header: str | None, api_key: str | None = None) -> None:
        """Check that a request has a key that is valid for a level.

        Args:
            level: "open", "client" or "admin".
            header: the header ``Authorization``.
            api_key: the header ``X-Api-Key``, which Anthropic's clients send; used if the other one
                has no token.

        Raises:
            RequestError: the key is missing or wrong (401), or not the admin key (403).
        """
        required = self._key if level == "client" else self._admin or self._key
        if level == "open" or required is None:
            return
        given = _digest(_token(header) or api_key or "")
        is_admin = self._admin is not None and compare_digest(given, self._admin)
        if is_admin or compare_digest(given, required):
            return
        if level == "admin" and self._key is not None and compare_digest(given, self._key):
            raise RequestError(
                "this route needs the admin key", code="admin_key_required", status=403
            )
        raise RequestError(
            "missing or wrong API key: send Authorization: Bearer KEY or X-Api-Key: KEY",
            code="invalid_api_key",
            status=401,
        )

    def dependency(self) -> Callable[[HTTPConnection], Awaitable[None]]:
        """Return the FastAPI dependency that checks the key of each request or websocket."""

        async def authorise(request: HTTPConnection) -> None:
            headers = request.headers
            level = self.level(request.scope["path"])
            self.check(level, headers.get("authorization"), headers.get("x-api-key"))

        return authorise


def _token(header: str | None) -> str:
    """Return the bearer token of the header; "" without one."""
    scheme, _, token = (header or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


class Guarded:
    """Base of mounted apps that check the key themselves."""


def require_guarded(app: FastAPI) -> None:
    """Check that the authentication by :meth:`Authoriser.dependency` covers every route of ``app``.

    Raises:
        PluginLoadError: a route is not covered (a mounted app or a bare Starlette route).
    """
    fault = unguarded(leaf.route for leaf in leaf_routes(app))
    if fault:
        raise PluginLoadError(fault)


def unguarded(routes: Iterable[BaseRoute]) -> str:
    """Return why authentication would not cover one of ``routes``; "" if it covers them all."""
    for route in routes:
        if isinstance(route, Mount) and isinstance(route.app, Guarded):
            continue
        if not isinstance(route, APIRoute | APIWebSocketRoute):
            return (
                f"route {getattr(route, 'path', route)!r} is not an API route, so authentication "
                "would not cover it; use app.add_api_route, app.add_api_websocket_route, an "
                "APIRouter or engine.mount"
            )
    return ""


class LeafRoute(NamedTuple):
    """A route and its path, with the prefixes of the routers that include it."""

    route: BaseRoute
    path: str


def leaf_routes(app: FastAPI) -> list[LeafRoute]:
    """Return every route of ``app``, including those of included routers.

    Newer versions of FastAPI keep an included router as one route, whose own routes lack its
    prefix.
    """
    iterate = getattr(routing, "iter_route_contexts", None)
    found = (
        ((route, getattr(route, "path", "")) for route in app.routes)
        if iterate is None
        else ((one.original_route, one.path or "") for one in iterate(app.routes))
    )
    return [LeafRoute(*one) for one in found]
