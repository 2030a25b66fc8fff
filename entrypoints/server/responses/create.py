"""``POST /v1/responses``."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any

import orjson
from fastapi import Depends, Request
from starlette.responses import Response

from glowplug.core.errors import RequestError, context_exceeded
from glowplug.core.step.request import SamplingParams
from glowplug.entrypoints.front.chat.turn import Turn
from glowplug.entrypoints.server.context import Context, get_context
from glowplug.entrypoints.server.generate import prompts
from glowplug.entrypoints.server.generate.job import Job
from glowplug.entrypoints.server.generate.params import openai_params, renamed, unsupported
from glowplug.entrypoints.server.generate.requests import openai_job, warning_headers
from glowplug.entrypoints.server.generate.truncation import shortened
from glowplug.entrypoints.server.generate.turns import PreparedTurn, prepare
from glowplug.entrypoints.server.openai.respond import stream_deltas, whole_deltas
from glowplug.entrypoints.server.protocol.response_request import ResponseRequest
from glowplug.entrypoints.server.responses.answer import (
    ResponseEvents,
    WholeResponse,
    recorded,
)
from glowplug.entrypoints.server.responses.fields import check_fields, logprobs_of
from glowplug.entrypoints.server.responses.objects import ResponseObject
from glowplug.entrypoints.server.responses.store import StoredResponse
from glowplug.entrypoints.server.responses.turn import input_items, stored_items, turn_of
from glowplug.entrypoints.server.transport.body import THREAD_BYTES, body_of

#: field of chat completions -> field of responses
NAMES = {
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
}


async def create(
    request: Request,
    body: Annotated[ResponseRequest, Depends(body_of(ResponseRequest))],
    context: Annotated[Context, Depends(get_context)],
) -> Response:
    context.check_model(body.model)
    headers = warning_headers(check_fields(body))
    stored = _is_stored(context, body)
    with renamed(NAMES):
        prepared = await _prepared(context, body)
        job = await openai_job(request, context, body, [prepared.prompt], [prepared.form.params])
    made = ResponseObject(context, body, stored)
    kind = ResponseEvents if body.stream else WholeResponse
    answer = kind(context, made, prepared, logprobs_of(body))
    entry = _entry(body, made, job) if stored else None
    deltas = recorded(context, job.run(context), answer, entry)
    if isinstance(answer, ResponseEvents):
        return stream_deltas(context, deltas, answer, headers, answer.failure)
    return await whole_deltas(request, context, deltas, answer, headers)


def _is_stored(context: Context, body: ResponseRequest) -> bool:
    """Return whether the response is kept."""
    if body.store and not context.stored.enabled:
        raise unsupported("store", "is off on this server (server.stored_responses = 0)")
    return context.stored.enabled and body.store is not False


async def _prepared(context: Context, body: ResponseRequest) -> PreparedTurn:
    """Return the turn of a request, ready to run."""
    turn = await _turn(context, body)
    if body.truncation == "auto":
        turn = await shortened(context, turn, body.max_output_tokens or 1)
    return await prepare(context, turn, partial(_params, context, body))


async def _turn(context: Context, body: ResponseRequest) -> Turn:
    """Return the turn of a request; a long conversation is parsed in a thread.

    Raises:
        RequestError: the stored conversation is longer than a request may be.
    """
    earlier = context.stored.chain(body.previous_response_id)
    size = sum(one.size for one in earlier)
    limit = context.options.max_body_bytes
    if size > limit:
        length = context.plan.sizes.context_length
        reason = f"the stored conversation is larger than {limit} bytes"
        raise context_exceeded(length, reason, "previous_response_id")
    if size > THREAD_BYTES:
        return await asyncio.to_thread(turn_of, body, earlier)
    return turn_of(body, earlier)


def _params(
    context: Context, body: ResponseRequest, prompt: prompts.TokenizedPrompt
) -> SamplingParams:
    """Return the sampling parameters that the body gives."""
    wanted = prompts.bounded_max_tokens(context, prompt, body.max_output_tokens)
    text = body.text.format if body.text is not None else None
    changes = {"response_format": _response_format(text), "stream_options": None}
    fields = body.model_copy(update=changes)
    return openai_params(fields, max_tokens=wanted, logprobs=logprobs_of(body))


def _response_format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return ``text.format`` in the form of chat completions."""
    if given is None:
        return None
    kind = given.get("type")
    if kind == "json_schema":
        if given.get("schema") is None:
            raise RequestError("text.format.schema is required", param="text.format.schema")
        return {"type": "json_schema", "json_schema": {"schema": given["schema"]}}
    if kind not in ("text", "json_object"):
        raise RequestError(
            "text.format.type must be text, json_object or json_schema", param="text.format.type"
        )
    return {"type": kind}


def _entry(body: ResponseRequest, made: ResponseObject, job: Job) -> StoredResponse:
    """Return a response as it is stored while it is in progress."""
    return StoredResponse(
        made.id,
        body.previous_response_id,
        stored_items(input_items(body)),
        orjson.dumps(made.of("in_progress")),
        job.rid,
    )
