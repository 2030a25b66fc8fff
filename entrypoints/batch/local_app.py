"""The server's app with its engine, in this process and without a port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import FastAPI
from starlette.types import Message

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.protocols import Executor, Worker
from glowplug.core.startup.components import build_component
from glowplug.entrypoints.front.client import EngineClient
from glowplug.entrypoints.front.model_text import eos_ids, open_tokenizer
from glowplug.entrypoints.front.open_engine import start_executor
from glowplug.entrypoints.server.app import create_app
from glowplug.entrypoints.server.context import Context


@dataclass(frozen=True)
class LocalAnswer:
    """The response to a request: HTTP status, request id, and the parsed body."""

    status: int
    request_id: str
    body: Any


class LocalApp:
    """The server's app, called without HTTP.

    Attributes:
        context: the objects that all routes share.
    """

    def __init__(self, app: FastAPI) -> None:
        self.context: Context = app.state.context
        self._app = app
        options = self.context.options
        key = options.api_key or options.admin_api_key or ""
        self._headers = [
            (b"host", b"batch"),
            (b"content-type", b"application/json"),
            (b"authorization", b"Bearer " + key.encode()),
        ]

    async def post(self, path: str, body: object) -> LocalAnswer:
        """Send a request to the app and return its response.

        Cancelling the call ends the request.
        """
        data = orjson.dumps(body)
        unread = [{"type": "http.request", "body": data, "more_body": False}]
        sent: list[Message] = []

        async def receive() -> Message:
            if unread:
                return unread.pop()
            await asyncio.get_running_loop().create_future()
            raise AssertionError("the client of a batch never disconnects")

        async def send(message: Message) -> None:
            sent.append(message)

        try:
            await self._app(self._scope(path, len(data)), receive, send)
        except Exception:
            # NOTE: the app sends its response to an unexpected error first, then raises the error
            if not sent:
                raise
        headers = dict(sent[0]["headers"])
        content = b"".join(message.get("body", b"") for message in sent[1:])
        return LocalAnswer(
            sent[0]["status"], headers[b"x-request-id"].decode(), orjson.loads(content)
        )

    def _scope(self, path: str, size: int) -> dict[str, Any]:
        """Return the ASGI scope of a request with a body of ``size`` bytes."""
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [*self._headers, (b"content-length", str(size).encode())],
            "client": None,
            "server": None,
        }


@asynccontextmanager
async def local_app(
    plan: EnginePlan, plugins: PluginSet, executor: Executor
) -> AsyncIterator[LocalApp]:
    """Start the engine of a plan and yield the server's app over it; stop the engine at the end.

    Args:
        plan: the engine's plan.
        plugins: the plan's plugins.
        executor: the plan's executor, not yet started.

    Raises:
        GlowplugError: the engine does not start.
    """
    tokenizer = open_tokenizer(plan, plugins)
    parsers = [
        build_component(plugins, choice, plan, Worker()) for choice in plan.choices_in("outputs")
    ]
    client = EngineClient(plan, tokenizer, eos_ids(plan, tokenizer))
    app = LocalApp(create_app(plan, client, tokenizer, parsers, plugins))
    try:
        await client.start(lambda: start_executor(plan, plugins, executor))
        yield app
    finally:
        await client.close()
        app.context.texts.close()
        app.context.grammars.close()
