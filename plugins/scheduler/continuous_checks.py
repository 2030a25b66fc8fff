"""Checks of the scheduler "continuous": a request's size, and the ownership of pages."""

from __future__ import annotations

import numpy as np

from glowplug.core.errors import RequestError, prompt_too_long
from glowplug.core.step.request import Sequence
from glowplug.plugins.scheduler.continuous_rows import Rows


def check_size(sequence: Sequence, rows: Rows, context: int) -> None:
    """Check that the context and the pool of pages can hold a sequence to its end.

    Args:
        sequence: the sequence.
        rows: the rows and their pool of pages.
        context: the context length in tokens.

    Raises:
        RequestError: the prompt is empty or too long, or prompt and output do not fit in the pool.
    """
    prompt = len(sequence.prompt)
    if prompt == 0:
        raise RequestError("the prompt is empty", code="empty_prompt", param="prompt")
    if prompt + 1 > context:
        raise prompt_too_long(context, prompt)
    stored = min(sequence.max_length, context) - 1
    needed = rows.pages_for(stored)
    total = rows.pages.total
    if needed > total:
        size = rows.table.page_size
        raise RequestError(
            f"prompt and output need {stored} tokens of KV cache ({needed} pages of {size}); "
            f"the pool holds {total * size} ({total} pages): "
            "request fewer max_tokens",
            code="kv_too_small",
            param="max_tokens",
        )


def check_pages(rows: Rows) -> dict[str, int]:
    """Check that each KV page has one owner; return the number of pages by kind of owner."""
    table = rows.table
    cache = rows.cache
    cache.check_integrity()
    running = list(rows.running)
    owned = [table.pages[row, rows.shared[row] : table.num_pages[row]] for row in running]
    pages = np.concatenate(owned) if owned else np.zeros(0, np.int32)
    assert len(np.unique(pages)) == len(pages), "a page is owned by two rows"
    assert not len(pages) or pages.min() > 0, "a row owns the scratch page"
    held, evictable = cache.size()
    free = rows.pages.free
    total = free + held + len(pages)
    assert total == rows.pages.total, (
        f"{total} pages accounted for, the pool has {rows.pages.total}"
    )
    assert running or held == evictable, (
        f"no sequence runs, but {held - evictable} cached pages are locked"
    )
    return {
        "free": free,
        "cached": held,
        "evictable": evictable,
        "running": len(pages),
        "total": total,
    }
