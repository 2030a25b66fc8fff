"""``POST /v1/chat/completions``."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import Depends, Request
from starlette.responses import Response

from glowplug.core.errors import RequestError
from glowplug.core.step.request import SamplingParams
from glowplug.entrypoints.server.context import Context, get_context
from glowplug.entrypoints.server.generate import prompts
from glowplug.entrypoints.server.generate.conversation import turn_of
from glowplug.entrypoints.server.generate.params import openai_params
from glowplug.entrypoints.server.generate.requests import openai_job, warning_headers
from glowplug.entrypoints.server.generate.turns import prepare
from glowplug.entrypoints.server.openai.chat_answer import ChatChunks, WholeChat
from glowplug.entrypoints.server.openai.respond import stream_response, whole_response
from glowplug.entrypoints.server.protocol.chat import ChatRequest
from glowplug.entrypoints.server.transport.body import body_of


async def chat(
    request: Request,
    body: Annotated[ChatRequest, Depends(body_of(ChatRequest))],
    context: Annotated[Context, Depends(get_context)],
) -> Response:
    context.check_model(body.model)
    headers = warning_headers(body.extras())
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    turn = turn_of(body)
    prepared = await prepare(context, turn, partial(_params, context, body), body.input_ids)
    job = await openai_job(request, context, body, [prepared.prompt], [prepared.form.params])
    if body.stream:
        chunks = ChatChunks(context, body, prepared, job.rid)
        return stream_response(context, job, chunks, headers)
    whole = WholeChat(context, body, prepared, job.rid)
    return await whole_response(request, context, job, whole, headers)


def _params(context: Context, body: ChatRequest, prompt: prompts.TokenizedPrompt) -> SamplingParams:
    """Return the sampling parameters that the body gives."""
    wanted = (
        body.wanted_tokens
        if body.wanted_tokens is not None
        else prompts.default_max_tokens(context, prompt)
    )
    return openai_params(
        body, max_tokens=wanted, logprobs=(body.top_logprobs or 0) if body.logprobs else None
    )
