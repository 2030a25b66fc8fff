"""Inputs of a draft model's passes after each step of the target, and choice of the drafts.

The draft's cache is shifted by one: its entry at position p is made from the target's hidden state
of token p - 1 and from token p. Position 0 has no entry, so every batch of a draft has
``first_key`` 1. Of the target's step, B is the number of rows, T that of tokens, D that of decode
rows, and W the width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glowplug.core.plugin.offers import Mode
from glowplug.core.protocols import VocabularySlices
from glowplug.core.step.batch import Accepted, Batch, Padding, StepShape, shape_of
from glowplug.core.step.to_device import kv_slots_at, send
from glowplug.kernels.sampling import reference

Ints = NDArray[np.int32]
FIRST_KEY = 1  #: first position with an entry in the draft's cache


@dataclass(eq=False)
class UncachedTokens:
    """The F tokens of a target's step whose entries the draft's cache still lacks.

    Each row's newest token is not among them.

    Attributes:
        input_ids: int64 [F].
        positions: int64 [F].
        kv_slots: KV slots, int64 [F].
        source: For each token, the index of the hidden state that it continues, int64 [F]: in the
            target's [T] states, followed by the states of ``pages``.
        pages: For each row that starts after a cached prefix, the prefix's last page, int64. The
            row continues the hidden state stored for the last token of this page. None if no
            row starts after a cached prefix.
    """

    input_ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    source: Tensor
    pages: Tensor | None = None


@dataclass(eq=False)
class NewestTokens:
    """The newest token of each of the N rows that yield a token in the target's step.

    Attributes:
        places: Indices of these rows in the batch, int64 [N]; None for all rows.
        tokens: int64 [N].
        source: Indices of the hidden states that the tokens continue, in the target's [T], int64
            [N].
        lengths: Number of tokens in the target's cache, int64 [N].
    """

    places: Tensor | None
    tokens: Tensor
    source: Tensor
    lengths: Tensor


def uncached_tokens(batch: Batch, accepted: Accepted, depth: int, page_size: int) -> UncachedTokens:
    """Return the tokens of a target's step that the draft's cache lacks, except each row's newest.

    NOTE: rejected tokens of decode rows are among these tokens; their entries are overwritten
    before they are read.

    Args:
        batch: The target's step.
        accepted: The tokens sampled in the step.
        depth: Most drafts that a row can gain.
        page_size: Tokens per page.
    """
    if batch.num_decodes == batch.num_rows:
        return UncachedTokens(*_drafted(batch, accepted, depth, page_size))
    layout = _Chunks(batch, page_size)
    device = accepted.tokens.device
    ids, positions, kv_slots, source, pages = send(layout.arrays(), device)
    if batch.num_decodes:
        both = zip(
            _drafted(batch, accepted, depth, page_size),
            (ids, positions, kv_slots, source),
            strict=True,
        )
        ids, positions, kv_slots, source = (torch.cat(parts) for parts in both)
    return UncachedTokens(ids, positions, kv_slots, source, pages if len(layout.pages) else None)


def _drafted(
    batch: Batch, accepted: Accepted, depth: int, page_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the first four fields of :class:`UncachedTokens` for the decode rows.

    Arguments as in :func:`uncached_tokens`.
    """
    decodes = batch.num_decodes
    positions = gained_positions(batch, accepted)[:, 1 : depth + 1]
    kv_slots = kv_slots_at(batch.page_table[:decodes], positions, page_size)
    return (
        accepted.tokens[:decodes, :depth].reshape(-1),
        positions.reshape(-1),
        kv_slots.reshape(-1),
        gained_sources(batch, accepted)[:, :depth].reshape(-1),
    )


def gained_positions(batch: Batch, accepted: Accepted) -> Tensor:
    """Return the positions of the tokens after which the decode rows gained one, int64 [D, W]."""
    decodes = batch.num_decodes
    width = accepted.tokens.shape[1]
    starts: Tensor = batch.positions[: decodes * width : width]
    return starts[:, None] + torch.arange(width, device=starts.device)


def gained_sources(batch: Batch, accepted: Accepted) -> Tensor:
    """Return the indices in the step of the tokens after which rows gained one, int64 [D, W]."""
    decodes = batch.num_decodes
    width = accepted.tokens.shape[1]
    first = torch.arange(0, decodes * width, width, device=accepted.tokens.device)[:, None]
    path = accepted.path
    return first + (torch.arange(width, device=first.device) if path is None else path)


