"""Statistics of the scheduler "continuous"."""

from __future__ import annotations

from copy import copy

from glowplug.core.step.messages import Stats
from glowplug.plugins.scheduler.continuous_admission import Admitter
from glowplug.plugins.scheduler.continuous_commit import Committed
from glowplug.plugins.scheduler.continuous_queue import Queue
from glowplug.plugins.scheduler.continuous_rows import Rows


def count_end(stats: Stats, reason: str) -> None:
    """Add a sequence that ended for ``reason`` to ``stats``."""
    if reason in ("stop", "length"):
        stats.finished += 1
    else:
        stats.aborted += 1


def count_step(stats: Stats, done: Committed) -> None:
    """Add the tokens of a committed step to ``stats``.

    The engine counts drafts, from the same results.
    """
    stats.output_tokens += int(done.counts.sum())


def snapshot(stats: Stats, rows: Rows, queue: Queue, admission: Admitter) -> Stats:
    """Set the current numbers of sequences, tokens and pages in ``stats`` and return a copy.

    This takes O(rows that compute their prompt).
    """
    stats.running = len(rows.running)
    stats.waiting = len(queue)
    stats.pending_tokens = queue.tokens + rows.unlaunched()
    stats.pages_free = rows.pages.free
    stats.pages_evictable = rows.cache.size()[1]
    stats.prefix_queries = admission.queries
    stats.prefix_hits = admission.hits
    stats.tier_hits = admission.tier_hits
    stats.tier_hit_tokens = admission.tier_hit_tokens
    return copy(stats)
