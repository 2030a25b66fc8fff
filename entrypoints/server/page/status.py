"""``GET /status``: the state of the engine in a small JSON object, for pages that poll it."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import Depends
from starlette.responses import Response

from glowplug import __version__
from glowplug.core.step.draft_counts import Acceptance
from glowplug.core.step.messages import Stats
from glowplug.entrypoints.server.context import Context, get_context
from glowplug.entrypoints.server.generate.job import Job
from glowplug.entrypoints.server.metric_names import hit_rate, pool_usage
from glowplug.entrypoints.server.metrics import Histogram
from glowplug.entrypoints.server.transport.streaming import json_response

REQUESTS_MAX = 50  #: most requests that are listed


async def status(context: Annotated[Context, Depends(get_context)]) -> Response:
    """Return the state, the requests in flight, and counters of which a client takes rates.

    No control is sent to the engine: the statistics are its latest ones, at most 0.1 s old while
    it works.
    """
    client = context.client
    stats = client.stats()
    metrics = context.metrics
    now = time.monotonic()
    return json_response(
        {
            "status": _state(context),
            "version": __version__,
            "model": context.model_name,
            "fingerprint": context.plan.fingerprint,
            "started": context.started,
            "time": now,
            "progress": {str(rank): phase for rank, phase in client.progress.items()},
            "running": stats.running,
            "waiting": stats.waiting,
            "kv": _pool(stats),
            "counters": {
                "prompt_tokens": stats.prompt_tokens,
                "cached_tokens": stats.cached_tokens,
                "output_tokens": stats.output_tokens,
                "finished": stats.finished,
                "aborted": stats.aborted,
                "preemptions": stats.preemptions,
                "steps": stats.steps,
                "busy_seconds": stats.busy_seconds,
                "step_seconds": stats.step_seconds,
                "bubble_seconds": stats.bubble_seconds,
            },
            "latency": {
                "first_token": _sums(metrics.ttft),
                "between_tokens": _sums(metrics.itl),
            },
            "cache_hit_rate": hit_rate(stats) if stats.prefix_query_tokens else None,
            "accept_length": _accept_length(context),
            "requests": [_request(job, now) for job in context.jobs.oldest(REQUESTS_MAX)],
            "requests_in_flight": context.jobs.running,
        }
    )


def _state(context: Context) -> str:
    """Return "starting", "ready", "draining", "dead", or "silent" without heartbeats."""
    state = context.client.state
    if state == "dead":
        return state
    if context.draining:
        return "draining"
    return state if context.client.healthy() else "silent"


def _pool(stats: Stats) -> dict[str, float]:
    """Return the use of the KV pool in tokens; ``usage`` is the share that sequences hold."""
    size = stats.page_size
    used = stats.pages_total - stats.pages_free - stats.pages_evictable
    return {
        "used_tokens": used * size,
        "cached_tokens": stats.pages_evictable * size,
        "total_tokens": stats.pages_total * size,
        "usage": pool_usage(stats),
    }


def _sums(histogram: Histogram) -> dict[str, float]:
    """Return the sum in seconds and the number of a histogram's observations."""
    return {"seconds": histogram.sum, "count": sum(histogram.counts)}


def _accept_length(context: Context) -> dict[str, float | None] | None:
    """Return the mean tokens of a verify step; None if the engine drafts nothing."""
    if context.plan.sizes.width == 1:
        return None
    return {
        "since_start": Acceptance(context.client.stats().drafts).length,
        "last_minute": Acceptance(context.client.recent_drafts()).length,
    }


def _request(job: Job, now: float) -> dict[str, Any]:
    """Return a request in flight, without any of its text."""
    first = job.record.first if job.record is not None else None
    return {
        "id": job.rid,
        "sequences": len(job.sequences),
        "prompt_tokens": sum(len(one.ids) for one in job.sequences[:: job.n]),
        "output_tokens": job.output_tokens,
        "seconds": round(now - job.started, 3),
        "first_token_seconds": None if first is None else round(first - job.started, 3),
    }
