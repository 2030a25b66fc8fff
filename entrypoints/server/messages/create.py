"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import Depends, Request
from starlette.responses import Response

from glowplug.core.step.request import SamplingParams
from glowplug.entrypoints.server.context import Context, get_context
from glowplug.entrypoints.server.generate import prompts
from glowplug.entrypoints.server.generate.params import openai_params, renamed
from glowplug.entrypoints.server.generate.requests import openai_job, warning_headers
from glowplug.entrypoints.server.generate.turns import prepare
from glowplug.entrypoints.server.messages.answer import MessageEvents, WholeMessage
from glowplug.entrypoints.server.messages.fields import check_fields, check_version
from glowplug.entrypoints.server.messages.turn import turn_of
from glowplug.entrypoints.server.openai.respond import stream_deltas, whole_response
from glowplug.entrypoints.server.protocol.messages import CountRequest, MessagesRequest
from glowplug.entrypoints.server.transport.body import body_of
from glowplug.entrypoints.server.transport.streaming import json_response

#: field of chat completions -> field of messages
NAMES = {
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "prompt": "messages",
}


async def create(
    request: Request,
    body: Annotated[MessagesRequest, Depends(body_of(MessagesRequest))],
    context: Annotated[Context, Depends(get_context)],
) -> Response:
    check_version(request)
    context.check_model(body.model)
    headers = warning_headers(check_fields(body))
    with renamed(NAMES):
        prepared = await prepare(context, turn_of(body), partial(_params, context, body))
        params = prepared.form.params
        job = await openai_job(request, context, body, [prepared.prompt], [params])
    parts = (context, body, prepared, job.rid, params.max_tokens or body.max_tokens)
    if body.stream:
        events = MessageEvents(*parts)
        return stream_deltas(context, job.run(context), events, headers, events.failure)
    return await whole_response(request, context, job, WholeMessage(*parts), headers)


async def count_tokens(
    request: Request,
    body: Annotated[CountRequest, Depends(body_of(CountRequest))],
    context: Annotated[Context, Depends(get_context)],
) -> Response:
    """Return the number of tokens that a message's prompt has."""
    check_version(request)
    context.check_model(body.model)
    headers = warning_headers(check_fields(body))
    with renamed(NAMES):
        prompt = await prompts.of_turn(context, turn_of(body, complete=False))
    return json_response({"input_tokens": len(prompt.ids)}, headers)


def _params(
    context: Context, body: MessagesRequest, prompt: prompts.TokenizedPrompt
) -> SamplingParams:
    """Return the sampling parameters that the body gives."""
    config = body.output_config
    made = None
    if config is not None and config.format is not None:
        made = {"type": "json_schema", "json_schema": {"schema": config.format["schema"]}}
    fields = body.model_copy(update={"response_format": made, "stop": body.stop_sequences})
    wanted = prompts.bounded_max_tokens(context, prompt, body.max_tokens)
    return openai_params(fields, max_tokens=wanted, logprobs=None)
