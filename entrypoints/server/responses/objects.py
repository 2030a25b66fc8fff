"""The objects of ``/v1/responses``: the response, its output items and its usage."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from glowplug.entrypoints.server.context import Context
from glowplug.entrypoints.server.generate.blocks import Block
from glowplug.entrypoints.server.protocol.response_request import ResponseRequest
from glowplug.entrypoints.server.responses.fields import ENCRYPTED, logprobs_of
from glowplug.entrypoints.server.responses.items import encrypted

PREFIXES = {"reasoning": "rs_", "content": "msg_", "tool_call": "fc_"}  #: of ids, by kind of block


def new_id(prefix: str) -> str:
    """Return a new id."""
    return prefix + uuid.uuid4().hex


class ResponseObject:
    """The maker of a response's object and of its items.

    Args:
        context: the server's context.
        body: the request.
        stored: the response is kept.
    """

    def __init__(self, context: Context, body: ResponseRequest, stored: bool) -> None:
        self.id = new_id("resp_")
        self._created = int(time.time())
        self._encrypted = ENCRYPTED in (body.include or ())
        self._ids: list[str] = []
        self._shared = {
            **_generation(body),
            **_echoed(body),
            "model": context.model_name,
            "store": stored,
        }

    def item_id(self, block: Block) -> str:
        """Return the id of a block's item."""
        while len(self._ids) <= block.index:
            self._ids.append(new_id(PREFIXES[block.kind]))
        return self._ids[block.index]

    def item(
        self, block: Block, status: str, logprobs: Sequence[dict[str, Any]] = ()
    ) -> dict[str, Any]:
        """Return the output item of a block. An item in progress has no content yet."""
        begun = status != "in_progress"
        head = {"id": self.item_id(block), "status": status}
        if block.kind == "tool_call":
            call = {"call_id": block.call_id, "name": block.name}
            arguments = block.text if begun else ""
            return {"type": "function_call", **head, **call, "arguments": arguments}
        content = [part(block.kind, block.text, logprobs)] if begun else []
        if block.kind == "content":
            return {"type": "message", **head, "role": "assistant", "content": content}
        own: dict[str, Any] = {"summary": [], "content": content}
        if self._encrypted:
            own["encrypted_content"] = encrypted(block.text) if begun else None
        return {"type": "reasoning", **head, **own}

    def of(
        self,
        status: str,
        output: Sequence[dict[str, Any]] = (),
        usage: dict[str, Any] | None = None,
        *,
        error: dict[str, str] | None = None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        """Return the response object.

        Args:
            status: "in_progress", "completed", "incomplete", "cancelled" or "failed".
            output: the output items.
            usage: the token counts in the format of chat; None: not known yet.
            error: code and message of a failure.
            reason: reason of an incomplete response.
        """
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": None if reason is None else {"reason": reason},
            "output": list(output),
            "usage": None if usage is None else _usage(usage),
            **self._shared,
        }


def part(kind: str, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Return the content part of reasoning or content."""
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _generation(body: ResponseRequest) -> dict[str, Any]:
    """Return the fields of the object that state how the answer is generated."""
    reasoning = body.reasoning
    text = body.text.format if body.text is not None else None
    choice = body.tool_choice
    return {
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "top_logprobs": logprobs_of(body) or 0,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "tools": [_tool(tool.model_dump()) for tool in body.tools or ()],
        "tool_choice": choice if isinstance(choice, str) else _named(choice) or "auto",
        "reasoning": {
            "effort": reasoning.effort if reasoning is not None else None,
            "summary": reasoning.summary if reasoning is not None else None,
        },
        "text": {"format": text or {"type": "text"}, "verbosity": "medium"},
        "truncation": body.truncation or "disabled",
    }


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"description": None, "parameters": None, "strict": False, **tool}


def _named(choice: Any) -> dict[str, Any] | None:
    found: dict[str, Any] | None = None if choice is None else choice.model_dump(exclude_none=True)
    return found


def _echoed(body: ResponseRequest) -> dict[str, Any]:
    """Return the fields of the object that repeat those of the request."""
    return {
        "instructions": body.instructions,
        "previous_response_id": body.previous_response_id,
        "metadata": body.metadata or {},
        "service_tier": "default",
        "user": body.user,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
    }


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Return token counts in the format of responses."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {
            "reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]
        },
        "total_tokens": usage["total_tokens"],
    }
