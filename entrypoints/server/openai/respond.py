"""The end of both OpenAI routes: run a job and respond with one body or a stream."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from glowplug.entrypoints.server.context import Context
from glowplug.entrypoints.server.generate.job import Job
from glowplug.entrypoints.server.transport.streaming import (
    Chunks,
    EventStream,
    WholeAnswer,
    cancel_on_disconnect,
    collect_body,
    event_chunks,
    json_response,
)


def stream_response(
    context: Context, job: Job, chunks: Chunks, headers: dict[str, str]
) -> Response:
    """Return a response that runs the job and streams its deltas as events."""
    source = event_chunks(job.run(context), chunks)
    return EventStream(source, context.metrics, context.options.stall_timeout, headers)


async def whole_response(
    request: Request, context: Context, job: Job, answer: WholeAnswer, headers: dict[str, str]
) -> Response:
    """Run the job to its end and return the whole answer as a JSON response.

    Raises:
        RequestError: a sequence failed, or the client disconnected.
    """
    work = collect_body(job.run(context), answer)
    return json_response(await cancel_on_disconnect(request, context.metrics, work), headers)
