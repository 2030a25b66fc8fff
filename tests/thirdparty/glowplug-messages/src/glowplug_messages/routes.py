"""``POST /messages``: text messages in the form of Anthropic's API, answered whole or in events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Literal
from uuid import uuid4

from fastapi import APIRouter
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from glowplug.core.protocols import EngineHandle, OutputPart
from glowplug.core.step.request import SamplingParams

REASONS = {"stop": "end_turn", "length": "max_tokens"}  #: no reason for other ends


class Message(BaseModel, extra="forbid"):
    role: Literal["user", "assistant"]
    content: str


class Messages(BaseModel, extra="forbid"):
    """The body; fields that the route does not have are refused."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int = Field(ge=1)
    system: str = ""
    temperature: float = Field(1.0, ge=0.0, le=1.0)
    stream: bool = False

    def conversation(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return system + [message.model_dump() for message in self.messages]


def routes(engine: EngineHandle) -> APIRouter:
    """Return the route over an engine."""
    router = APIRouter()

    @router.post("/messages")
    async def answer(body: Messages) -> Any:
        prompt = await engine.chat_prompt(body.conversation())
        params = SamplingParams(temperature=body.temperature, max_tokens=body.max_tokens)
        if not body.stream:
            return message(await engine.submit(prompt, params))
        parts = engine.stream(prompt, params)
        first = await anext(parts)  # a request that cannot be served gets an error status
        return StreamingResponse(events(first, parts), media_type="text/event-stream")

    return router


def message(part: OutputPart) -> dict[str, Any]:
    """Return a message with an answer, or with its beginning."""
    return {
        "id": f"msg_{uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": part.text}],
        "stop_reason": REASONS.get(part.finish_reason or ""),
        "usage": {"input_tokens": part.prompt_tokens, "output_tokens": part.output_tokens},
    }


async def events(part: OutputPart, parts: AsyncIterator[OutputPart]) -> AsyncIterator[str]:
    """Yield the events of an answer, which begins with ``part``; leaving ends the sequence."""
    async with aclosing(parts):  # type: ignore[type-var]
        yield event("message_start", message={**message(part), "content": []})
        yield event("ping")
        yield event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        while True:
            if part.text:
                text = {"type": "text_delta", "text": part.text}
                yield event("content_block_delta", index=0, delta=text)
            if part.finish_reason is not None:
                break
            part = await anext(parts)
        if part.finish_reason == "error":
            yield event("error", error={"type": "api_error", "message": part.error})
        else:
            yield event("content_block_stop", index=0)
            end = message(part)
            stop = {"stop_reason": end["stop_reason"]}
            yield event("message_delta", delta=stop, usage=end["usage"])
            yield event("message_stop")


def event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"
