"""The routes and the mounted page of the plugin "surface"."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import APIRouter, WebSocket
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from glowplug.core.protocols import EngineHandle
from glowplug.core.step.request import SamplingParams


class Continue(BaseModel):
    """The body of ``POST /continue``."""

    prompt: list[int] | str
    tokens: int = Field(16, ge=1, le=512)
    stream: bool = False


def routes(engine: EngineHandle) -> APIRouter:
    """Return the routes over an engine."""
    router = APIRouter(prefix="/continue")

    async def lines(body: Continue, params: SamplingParams) -> AsyncIterator[str]:
        async for part in engine.stream(body.prompt, params):
            yield json.dumps({"tokens": part.token_ids, "end": part.finish_reason}) + "\n"

    @router.post("")
    async def proceed(body: Continue) -> Any:
        params = SamplingParams(temperature=0.0, max_tokens=body.tokens)
        if body.stream:
            return StreamingResponse(lines(body, params), media_type="application/jsonl")
        answer = await engine.submit(body.prompt, params)
        return {"tokens": answer.token_ids, "end": answer.finish_reason}

    @router.get("/load")
    async def load() -> dict[str, int]:
        stats = engine.stats()
        return {"running": stats.running, "waiting": stats.waiting}

    return router


def live(engine: EngineHandle) -> Callable[[WebSocket], Any]:
    """Return a websocket that answers each prompt with one message per part."""

    async def answer(websocket: WebSocket) -> None:
        await websocket.accept()
        while True:
            body = Continue.model_validate(await websocket.receive_json())
            params = SamplingParams(temperature=0.0, max_tokens=body.tokens)
            async for part in engine.stream(body.prompt, params):
                await websocket.send_json({"tokens": part.token_ids, "end": part.finish_reason})

    return answer


class Page:
    """An ASGI app with one page, which is open while the server runs."""

    def __init__(self) -> None:
        self.states: list[str] = []

    async def open(self) -> None:
        self.states.append("open")

    async def close(self) -> None:
        self.states.append("closed")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = " ".join(self.states).encode()
        headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
