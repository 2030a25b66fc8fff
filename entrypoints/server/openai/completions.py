"""``POST /v1/completions``."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request
from starlette.responses import Response

from glowplug.core.errors import RequestError
from glowplug.core.step.request import SamplingParams
from glowplug.entrypoints.server.context import Context, get_context
from glowplug.entrypoints.server.generate import prompts
from glowplug.entrypoints.server.generate.params import openai_params
from glowplug.entrypoints.server.generate.requests import openai_job, warning_headers
from glowplug.entrypoints.server.openai.completion_answer import CompletionChunks, WholeCompletion
from glowplug.entrypoints.server.openai.respond import stream_response, whole_response
from glowplug.entrypoints.server.protocol.completions import CompletionRequest
from glowplug.entrypoints.server.transport.body import body_of

DEFAULT_MAX_TOKENS = 16  #: default of ``max_tokens``, as in OpenAI's API


async def completions(
    request: Request,
    body: Annotated[CompletionRequest, Depends(body_of(CompletionRequest))],
    context: Annotated[Context, Depends(get_context)],
) -> Response:
    context.check_model(body.model)
    headers = warning_headers(body.extras())
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError("best_of must equal n", param="best_of", code="unsupported_parameter")
    if body.max_tokens == 0 and not body.echo:
        raise RequestError("max_tokens must be at least 1 (0 is for echo)", param="max_tokens")
    given = await prompts.of_completion(context, body.prompt, body.add_special_tokens)
    params = [_params(context, body, prompt) for prompt in given]
    job = await openai_job(request, context, body, given, params)
    echoed = await _echoed(context, body, given)
    if body.stream:
        chunks = CompletionChunks(context, body, given, echoed, job.rid)
        return stream_response(context, job, chunks, headers)
    whole = WholeCompletion(context, body, given, echoed, job.rid)
    return await whole_response(request, context, job, whole, headers)


def _params(
    context: Context, body: CompletionRequest, prompt: prompts.TokenizedPrompt
) -> SamplingParams:
    """Return the sampling parameters that the body gives for one prompt."""
    room = prompts.remaining_context(context, prompt)
    wanted = body.max_tokens
    if wanted is None:
        wanted = min(context.options.default_max_tokens or DEFAULT_MAX_TOKENS, room)
    # NOTE: scoring a prompt generates one token, which is not returned if max_tokens is 0.
    scored = body.logprobs if body.echo and body.logprobs is not None else None
    return openai_params(
        body, max_tokens=max(1, wanted), logprobs=body.logprobs, prompt_logprobs=scored
    )


async def _echoed(
    context: Context, body: CompletionRequest, given: list[prompts.TokenizedPrompt]
) -> list[str]:
    """Return each prompt as text if ``echo`` was requested, else "" for each."""
    if not body.echo:
        return [""] * len(given)
    return [
        prompt.text
        if prompt.text is not None
        else await context.texts.decode(prompt.ids, skip_special_tokens=body.skip_special_tokens)
        for prompt in given
    ]
