"""The batches a NextN draft runs, made from the step that the target has just run.

The draft's cache is shifted by one: its slot p holds the pair (the target's hidden state of token p - 1, token p).
Slot 0 is empty, so every batch here has ``first_key`` 1. B rows, T tokens of the target's step, D decoding rows,
W = width.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glowplug.core.batch import Batch, StepShape, shape_of
from glowplug.core.offers import Mode
from glowplug.core.placement import send, slots_at

Ints = NDArray[np.int32]
FIRST_KEY = 1


@dataclass(eq=False)
class Pass:
    """One forward pass of the draft.

    ``source``: int64 [tokens], for each token the place of the hidden state it continues, in the target's [T] followed
    by those of ``pages``; None: they are the target's, in order. ``pages``: int64, whose last tokens resumed rows
    continue. ``ends``: int64, the last token of each prefill row that samples, in the pass; None without prefill rows.
    """

    batch: Batch
    input_ids: Tensor
    source: Tensor | None = None
    pages: Tensor | None = None
    ends: Tensor | None = None


def extend(batch: Batch, tokens: Tensor, page_size: int) -> Pass:
    """The target's tokens moved on by one, with tokens int64 [B, W] behind them; one more where a row is resumed."""
    if batch.num_decodes == batch.num_rows:
        return Pass(_decoding(batch, page_size), tokens.reshape(-1))
    return _mixed(batch, tokens, page_size)


def _decoding(batch: Batch, page_size: int) -> Batch:
    """Every row decodes: the step's own layout, one position on."""
    width = batch.input_ids.shape[0] // max(1, batch.num_rows)
    positions = batch.positions + 1
    made = draft_batch(batch, Mode.DRAFT_EXTEND, batch.rows, batch.query_lens, batch.kv_lens + np.int32(1))
    made.num_decodes, made.page_table, made.query_starts = batch.num_rows, batch.page_table, batch.query_starts
    made.row_ids, made.kv_lens_device, made.positions = batch.row_ids, batch.kv_lens_device + 1, positions
    made.slots = slots_at(batch.page_table, positions.view(-1, max(1, width)), page_size).view(-1)
    return made


def _mixed(batch: Batch, tokens: Tensor, page_size: int) -> Pass:
    layout = _Layout(batch, page_size)
    device, decoding = batch.positions.device, batch.decode_tokens
    positions, slots, ids, source, pages, starts, ends, rows = (part.long() for part in send(
        [layout.positions, layout.slots, layout.ids, layout.source, layout.pages, layout.starts, layout.ends,
         layout.ending], device))
    ahead = batch.positions[:decoding] + 1
    made = draft_batch(batch, Mode.DRAFT_EXTEND, batch.rows, layout.query_lens, batch.kv_lens + np.int32(1))
    made.num_decodes, made.page_table, made.query_starts = batch.num_decodes, batch.page_table, starts.int()
    made.row_ids, made.kv_lens_device = batch.row_ids, batch.kv_lens_device + 1
    made.positions = torch.cat([ahead, positions])
    width = tokens.shape[1]
    decode_slots = slots_at(batch.page_table[: batch.num_decodes], ahead.view(-1, width), page_size).view(-1)
    made.slots = torch.cat([decode_slots, slots])
    input_ids = torch.cat([tokens[: batch.num_decodes].reshape(-1), ids])
    input_ids[ends] = tokens[rows, 0]
    resumed = len(layout.pages) > 0
    return Pass(made, input_ids, source if resumed else None, pages if resumed else None, ends)


