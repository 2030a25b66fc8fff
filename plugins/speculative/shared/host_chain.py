"""Drafting on the CPU for steps of decode rows only.

Plain Python and numpy take a third of the time of torch's calls here. Tokens rejected in every row
are left out, because the counts can be read at once. R is the number of rows and W the width.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glowplug.core.step.batch import Accepted, Batch
from glowplug.plugins.speculative.shared.drafting import NewestTokens, UncachedTokens, draft_batch

Ints = NDArray[np.int32]


def uncached_tokens_host(
    batch: Batch, accepted: Accepted, page_size: int, keep: int
) -> UncachedTokens:
    """Do the work of ``drafting.uncached_tokens`` on the host, for a step of decode rows only.

    Only the first ``keep - 1`` tokens of each row are returned.

    Args:
        batch: The target's step.
        accepted: The tokens accepted in the step.
        page_size: Tokens per page.
        keep: At least the largest number of tokens that a row gained. Each token left out is then
            a rejected one or a row's newest.
    """
    width = accepted.tokens.shape[1]
    starts: list[int] = batch.positions.tolist()[::width]
    cells = [(row, offset) for row in range(batch.num_rows) for offset in range(keep - 1)]
    tokens = accepted.tokens.tolist()
    return UncachedTokens(
        _long([tokens[row][offset] for row, offset in cells]),
        _long([starts[row] + 1 + offset for row, offset in cells]),
        _long(
            [
                _kv_slot(batch.pages[row], starts[row] + 1 + offset, page_size)
                for row, offset in cells
            ]
        ),
        _long([row * width + offset for row, offset in cells]),
    )


def newest_tokens_host(batch: Batch, accepted: Accepted) -> NewestTokens:
    """Do the work of ``drafting.newest_tokens`` on the host, for a step of decode rows only."""
    width = accepted.tokens.shape[1]
    last = [count - 1 for count in accepted.counts.tolist()]
    tokens = [drawn[offset] for drawn, offset in zip(accepted.tokens.tolist(), last, strict=True)]
    starts: list[int] = batch.positions.tolist()[::width]
    return NewestTokens(
        None,
        _long(tokens),
        _long([row * width + offset for row, offset in enumerate(last)]),
        _long([start + offset + 1 for start, offset in zip(starts, last, strict=True)]),
    )


def next_draft_batch_host(batch: Batch, number: int, lengths: Tensor, page_size: int) -> Batch:
    """Do the work of ``drafting.next_draft_batch`` on the host, with exact lengths.

    Arguments as in ``drafting.draft_positions``.
    """
    places: list[int] = [length + number - 1 for length in lengths.tolist()]
    lens = np.array(places, np.int32) + np.int32(1)
    made = draft_batch(batch, lens)
    made.page_table = batch.page_table[: len(places)]
    made.row_ids = batch.row_ids[: len(places)]
    made.kv_lens_device = torch.from_numpy(lens)
    made.query_starts = torch.from_numpy(np.arange(len(places) + 1, dtype=np.int32))
    made.positions = _long(places)
    made.kv_slots = _long(
        [_kv_slot(pages, place, page_size) for pages, place in zip(batch.pages, places)]
    )
    return made


def _long(values: list[int]) -> Tensor:
    return torch.from_numpy(np.array(values, np.int64))


def _kv_slot(pages: Ints, position: int, page_size: int) -> int:
    """Return the KV slot of ``position`` in a row whose page numbers are ``pages``.

    ``core.step.to_device.kv_slots_at`` is the same on the device.
    """
    column, offset = divmod(position, page_size)
    return offset + (int(pages[column]) * page_size if column < len(pages) else 0)
