"""What the generating routes do alike before they start: headers, names, limits, the job."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request

from glowplug.core.errors import RequestError
from glowplug.core.step.request import SamplingParams
from glowplug.entrypoints.server.context import Context
from glowplug.entrypoints.server.generate.job import Job
from glowplug.entrypoints.server.generate.params import choices, inside, unknown_fields
from glowplug.entrypoints.server.generate.prompts import Prompt
from glowplug.entrypoints.server.protocol.fields import SamplingFields
from glowplug.entrypoints.server.request_log import RECORD, RequestRecord

MAX_TIMEOUT = 86400.0
_NAME = re.compile(r"[^A-Za-z0-9_.\-]")


def request_id(request: Request, given: str | None) -> str:
    """The body's id, else the header's (or the one made for this request)."""
    return given or str(request.scope["glowplug.request_id"])


def timeout(request: Request, context: Context) -> float:
    """Seconds this request may take: the smaller of the server's limit and ``X-Request-Timeout``;
    0: no limit.
    """
    limit = context.options.request_timeout
    header = request.headers.get("x-request-timeout")
    if header is None:
        return limit
    try:
        asked = float(header)
    except ValueError:
        asked = math.nan
    if not 0 < asked <= MAX_TIMEOUT:
        raise RequestError(
            f"X-Request-Timeout must be seconds between 0 and {MAX_TIMEOUT:.0f}",
            param="X-Request-Timeout",
        )
    return min(asked, limit) if limit else asked


def warnings(extras: Mapping[str, Any]) -> dict[str, str]:
    """A response header that lists fields nobody knows; RequestError for those that are refused."""
    unknown = unknown_fields(extras)
    if not unknown:
        return {}
    names = [_NAME.sub("?", name)[:64] for name in unknown[:16]]
    return {"X-Glowplug-Warning": "unknown fields ignored: " + ", ".join(names)}


def openai_job(
    request: Request,
    context: Context,
    fields: SamplingFields,
    prompts: list[Prompt],
    params: list[SamplingParams],
) -> Job:
    """``n`` sequences for each prompt, checked by the engine's front. RequestError when one cannot
    be served.
    """
    return make_job(
        request,
        context,
        request_id(request, fields.request_id or fields.rid),
        prompts,
        params,
        n=fields.n or 1,
        priority=fields.priority or 0,
        salt=fields.cache_salt or "",
    )


def make_job(
    request: Request,
    context: Context,
    rid: str,
    prompts: list[Prompt],
    params: list[SamplingParams],
    *,
    n: int = 1,
    priority: int = 0,
    salt: str = "",
    places: Sequence[str] = ("",),
) -> Job:
    """As :func:`openai_job`, from plain values. ``places``: see ``inside``; one for all, or one for
    each prompt.
    """
    context.require_ready()
    sizes = context.plan.sizes
    most = min(
        context.options.max_choices, sizes.max_running + sizes.max_queued
    )  # more would never find room
    if n * len(prompts) > most:
        raise RequestError(
            f"n x prompts is {n * len(prompts)}, and at most {most} are allowed", param="n"
        )
    for number, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        with inside(places[min(number, len(places) - 1)]):
            context.client.check_request(prompt.ids, one)
    record: RequestRecord | None = request.scope.get(RECORD)
    if record is not None:
        record.begin(rid, sum(len(prompt.ids) for prompt in prompts))
    context.metrics.requests.inc()
    context.metrics.n.observe(n)
    ids = [prompt.ids for prompt in prompts for _ in range(n)]
    each = [choice for one in params for choice in choices(one, n)]
    return Job(
        rid,
        ids,
        each,
        priority,
        salt,
        timeout(request, context),
        context.options.queue_timeout,
        n=n,
        record=record,
    )
