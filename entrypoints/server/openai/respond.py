"""The end of all chat and completion routes: one body or a stream."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import Request
from starlette.responses import Response

from glowplug.entrypoints.server.context import Context
from glowplug.entrypoints.server.generate.job import Job
from glowplug.entrypoints.server.transport.streaming import (
    Chunks,
    Deltas,
    EventStream,
    WholeAnswer,
    cancel_on_disconnect,
    collect_body,
    error_event,
    event_chunks,
    json_response,
)


def stream_response(
    context: Context, job: Job, chunks: Chunks, headers: dict[str, str]
) -> Response:
    """Return a response that runs the job and streams its deltas as events."""
    return stream_deltas(context, job.run(context), chunks, headers)


def stream_deltas(
    context: Context,
    deltas: Deltas,
    chunks: Chunks,
    headers: dict[str, str],
    failure: Callable[[Exception], bytes] = error_event,
) -> Response:
    """Return a response that streams the deltas of a job as events.

    ``failure`` returns the event for an error after the first event.
    """
    source = event_chunks(deltas, chunks)
    return EventStream(source, context.metrics, context.options.stall_timeout, headers, failure)


async def whole_response(
    request: Request, context: Context, job: Job, answer: WholeAnswer, headers: dict[str, str]
) -> Response:
    """Run the job to its end and return the whole answer as a JSON response.

    Raises:
        RequestError: a sequence failed, or the client disconnected.
    """
    return await whole_deltas(request, context, job.run(context), answer, headers)


async def whole_deltas(
    request: Request, context: Context, deltas: Deltas, answer: WholeAnswer, headers: dict[str, str]
) -> Response:
    """Collect all deltas of a job and return the whole answer as a JSON response.

    Raises:
        RequestError: a sequence failed, or the client disconnected.
    """
    work = collect_body(deltas, answer)
    return json_response(await cancel_on_disconnect(request, context.metrics, work), headers)
