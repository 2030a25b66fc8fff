"""The engine handle of plugins' routes, and the checks of the routes that they add."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from glowplug.core.errors import PluginLoadError, RequestError
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import OutputPart
from glowplug.core.step.messages import Stats
from glowplug.core.step.request import DEFAULT_ADMISSION, Admission, SamplingParams
from glowplug.entrypoints.server.context import Context
from glowplug.entrypoints.server.errors import from_exception
from glowplug.entrypoints.server.transport import auth

Act = Callable[[], Awaitable[None]]


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
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        given = headers.get(b"authorization")
        try:
            self._authoriser.check(self._level, given.decode("latin-1") if given else None)
        except RequestError as error:
            await from_exception(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def refuse_clashes(own: list[BaseRoute], added: list[BaseRoute]) -> None:
    """Refuse a route of a plugin that another route hides.

    Args:
        own: the server's routes.
        added: the routes that plugins added.

    Raises:
        PluginLoadError: two routes have the same method and path; the message names both.
    """
    taken: dict[tuple[str, str], Any] = {}
    for route in (*own, *added):
        if not isinstance(route, APIRoute):
            continue
        for method in route.methods or ():
            first = taken.setdefault((method, route.path), route.endpoint)
            if first is not route.endpoint:
                raise PluginLoadError(
                    f"extend_app: {method} {route.path} of {route.endpoint.__module__} clashes "
                    f"with the route of {first.__module__}; fix: another path, or "
                    "--block-plugin with one of them"
                )