class _Layout:
    """Where the tokens of the prefill rows go in the pass, on the host. The decoding rows' come before them.

    Attributes:
        query_lens, starts: of all rows, int32 [B] and [B + 1].
        positions, slots, ids: of the prefill rows' tokens; an id that is not known on the host is 0.
        source: of all tokens, as of :class:`Pass`. pages: of the resumed rows.
        ends: last token in the pass of the prefill rows that sample; ``ending``: their places in the batch.
    """

    def __init__(self, batch: Batch, page_size: int) -> None:
        first, decoding = batch.num_decodes, batch.decode_tokens
        chunks, stops = batch.query_lens[first:], batch.kv_lens[first:]
        count = len(chunks)
        resumed = np.zeros(count, np.bool_) if batch.resumed is None else batch.resumed
        begins = stops - chunks
        lens = chunks + resumed
        self.query_lens = np.concatenate([batch.query_lens[:first], lens]).astype(np.int32)
        self.starts = _sums(self.query_lens)
        row = np.repeat(np.arange(count), lens)
        offset = np.arange(len(row)) - _sums(lens)[row]
        self.positions = (stops + 1 - lens)[row] + offset
        columns = np.minimum(self.positions // page_size, batch.pages.shape[1] - 1)
        self.slots = batch.pages[first + row, columns] * page_size + self.positions % page_size
        self.ids = self._ids(batch, row, begins, _sums(chunks))
        place = decoding + _sums(chunks)[row] + self.positions - 1 - begins[row]
        place[self.positions == begins[row]] = batch.num_tokens + np.arange(int(resumed.sum()))
        self.source = np.concatenate([np.arange(decoding), place])
        self.pages = batch.pages[first + np.flatnonzero(resumed), begins[resumed] // page_size - 1]
        self.ending = first + np.flatnonzero(batch.samples[first:])
        self.ends = self.starts[self.ending + 1] - 1

    def _ids(self, batch: Batch, row: NDArray[np.int64], begins: Ints, chunk_starts: Ints) -> Ints:
        stops = batch.kv_lens[batch.num_decodes :]
        following = np.zeros(len(begins), np.int32) if batch.next_ids is None else batch.next_ids
        inside = self.positions < stops[row]
        ids = following[row]
        ids[inside] = batch.prompt_ids[(chunk_starts[row] + self.positions - begins[row])[inside]]
        return ids


def one_more(batch: Batch, places: Tensor | None, number: int, lengths: Tensor, page_size: int) -> Batch:
    """Pass ``number`` (2 and on): one token for each row that yields one, behind the ``lengths`` it has now.

    ``places`` int64: those rows in the batch, None for all. lengths int64 [N].
    """
    table, row_ids, rows, bounds = batch.page_table, batch.row_ids, batch.rows, batch.kv_lens
    if places is not None:
        table, row_ids = table[places], row_ids[places]
        rows, bounds = rows[batch.samples], bounds[batch.samples]
    made = draft_batch(batch, Mode.DRAFT_DECODE, rows, np.ones(len(rows), np.int32), bounds + np.int32(number))
    made.num_decodes, made.page_table, made.row_ids = len(rows), table, row_ids
    made.positions, made.kv_lens_device = lengths + (number - 1), (lengths + number).int()
    made.slots = slots_at(table, made.positions[:, None], page_size).view(-1)
    made.query_starts = torch.arange(len(rows) + 1, dtype=torch.int32, device=table.device)
    return made


def draft_batch(target: Batch, mode: Mode, rows: Ints, query_lens: Ints, kv_lens: Ints) -> Batch:
    """A draft's batch as far as the host knows it; the caller fills in the device's fields."""
    agreed = target.agreed or shape_of(target)
    tokens = agreed.rows
    if mode is Mode.DRAFT_EXTEND:
        tokens = agreed.tokens + (agreed.rows if agreed.mode is Mode.PREFILL else 0)
    return Batch(
        step=target.step, mode=mode, rows=rows, epochs=np.zeros(len(rows), np.int64), num_decodes=0,
        query_lens=query_lens, kv_lens=kv_lens, samples=np.ones(len(rows), np.bool_),
        prompt_ids=np.zeros(0, np.int32), pages=target.pages, first_key=FIRST_KEY,
        agreed=StepShape(mode, agreed.rows, tokens, agreed.load))


def _sums(counts: Ints) -> Ints:
    """int32 [N + 1]: what comes before each, and the total."""
    sums = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=sums[1:])
    return sums
