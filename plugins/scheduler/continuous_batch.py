"""Launches of the continuous scheduler: advance the rows of a step and build its Batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.plugin.offers import Mode
from glowplug.core.step.batch import Batch
from glowplug.core.step.request import Sequence
from glowplug.plugins.scheduler.continuous_rows import Ints, Rows


@dataclass(frozen=True)
class Chunk:
    """A run of consecutive tokens of one row's prefill, which one step computes.

    A prefill consists of the prompt and, after a preemption, the output so far.

    Attributes:
        row: row of the sequence table.
        start: position of the first token.
        stop: position after the last token.
        samples: the chunk ends the prefill, so the step yields a token.
    """

    row: int
    start: int
    stop: int
    samples: bool


def launchable(rows: Rows) -> Ints:
    """Return the decoding rows that can take one more step.

    A row is left out if the steps in flight will fill it to ``max_length`` even if each of them
    yields one token only.
    """
    table = rows.table
    members = rows.decode_rows()
    open_ends = table.length[members] + rows.pending[members] < table.max_length[members]
    return members if open_ends.all() else members[open_ends]


def needed_tokens(rows: Rows, members: Ints, shape: DraftShape, lookahead: int) -> Ints:
    """Return the number of cached tokens for which each row needs pages in its next step.

    The number is an upper bound while the exact lengths are known on the device only. The last
    token of a full sequence is never an input, hence never stored. Of a chain, later drafts need no
    entries either; but the branches of a tree are stored one behind the other, so that a token near
    the end may be stored behind it.

    Args:
        rows: the running sequences.
        members: int32 [n], decoding rows.
        shape: size of the step's drafts.
        lookahead: positions behind the step's tokens that drafts are written to.

    Returns:
        int32 [n].
    """
    table = rows.table
    written = shape.tokens + lookahead
    behind = written - 1 if shape.is_tree else 0
    most = table.max_length[members] - np.int32(1) + np.int32(behind)
    bound: Ints = np.minimum(table.launched[members] + np.int32(written), most)
    return bound


def launch_decodes(rows: Rows, members: Ints, width: int, most: int | None) -> Ints:
    """Count one more step as launched for the rows ``members``; return their KV lengths after it.

    Args:
        rows: the running sequences.
        members: int32 [n], decoding rows.
        width: number of tokens that a row computes in the step.
        most: upper bound of the returned lengths; None: they are exact.

    Returns:
        int32 [n].
    """
    table = rows.table
    after = table.launched[members] + np.int32(width)
    table.launched[members] = after
    rows.pending[members] += 1
    return after if most is None else np.minimum(after, np.int32(most))


def launch_chunks(rows: Rows, budget: int, only: list[int]) -> list[Chunk]:
    """Cut the next chunks from the prefills of the rows ``only``, in order, and return them.

    All chunks together have at most ``budget`` tokens. They count as launched."""
    table = rows.table
    chunks = []
    for row in only:
        if budget <= 0:
            break
        start = int(table.launched[row])
        end = int(table.length[row])
        stop = min(start + budget, end)
        budget -= stop - start
        table.launched[row] = stop
        if stop == end:
            rows.pending[row] += 1
            rows.start_decoding(row)
        chunks.append(Chunk(row, start, stop, stop == end))
    return chunks


def build(
    rows: Rows,
    step: int,
    members: Ints,
    width: int,
    kv_lens: Ints,
    chunks: list[Chunk],
    lookahead: int,
) -> Batch:
    """Build the batch of the decoding rows ``members`` and the prefill ``chunks``.

    ``joined`` and ``left`` are moved from ``rows`` to the batch.

    Args:
        rows: the running sequences.
        step: number of the step.
        members: int32 [n], decoding rows.
        width: number of tokens of each of them in the step.
        kv_lens: int32 [n], KV lengths of ``members`` after the step.
        chunks: the prefill chunks.
        lookahead: positions after the step's tokens that drafts are written to.
    """
    table = rows.table
    decodes = len(members)
    query_lens = np.full(decodes, width, np.int32)
    samples = np.ones(decodes, np.bool_)
    if chunks:
        members = np.concatenate([members, _ints(chunk.row for chunk in chunks)])
        kv_lens = np.concatenate([kv_lens, _ints(chunk.stop for chunk in chunks)])
        lens = _ints(chunk.stop - chunk.start for chunk in chunks)
        query_lens = np.concatenate([query_lens, lens])
        ends = np.array([chunk.samples for chunk in chunks], np.bool_)
        samples = np.concatenate([samples, ends])
    longest = rows.pages_for(int(kv_lens.max()) + lookahead)
    joined, left = _changes(rows)
    batch = Batch(
        step=step,
        mode=_mode(chunks, width),
        rows=members,
        epochs=table.epoch[members],
        num_decodes=decodes,
        query_lens=query_lens,
        kv_lens=kv_lens,
        samples=samples,
        prompt_ids=np.zeros(0, np.int32),
        pages=table.pages[members, :longest],
        joined=joined,
        left=left,
    )
    if chunks:
        _set_prompts(batch, rows, chunks)
    return batch


def _ints(values: Iterable[int]) -> Ints:
    return np.fromiter(values, np.int32)


def _set_prompts(batch: Batch, rows: Rows, chunks: list[Chunk]) -> None:
    """Set the fields of a batch that concern the prefill chunks only."""
    tokens = rows.table.tokens
    batch.prompt_ids = np.concatenate(
        [tokens[chunk.row, chunk.start : chunk.stop] for chunk in chunks]
    )
    batch.next_ids = _following(rows, chunks)
    batch.resumed = _resumed(rows, chunks)
    batch.prompt_logprobs = _scored(rows, batch.num_decodes, chunks)


def _mode(chunks: list[Chunk], width: int) -> Mode:
    if chunks:
        return Mode.PREFILL
    return Mode.DECODE if width == 1 else Mode.VERIFY


def _scored(rows: Rows, decodes: int, chunks: list[Chunk]) -> NDArray[np.bool_] | None:
    """Return a mask of the batch's rows: True if prompt log-probabilities are requested.

    Return None if no row requests them. ``decodes``: number of decoding rows, which come first.
    """
    wanted = [
        rows.running[chunk.row].params.prompt_logprobs is not None
        and chunk.start < rows.table.prompt_len[chunk.row]
        for chunk in chunks
    ]
    if not any(wanted):
        return None
    return np.concatenate([np.zeros(decodes, np.bool_), np.array(wanted, np.bool_)])


def _following(rows: Rows, chunks: list[Chunk]) -> Ints:
    """Return the token that follows each chunk in its prompt; 0 where the chunk ends the prompt."""
    tokens = rows.table.tokens
    return np.array(
        [0 if chunk.samples else tokens[chunk.row, chunk.stop] for chunk in chunks], np.int32
    )


def _resumed(rows: Rows, chunks: list[Chunk]) -> NDArray[np.bool_]:
    """Return a mask of the chunks: True if a chunk begins where its row's cached prefix ends."""
    size = rows.table.page_size
    return np.array(
        [0 < chunk.start == rows.shared[chunk.row] * size for chunk in chunks], np.bool_
    )


def _changes(rows: Rows) -> tuple[list[Sequence], list[int]]:
    """Return (sequences that joined, rows that were left) since the last batch, and reset both."""
    joined = rows.joined
    left = rows.left
    rows.joined = []
    rows.left = []
    return joined, left
