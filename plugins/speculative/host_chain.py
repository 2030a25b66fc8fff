"""Verifying and extending where the device is this host and every row decodes: in plain Python and numpy, which cost a
third of torch's calls, and without the tokens refused in every row, since counts can be read at once here.

R rows, W width, K tokens kept of each row.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glowplug.core.batch import Accepted, Batch
from glowplug.core.offers import Mode
from glowplug.core.protocols import Sampler
from glowplug.plugins.speculative.drafting import draft_batch

Long = NDArray[np.int64]
Ints = NDArray[np.int32]


def verify_chain_host(logits: Tensor, batch: Batch, width: int, sampler: Sampler) -> Accepted:
    """As ``verify.verify_chain`` for a batch of decoding rows: logits [R * W, V]."""
    rows, places = batch.num_rows, np.arange(width)
    fed: Long = batch.input_ids.numpy().reshape(rows, width)
    before = np.where(places[1:] <= places[:, None], fed[:, None, 1:], -1).reshape(rows * width, width - 1)
    owners: Long = batch.row_ids.numpy().repeat(width)
    sampled = sampler.sample(logits, torch.from_numpy(owners), batch.positions + 1, torch.from_numpy(before))
    drawn: Long = sampled.tokens.numpy().reshape(rows, width)
    counts = np.array([_accepted(*row) for row in zip(drawn.tolist(), fed.tolist(), strict=True)], np.int32)
    bad = sampled.bad.numpy().reshape(rows, width)
    bad = np.array([bool(row[:count].any()) for row, count in zip(bad, counts.tolist(), strict=True)])
    accepted = Accepted(torch.from_numpy(drawn), torch.from_numpy(counts), torch.from_numpy(bad), sampled.logprobs)
    sampler.observe(accepted.tokens, accepted.counts, batch.row_ids)
    return accepted


def _accepted(drawn: list[int], fed: list[int]) -> int:
    """1 and the drafts at the beginning of ``fed[1:]`` that are what was drawn before them."""
    count = 1
    while count < len(fed) and drawn[count - 1] == fed[count]:
        count += 1
    return count


@dataclass(eq=False)
class Kept:
    """The draft's first pass over the first K tokens of each row, moved on by one.

    Attributes:
        batch: as ``drafting.extend`` makes it, its input_ids int64 [R * K].
        newest: int64 [R], each row's last accepted token in the pass.
        lengths: int64 [R], tokens that the target's cache holds.
        last: int64 [R], the last accepted tokens.
    """

    batch: Batch
    newest: Tensor
    lengths: Tensor
    last: Tensor


def extend_host(batch: Batch, accepted: Accepted, page_size: int, keep: int) -> Kept:
    """``keep`` from 1 to W: at least as many as any row accepted."""
    tokens, counts = accepted.tokens.tolist(), accepted.counts.tolist()
    rows, width = batch.num_rows, accepted.tokens.shape[1]
    starts: list[int] = batch.positions.tolist()[::width]
    moved = [range(start + 1, start + 1 + keep) for start in starts]
    lens = np.array([places.stop for places in moved], np.int32)
    made = draft_batch(batch, Mode.DRAFT_EXTEND, batch.rows, np.full(rows, keep, np.int32), lens)
    made.num_decodes, made.page_table, made.row_ids = rows, batch.page_table, batch.row_ids
    made.query_starts = torch.from_numpy(np.arange(0, rows * keep + 1, keep, dtype=np.int32))
    made.kv_lens_device = torch.from_numpy(lens)
    made.positions = _long([position for places in moved for position in places])
    made.slots = _long([_slot(pages, position, page_size) for pages, places in zip(batch.pages, moved, strict=True)
                        for position in places])
    made.input_ids = _long([token for drawn in tokens for token in drawn[:keep]])
    return Kept(made, _long([row * keep + count - 1 for row, count in enumerate(counts)]),
                _long([start + count for start, count in zip(starts, counts, strict=True)]),
                _long([drawn[count - 1] for drawn, count in zip(tokens, counts, strict=True)]))


def _long(values: list[int]) -> Tensor:
    return torch.from_numpy(np.array(values, np.int64))


def _slot(pages: Ints, position: int, page_size: int) -> int:
    """As ``placement.slots_at``."""
    column, offset = divmod(position, page_size)
    return offset + (int(pages[column]) * page_size if column < len(pages) else 0)


def page_ends(batch: Batch, page_size: int) -> tuple[list[int], list[int]]:
    """Places in the batch of the tokens at the end of a page, and those pages."""
    places = [place for place, position in enumerate(batch.positions.tolist()) if (position + 1) % page_size == 0]
    return places, [int(batch.slots[place]) // page_size for place in places]
