"""The engine handle of plugins' routes, and the checks of the routes that they add."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from importlib.util import find_spec
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute, APIWebSocketRoute
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from glowplug.core.errors import RequestError
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.loading import PluginSource, failed
from glowplug.core.protocols import OutputPart
from glowplug.core.step.messages import Stats
from glowplug.core.step.request import DEFAULT_ADMISSION, Admission, SamplingParams
from glowplug.entrypoints.front.chat.turn import Turn
from glowplug.entrypoints.server.context import Context
from glowplug.entrypoints.server.errors import from_exception
from glowplug.entrypoints.server.generate import prompts
from glowplug.entrypoints.server.transport import auth

Act = Callable[[], Awaitable[None]]

WEBSOCKET_PACKAGES = ("websockets", "wsproto")  #: packages by which uvicorn serves websockets


class ServerHandle:
    """``EngineHandle`` of a server.

    Attributes:
        starts: functions to await before the engine starts.
        stops: functions to await after the last request.
    """

    def __init__(self, app: FastAPI, context: Context, authoriser: auth.Authoriser) -> None:
        self.plan: EnginePlan = context.plan
        self.starts: list[Act] = []
        self.stops: list[Act] = []
        self._app = app
        self._context = context
        self._authoriser = authoriser

    async def stream(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        request_id: str = "",
        admission: Admission = DEFAULT_ADMISSION,
    ) -> AsyncIterator[OutputPart]:
        ids = await self.tokenize(prompt) if isinstance(prompt, str) else prompt
        client = self._context.client
        request = client.check(ids, params)
        name = request_id or f"plugin-{uuid.uuid4().hex}"
        async with aclosing(
            client.generate(request, request_id=name, admission=admission)  # type: ignore[type-var]
        ) as deltas:
            async for delta in deltas:
                yield OutputPart(
                    delta.text,
                    list(delta.token_ids),
                    delta.finish_reason,
                    delta.error,
                    delta.error_code,
                    delta.prompt_tokens,
                    delta.output_tokens,
                    delta.cached_tokens,
                )

    async def submit(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        request_id: str = "",
        admission: Admission = DEFAULT_ADMISSION,
    ) -> OutputPart:
        text, ids, last = "", [], OutputPart()
        parts = self.stream(prompt, params, request_id=request_id, admission=admission)
        async for last in parts:
            text += last.text
            ids += last.token_ids
        if last.finish_reason == "error":
            raise RequestError(last.error or "the request failed", code=last.error_code, status=500)
        counts = last.prompt_tokens, last.output_tokens, last.cached_tokens
        return OutputPart(text, ids, last.finish_reason, None, None, *counts)

    async def abort(self, request_id: str) -> None:
        await self._context.client.abort(request_id)

    async def tokenize(self, text: str) -> list[int]:
        tokenizer = self._context.tokenizer
        if tokenizer is None:
            raise RequestError("this engine runs without a tokenizer: send token ids")
        return list(await asyncio.to_thread(tokenizer.encode, text))

    async def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        prefilled = bool(messages) and messages[-1].get("role") == "assistant"
        turn = Turn(messages, add_generation_prompt=not prefilled, continue_final_message=prefilled)
        return (await prompts.of_turn(self._context, turn)).ids

    def stats(self) -> Stats:
        return self._context.client.stats()

    def admin(self, path: str) -> None:
        self._authoriser.close(path)

    def on_start(self, act: Act) -> None:
        self.starts.append(act)

    def on_stop(self, act: Act) -> None:
        self.stops.append(act)

    def mount(self, path: str, app: Any, *, admin: bool = False) -> None:
        level = "admin" if admin else "client"
        self._app.mount(path, GuardedApp(app, self._authoriser, level))


class GuardedApp(auth.Guarded):
    """A mounted ASGI app behind the check of keys."""

    def __init__(self, app: ASGIApp, authoriser: auth.Authoriser, level: str) -> None:
        self._app = app
        self._authoriser = authoriser
        self._level = level

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        given = headers.get(b"authorization")
        try:
            self._authoriser.check(self._level, given.decode("latin-1") if given else None)
        except RequestError as error:
            await from_exception(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


class RouteChecks:
    """The checks of the routes that each plugin adds.

    Args:
        app: the app, with the server's own routes.
    """

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._known = auth.leaf_routes(app)

    def check(self, source: PluginSource) -> None:
        """Check the routes that have been added since the last call.

        Args:
            source: the plugin that added them.

        Raises:
            PluginLoadError: authentication would not cover a route, another route has its method
                and path, or it is a websocket and no package for them is installed.
        """
        routes = auth.leaf_routes(self._app)
        added = [route for route in routes if route not in self._known]
        fault = (
            auth.unguarded(leaf.route for leaf in added)
            or clash(self._known, added)
            or missing_package(added)
        )
        if fault:
            raise failed(source, fault, "extend_app")
        self._known = routes


def clash(own: Iterable[auth.LeafRoute], added: Iterable[auth.LeafRoute]) -> str:
    """Return which of the ``added`` routes has the method and path of another; "" if none has.

    Args:
        own: the routes before.
        added: the routes of a plugin.
    """
    taken: dict[tuple[str, str], Any] = {}
    for route, path in (*own, *added):
        for method in methods(route):
            assert isinstance(route, APIRoute | APIWebSocketRoute)
            first = taken.setdefault((method, path), route.endpoint)
            if first is not route.endpoint:
                return (
                    f"{method} {path} of {route.endpoint.__module__} clashes with the route "
                    f"of {first.__module__}: give it another path"
                )
    return ""


def methods(route: BaseRoute) -> Iterable[str]:
    """Return a route's HTTP methods, or "WEBSOCKET"; none for a mounted app."""
    if isinstance(route, APIWebSocketRoute):
        return ("WEBSOCKET",)
    return route.methods or () if isinstance(route, APIRoute) else ()


def serves_websockets(app: FastAPI) -> bool:
    """Return whether the app has a websocket route."""
    return any(isinstance(leaf.route, APIWebSocketRoute) for leaf in auth.leaf_routes(app))


def missing_package(added: Iterable[auth.LeafRoute]) -> str:
    """Return why a websocket route cannot be served; "" if there is none or it can be."""
    for route, path in added:
        if isinstance(route, APIWebSocketRoute) and not any(map(find_spec, WEBSOCKET_PACKAGES)):
            return (
                f"the websocket route {path} needs one of the packages "
                f"{' and '.join(WEBSOCKET_PACKAGES)}: pip install 'glowplug[websockets]'"
            )
    return ""
