"""Steps that all generating routes share: request ids, headers, limits and the job."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from fastapi import Request

from glowplug.core.errors import RequestError
from glowplug.core.step.request import Admission, SamplingParams
from glowplug.entrypoints.front.front import CheckedRequest
from glowplug.entrypoints.server.context import Context
from glowplug.entrypoints.server.generate.job import Job
from glowplug.entrypoints.server.generate.params import choices, field_errors_at, unknown_fields
from glowplug.entrypoints.server.generate.prompts import TokenizedPrompt
from glowplug.entrypoints.server.protocol.fields import SamplingFields
from glowplug.entrypoints.server.request_log import RECORD, RequestRecord

MAX_TIMEOUT_SECONDS = 86400.0
_UNSAFE_CHARS = re.compile(r"[^A-Za-z0-9_.\-]")


def request_id(request: Request, given: str | None) -> str:
    """Return the request's id: ``given`` in the body, else that of the header, else a new one."""
    return given or str(request.scope["glowplug.request_id"])


def timeout(request: Request, context: Context) -> float:
    """Return the time limit of this request in seconds; 0: none.

    The limit is the smaller of the server's limit and the header ``X-Request-Timeout``.
    """
    limit = context.options.request_timeout
    header = request.headers.get("x-request-timeout")
    if header is None:
        return limit
    try:
        requested = float(header)
    except ValueError:
        requested = math.nan
    if not 0 < requested <= MAX_TIMEOUT_SECONDS:
        raise RequestError(
            f"X-Request-Timeout must be seconds between 0 and {MAX_TIMEOUT_SECONDS:.0f}",
            param="X-Request-Timeout",
        )
    return min(requested, limit) if limit else requested


def warning_headers(extras: Mapping[str, Any]) -> dict[str, str]:
    """Return a response header that lists the unknown fields in ``extras``; {} if none is unknown.

    Raises:
        RequestError: a field is known but not supported.
    """
    unknown = unknown_fields(extras)
    if not unknown:
        return {}
    names = [_UNSAFE_CHARS.sub("?", name)[:64] for name in unknown[:16]]
    return {"X-Glowplug-Warning": "unknown fields ignored: " + ", ".join(names)}


class AdmissionFields(Protocol):
    """The fields of a request body that affect the admission of its sequences to the engine."""

    priority: int | None
    cache_salt: str | None


async def openai_job(
    request: Request,
    context: Context,
    body: SamplingFields,
    prompts: list[TokenizedPrompt],
    params: list[SamplingParams],
) -> Job:
    """Check an OpenAI request and return its job, with ``n`` sequences for each prompt.

    Raises:
        RequestError: a sequence cannot be served.
    """
    rid = request_id(request, body.request_id or body.rid)
    return await make_job(request, context, rid, body, prompts, params, n=body.n or 1)


async def make_job(
    request: Request,
    context: Context,
    rid: str,
    body: AdmissionFields,
    prompts: list[TokenizedPrompt],
    params: list[SamplingParams],
    *,
    n: int = 1,
    places: Sequence[str] = ("",),
) -> Job:
    """Check a request and return its job, with ``n`` sequences for each prompt.

    Args:
        request: the HTTP request.
        context: the server's context.
        rid: id of the request.
        body: the request body.
        prompts: the prompts.
        params: sampling parameters, one for each prompt.
        n: sequences per prompt.
        places: path of the sampling parameters in the body, one for all prompts or one for each;
            see :func:`field_errors_at`.

    Raises:
        RequestError: a sequence cannot be served.
        Unavailable: the server accepts no new work.
    """
    context.require_ready()
    _check_count(context, n, len(prompts))
    await context.grammars.check(params, places)
    checked = _checked(context, prompts, params, places)
    record: RequestRecord | None = request.scope.get(RECORD)
    if record is not None:
        tokens = sum(len(prompt.ids) for prompt in prompts)
        record.begin(rid, tokens, params[0], n * len(prompts))
    context.metrics.requests.inc()
    context.metrics.n.observe(n)
    sequences = [
        replace(one, params=choice) for one in checked for choice in choices(one.params, n)
    ]
    return Job(rid, sequences, _admission(request, context, body), n=n, record=record)


def _check_count(context: Context, n: int, prompts: int) -> None:
    """Raise RequestError if a request has more sequences than the engine can run and queue."""
    sizes = context.plan.sizes
    max_sequences = min(context.options.max_choices, sizes.max_admitted)
    if n * prompts > max_sequences:
        raise RequestError(
            f"n x prompts is {n * prompts}, and at most {max_sequences} are allowed", param="n"
        )


def _checked(
    context: Context,
    prompts: list[TokenizedPrompt],
    params: list[SamplingParams],
    places: Sequence[str],
) -> list[CheckedRequest]:
    """Check each prompt with its parameters and return the requests to run.

    ``places``: see :func:`make_job`.
    """
    checked = []
    for number, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        with field_errors_at(places[min(number, len(places) - 1)]):
            checked.append(context.client.check(prompt.ids, one))
    return checked


def _admission(request: Request, context: Context, body: AdmissionFields) -> Admission:
    """Return the priority, prefix-cache salt and time limits of a request's sequences."""
    return Admission(
        priority=body.priority or 0,
        salt=body.cache_salt or "",
        timeout=timeout(request, context),
        queue_timeout=context.options.queue_timeout,
    )
