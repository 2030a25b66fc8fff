"""``POST /generate``, the native route, in SGLang's format."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import Depends, Request
from starlette.responses import Response

from glowplug.core.errors import RequestError
from glowplug.core.step.request import SamplingParams
from glowplug.entrypoints.server.context import Context, get_context
from glowplug.entrypoints.server.generate import prompts
from glowplug.entrypoints.server.generate.job import Job
from glowplug.entrypoints.server.generate.params import (
    field_errors_at,
    native_params,
    unknown_fields,
)
from glowplug.entrypoints.server.generate.requests import make_job, request_id, warning_headers
from glowplug.entrypoints.server.native.answer import NativeOutputs
from glowplug.entrypoints.server.protocol.native import GenerateRequest, NativeSampling
from glowplug.entrypoints.server.transport.body import body_of
from glowplug.entrypoints.server.transport.streaming import (
    DONE,
    EventStream,
    cancel_on_disconnect,
    event,
    json_response,
)

DEFAULT_MAX_TOKENS = 128  #: output limit without ``max_new_tokens``, as in SGLang


async def generate(
    request: Request,
    body: Annotated[GenerateRequest, Depends(body_of(GenerateRequest))],
    context: Annotated[Context, Depends(get_context)],
) -> Response:
    sampling = _sampling_by_place(body)
    headers = _warnings(body, sampling)
    given = await prompts.of_native(context, body.text, body.input_ids)
    job = await _job(request, context, body, sampling, given)
    ids = [prompt.ids for prompt in given for _ in range(job.n)]
    outputs = NativeOutputs(context, body, _sequence_ids(job, body), ids)
    single = job.n == 1 and _is_single(body)
    if body.stream:
        source = _stream(context, job, outputs, single)
        return EventStream(source, context.metrics, context.options.stall_timeout, headers)
    answers = await cancel_on_disconnect(request, context.metrics, _collect(context, job, outputs))
    return json_response(answers[0] if single else answers, headers)


async def _job(
    request: Request,
    context: Context,
    body: GenerateRequest,
    sampling: Mapping[str, NativeSampling],
    given: list[prompts.TokenizedPrompt],
) -> Job:
    """Check a request to ``/generate`` and return the job that runs its sequences.

    Args:
        request: the HTTP request.
        context: the server's context.
        body: the request body.
        sampling: sampling parameters by their path in the body.
        given: the request's prompts, tokenised.
    """
    params = _params(context, body, sampling, given)
    n = next(iter(sampling.values())).n or 1
    rid = request_id(request, body.rid if isinstance(body.rid, str) else None)
    job = await make_job(request, context, rid, body, given, params, n=n, places=list(sampling))
    if isinstance(body.rid, list):
        job.rids = _sequence_ids(job, body)
    return job


def _warnings(body: GenerateRequest, sampling: Mapping[str, NativeSampling]) -> dict[str, str]:
    """Return the response header that lists unknown fields of the body and its parameters.

    The result is {} if no field is unknown.

    Raises:
        RequestError: a field is known but not supported.
    """
    for place, one in sampling.items():
        with field_errors_at(place):
            unknown_fields(one.extras())
    parts = (body, *sampling.values())
    return warning_headers({name: value for part in parts for name, value in part.extras().items()})


def _is_single(body: GenerateRequest) -> bool:
    """Return whether the request has a single prompt.

    The response is then one object, otherwise a list.
    """
    if body.text is not None:
        return isinstance(body.text, str)
    return bool(body.input_ids) and isinstance(body.input_ids[0], int)  # type: ignore[index]


def _sampling_by_place(body: GenerateRequest) -> dict[str, NativeSampling]:
    """Return the sampling parameters by their path in the body.

    The path is "sampling_params", or for a list "sampling_params.3" and so on.
    """
    given = body.sampling_params
    if not isinstance(given, list):
        return {"sampling_params": NativeSampling.model_validate({}) if given is None else given}
    if not given or len({one.n or 1 for one in given}) != 1:
        raise RequestError(
            "a list of sampling_params must not be empty, and all must have the same n",
            param="sampling_params",
        )
    return {f"sampling_params.{number}": one for number, one in enumerate(given)}


def _params(
    context: Context,
    body: GenerateRequest,
    sampling: Mapping[str, NativeSampling],
    given: list[prompts.TokenizedPrompt],
) -> list[SamplingParams]:
    """Return the engine's sampling parameters for each prompt; a single set applies to all."""
    if len(sampling) not in (1, len(given)):
        raise RequestError(
            f"{len(given)} prompts but {len(sampling)} sampling_params", param="sampling_params"
        )
    top = (body.top_logprobs_num or 0) if body.return_logprob else None
    start = -1 if body.logprob_start_len is None else body.logprob_start_len
    params = []
    for place, one in sampling.items():
        with field_errors_at(place):
            params.append(
                native_params(one, logprobs=top, prompt_logprobs=top if start >= 0 else None)
            )
    limited = [one.max_new_tokens is not None for one in sampling.values()]
    if len(params) == 1:
        params, limited = params * len(given), limited * len(given)
    return [
        one if own else one.replace(max_tokens=_default_max_tokens(context, prompt))
        for one, own, prompt in zip(params, limited, given, strict=True)
    ]


def _default_max_tokens(context: Context, prompt: prompts.TokenizedPrompt) -> int:
    """Return the output limit of a sequence without one, reduced to the room after its prompt."""
    default = context.options.default_max_tokens or DEFAULT_MAX_TOKENS
    return min(default, prompts.remaining_context(context, prompt))


def _sequence_ids(job: Job, body: GenerateRequest) -> list[str]:
    """Return the id of each sequence.

    The ids are those that the body lists, else the request's id, with a number appended if there
    are several sequences.
    """
    count = len(job.sequences)
    if isinstance(body.rid, list):
        if len(body.rid) != count:
            raise RequestError(f"{count} sequences but {len(body.rid)} rids", param="rid")
        return body.rid
    return [job.rid] if count == 1 else [f"{job.rid}-{i}" for i in range(count)]


async def _collect(context: Context, job: Job, outputs: NativeOutputs) -> list[dict[str, Any]]:
    """Run the job to its end and return the response of each sequence."""
    async with aclosing(job.run(context)) as source:
        async for index, delta in source:
            outputs.add(index, delta)
    return outputs.latest


async def _stream(
    context: Context, job: Job, outputs: NativeOutputs, single: bool
) -> AsyncGenerator[bytes, None]:
    """Run the job and yield an event for each delta. ``single``: events have no ``index``."""
    async with aclosing(job.run(context)) as source:
        async for index, delta in source:
            if delta.text or delta.token_ids or delta.finish_reason is not None:
                answer = outputs.add(index, delta)
                yield event(answer if single else {**answer, "index": index})
    yield DONE
