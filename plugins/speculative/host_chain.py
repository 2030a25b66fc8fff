"""Verifying and extending where the device is this host and every row decodes: in numpy, whose calls cost a third of
torch's, and without the tokens refused in every row, since counts can be read at once here.

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
    right = np.logical_and.accumulate(drawn[:, :-1] == fed[:, 1:], axis=1)
    counts = np.add.reduce(right, axis=1, dtype=np.int32) + np.int32(1)
    bad = (sampled.bad.numpy().reshape(rows, width) & (places < counts[:, None])).any(axis=1)
    accepted = Accepted(torch.from_numpy(drawn), torch.from_numpy(counts), torch.from_numpy(bad), sampled.logprobs)
    sampler.observe(accepted.tokens, accepted.counts, batch.row_ids)
    return accepted


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
    newest: Long
    lengths: Long
    last: Long


def extend_host(batch: Batch, accepted: Accepted, page_size: int, keep: int) -> Kept:
    """``keep`` from 1 to W: at least as many as any row accepted."""
    tokens, counts = accepted.tokens.numpy(), accepted.counts.numpy()
    rows, width = tokens.shape
    every = np.arange(rows)
    positions: Long = batch.positions.numpy().reshape(rows, width)
    moved = positions[:, :keep] + 1
    lens: Ints = batch.kv_lens_device.numpy() + np.int32(keep + 1 - width)
    made = draft_batch(batch, Mode.DRAFT_EXTEND, batch.rows, np.full(rows, keep, np.int32), lens)
    made.num_decodes, made.page_table, made.row_ids = rows, batch.page_table, batch.row_ids
    made.query_starts = torch.from_numpy(np.arange(0, rows * keep + 1, keep, dtype=np.int32))
    made.kv_lens_device, made.positions = torch.from_numpy(lens), torch.from_numpy(moved.reshape(-1))
    made.slots = torch.from_numpy(_slots(batch.pages, moved, page_size).reshape(-1))
    made.input_ids = torch.from_numpy(tokens[:, :keep].reshape(-1))
    return Kept(made, every * keep + (counts - 1), positions[:, 0] + counts, tokens[every, counts - 1])


def _slots(pages: Ints, positions: Long, page_size: int) -> Long:
    """As ``placement.slots_at``."""
    columns, offsets = np.divmod(positions, page_size)
    found: Long = pages[np.arange(len(pages))[:, None], np.minimum(columns, pages.shape[1] - 1)].astype(np.int64)
    found[columns >= pages.shape[1]] = 0
    found *= page_size
    found += offsets
    return found


def page_ends(batch: Batch, page_size: int) -> tuple[Long, Long]:
    """Places in the batch of the tokens at the end of a page, and those pages."""
    places = np.flatnonzero(batch.positions.numpy() % page_size == page_size - 1)
    return places, batch.slots.numpy()[places] // page_size