class _Chunks:
    """The fields of :class:`UncachedTokens` for the prefill rows, on the host.

    The token sampled after a prompt's end is not among them: it is the row's newest token.
    """

    def __init__(self, batch: Batch, page_size: int) -> None:
        first = batch.num_decodes
        chunks = batch.query_lens[first:]
        stops = batch.kv_lens[first:]
        none = np.zeros(len(chunks), np.int32)
        resumed = none.astype(np.bool_) if batch.resumed is None else batch.resumed
        begins = stops - chunks
        lens = chunks + resumed - batch.samples[first:]
        row = np.repeat(np.arange(len(chunks)), lens)
        offset = np.arange(len(row)) - _sums(lens)[row]
        self.positions = (begins + 1 - resumed)[row] + offset
        columns = np.minimum(self.positions // page_size, batch.pages.shape[1] - 1)
        self.kv_slots = batch.pages[first + row, columns] * page_size + self.positions % page_size
        self.pages = batch.pages[first + np.flatnonzero(resumed), begins[resumed] // page_size - 1]
        places = _sums(chunks)[row] + self.positions - begins[row]
        self.ids = (none if batch.next_ids is None else batch.next_ids)[row]
        inside = self.positions < stops[row]
        self.ids[inside] = batch.prompt_ids[places[inside]]
        self.source = batch.decode_tokens + places - 1
        kept = np.arange(int(resumed.sum()))  # states of cached prefixes follow the step's own
        self.source[self.positions == begins[row]] = batch.num_tokens + kept

    def arrays(self) -> list[NDArray[np.int64]]:
        """Return ids, positions, KV slots and sources [F], then pages, to be copied together."""
        return [
            part.astype(np.int64)
            for part in (self.ids, self.positions, self.kv_slots, self.source, self.pages)
        ]


def newest_tokens(batch: Batch, accepted: Accepted, ends: Tensor | None) -> NewestTokens:
    """Return the newest token of each row after the target's step.

    Args:
        batch: The target's step.
        accepted: The tokens accepted in the step.
        ends: Indices in the batch of the rows whose prompts ended, int64; None if all rows decode.
    """
    decodes = batch.num_decodes
    width = accepted.tokens.shape[1]
    last = accepted.counts[:decodes].long() - 1
    tokens = accepted.tokens[:decodes].gather(1, last[:, None])[:, 0]
    source = gained_sources(batch, accepted).gather(1, last[:, None])[:, 0]
    lengths = batch.positions[: decodes * width : width] + last + 1
    if ends is None:
        return NewestTokens(None, tokens, source, lengths)
    return NewestTokens(
        torch.cat([torch.arange(decodes, device=ends.device), ends]),
        torch.cat([tokens, accepted.tokens[ends, 0]]),
        torch.cat([source, batch.query_starts[ends + 1].long() - 1]),
        torch.cat([lengths, batch.kv_lens_device[ends].long()]),
    )


class DraftPositions(NamedTuple):
    """The device fields of a draft pass's batch, which has K tokens for each of D decode rows.

    Attributes:
        positions: Positions of the tokens, [D * K].
        kv_slots: KV slots of the tokens, [D * K].
        kv_lens: Lengths of the rows after the pass, [D].
        query_starts: Index of each row's first token in the batch, followed by D * K; [D + 1].
    """

    positions: Tensor
    kv_slots: Tensor
    kv_lens: Tensor
    query_starts: Tensor


def pass_entries(number: int, branches: int) -> tuple[int, int]:
    """Return the entries that a draft pass writes behind the target's: the first, and their number.

    The first pass computes the row's newest token, pass ``number`` of the others ``branches``
    tokens of a tree; the entries of all passes are stored one behind the other.
    """
    return (0, 1) if number == 1 else (1 + (number - 2) * branches, branches)


def draft_positions(
    batch: Batch, number: int, lengths: Tensor, page_size: int, branches: int = 1
) -> DraftPositions:
    """Return the device fields of a draft pass that precedes the target's step ``batch``.

    Args:
        batch: The target's step, which follows the draft passes.
        number: Number of the pass, from 1.
        lengths: Number of tokens in the target's cache, int [D] for D decode rows.
        page_size: Tokens per page.
        branches: Tokens of a row in each pass but the first.
    """
    first, count = pass_entries(number, branches)
    decodes = batch.num_decodes
    starts = lengths.long()[:, None]
    places = starts + torch.arange(first, first + count, device=lengths.device)
    return DraftPositions(
        (starts + (number - 1)).expand(decodes, count).reshape(-1),
        kv_slots_at(batch.page_table[:decodes], places, page_size).view(-1),
        (lengths + (first + count)).int(),
        torch.arange(0, decodes * count + 1, count, dtype=torch.int32, device=lengths.device),
    )


def next_draft_batch(
    batch: Batch, number: int, at: DraftPositions, width: int, branches: int = 1
) -> Batch:
    """Return the batch of a draft pass that precedes the target's step ``batch``.

    Args:
        batch: The target's step, which follows the draft passes.
        number: Number of the pass, from 1.
        at: The device fields of the pass, from :func:`draft_positions`.
        width: Number of tokens that a decode row computes in the step.
        branches: Tokens of a row in each pass but the first.
    """
    decodes = batch.num_decodes
    first, count = pass_entries(number, branches)
    made = draft_batch(batch, batch.kv_lens[:decodes] + np.int32(first + count - width), count)
    made.page_table = batch.page_table[:decodes]
    made.row_ids = batch.row_ids[:decodes]
    made.positions, made.kv_slots, made.kv_lens_device, made.query_starts = at
    return made


def draft_batch(target: Batch, kv_lens: Ints, count: int = 1) -> Batch:
    """Return the batch of a draft pass with ``count`` tokens per decode row of ``target``.

    The caller sets the device fields. ``kv_lens``: int32 [D], lengths of the rows after the pass.
    """
    agreed = target.agreed or shape_of(target)
    rows = target.num_decodes
    most = agreed.decodes
    return Batch(
        step=target.step,
        mode=Mode.DRAFT_DECODE,
        rows=target.rows[:rows],
        epochs=np.zeros(rows, np.int64),
        num_decodes=rows,
        query_lens=np.full(rows, count, np.int32),
        kv_lens=kv_lens,
        samples=np.ones(rows, np.bool_),
        prompt_ids=np.zeros(0, np.int32),
        pages=target.pages[:rows],
        first_key=FIRST_KEY,
        pieces=target.pieces,
        agreed=StepShape(Mode.DRAFT_DECODE, most, most * count, agreed.load, decodes=most),
        padding=target.draft_padding,
        draft_padding=target.draft_padding,
    )


def repeated_padding(padding: Padding | None, count: int) -> Padding | None:
    """Return the padding of a pass of ``count`` tokens per row, from that of one token per row."""
    if padding is None or count == 1:
        return padding
    own = padding.own
    return Padding(
        None if own is None else own.repeat_interleave(count, 0),
        padding.gathered.repeat_interleave(count, 0),
    )


def _sums(counts: Ints) -> Ints:
    """Return the exclusive prefix sums and the total of ``counts``, int32 [N + 1]."""
    sums = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=sums[1:])
    return sums


def most_likely(logits: Tensor, arrived: Tensor) -> Tensor:
    """Return the most likely token of each row, int64 [N].

    Args:
        logits: float32 [N, V].
        arrived: as in :func:`best_of_slices`.
    """
    if not logits.is_cuda:
        return logits.argmax(-1)
    # torch's argmax takes 38 us for 8 rows of 129,280 logits, this kernel 4 us (H200)
    from glowplug.kernels.sampling.greedy import best

    return best(logits, arrived).tokens


def best_of_slices(logits: Tensor, slices: VocabularySlices, arrived: Tensor) -> Tensor:
    """Return the most likely token of each row over the slices of all ranks, int64 [N].

    Args:
        logits: those of this rank's slice, float32 [N, size].
        slices: the division of the vocabulary.
        arrived: int32 [N or more], zeros; counters of finished programs on a GPU.
    """
    first = slices.shard.start
    if not logits.is_cuda:
        keys = reference.best_keys(logits, first)
        return reference.best_of_keys(slices.exchange(keys))[0]
    # NOTE: imported late, because it imports triton
    from glowplug.kernels.sampling.greedy import best_keys, best_of_keys

    return best_of_keys(slices.exchange(best_keys(logits, first, arrived)))[0]
