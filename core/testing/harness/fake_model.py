"""A deterministic fake of runner, model and sampler that checks scheduling without torch.

The next token is a hash of the whole prefix. For each computed token, its id, its position and the
prefix's hash are stored in a paged store. Every step reads back and checks all entries that it
attends to. A wrong KV slot, a page reused too early, a missing chunk or a lost token thus raises
:class:`CacheFault` or changes the output. Freed pages are poisoned.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glowplug.core.plugin.offers import Mode
from glowplug.core.step.batch import Batch, PromptLogprobs, StepResult
from glowplug.core.step.pages import PageAllocator
from glowplug.core.step.sequence_table import SequenceTable
from glowplug.core.testing.harness.prefix_hash import (
    EMPTY_HASH,
    extend,
    extend_all,
    logprob_of,
    next_token,
)

POISON = -7  #: token and position of a freed entry


class CacheFault(AssertionError):
    """A scheduling error: a step read an entry of another prefix, or its batch is inconsistent."""


class PoisonedPages(PageAllocator):
    """An allocator that poisons freed pages in the fake model."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self.model: FakeModel | None = None

    def give(self, pages: NDArray[np.int32]) -> None:
        super().give(pages)
        if self.model is not None:
            self.model.poison(pages)


@dataclass(eq=False)
class RowState:
    """The device's state of a row: accepted tokens, their hash, and the next input."""

    length: int = 0
    last: int = 0
    state: int = EMPTY_HASH
    begun: bool = False


class FakeModel:
    """A model that runs batches at once, in launch order; the caller commits the results later.

    Args:
        width: most tokens that a decoding row computes, and their number in steps without
            ``Batch.draft_shape``: one, and drafts, each of which is right with probability ``hit``.
        bad: (sequence id, output length) at which the logits become NaN.
        lookahead: number of entries that a draft writes behind the accepted tokens; they are never
            read.
        depth: number of steps that may be in flight at a launch; each may make the ``kv_lens`` of a
            row too high by up to ``width - 1``.
    """

    def __init__(
        self,
        table: SequenceTable,
        num_pages: int,
        *,
        vocab: int,
        width: int = 1,
        hit: float = 0.6,
        seed: int = 0,
        bad: tuple[int, int] | None = None,
        depth: int = 1,
        lookahead: int = 0,
    ) -> None:
        self.table = table
        self.vocab = vocab
        self.width = width
        self._step_width = width  # of the step being run
        self.hit = hit
        self.bad = bad
        self.depth = depth
        self.lookahead = lookahead
        kv_slots = num_pages * table.page_size
        self.tokens = np.full(kv_slots, POISON, np.int64)
        self.positions = np.full(kv_slots, POISON, np.int64)
        self.states = np.zeros(kv_slots, np.uint64)
        self.rows: dict[int, RowState] = {}
        self.computed = 0  #: tokens of all steps
        self._random = random.Random(seed)
        self._last_step = 0

    def poison(self, pages: NDArray[np.int32]) -> None:
        kv_slots = (pages[:, None] * self.table.page_size + np.arange(self.table.page_size)).ravel()
        self.tokens[kv_slots] = self.positions[kv_slots] = POISON
        self.states[kv_slots] = 0

    def launch(self, batch: Batch) -> StepResult:
        """Check the batch and all cache entries it reads, run the step, and return its results."""
        drafts = batch.draft_shape
        self._step_width = self.width if drafts is None else drafts.tokens
        self._check_shape(batch)
        self._change_rows(batch)
        result = self._empty_result(batch.num_rows)
        at = 0
        for i, row in enumerate(batch.rows.tolist()):
            count = int(batch.query_lens[i])
            self.computed += count
            if i < batch.num_decodes:
                self._decode(batch, i, self.rows[row], result)
            else:
                ids = batch.prompt_ids[at : at + count].tolist()
                self._prefill(batch, i, self.rows[row], ids, result)
                at += count
        self._require(at == len(batch.prompt_ids), "prompt_ids do not match the prefill rows")
        return result

    def _empty_result(self, rows: int) -> StepResult:
        """Return results of ``rows`` rows, still without tokens.

        The token ids in ``logprobs`` are a view of ``tokens``, so they follow later changes.
        """
        tokens = np.full((rows, self._step_width), POISON, np.int64)
        logprobs = np.zeros(rows * self._step_width, np.float32)
        return StepResult(
            tokens,
            np.zeros(rows, np.int32),
            np.zeros(rows, np.bool_),
            logprobs=(logprobs, tokens.reshape(-1, 1), logprobs[:, None]),
        )

    # ---- rows ------------------------------------------------------------------------------------

    def _change_rows(self, batch: Batch) -> None:
        """Remove the states of rows that left, and add states for rows that joined."""
        for row in batch.left:
            self._require(row in self.rows, f"row {row} left without having joined")
            del self.rows[row]
        for sequence in batch.joined:
            self._require(sequence.row not in self.rows, f"row {sequence.row} joined twice")
            self.rows[sequence.row] = RowState()

    def _prefill(
        self, batch: Batch, i: int, row: RowState, ids: list[int], result: StepResult
    ) -> None:
        """Run the chunk ``ids`` of batch row ``i``; the last chunk also yields a token."""
        stop = int(batch.kv_lens[i])
        start = stop - len(ids)
        state = self._read(batch, i, start)
        self._check_chunk(batch, i, row, start, stop)
        self._score(batch, i, start, state, ids, result)
        for offset, token in enumerate(ids):
            state = extend(state, token)
            self._write(batch, i, start + offset, token, state)
        if batch.samples[i]:
            sequence = self.table.sequences[int(batch.rows[i])]
            assert sequence is not None
            self._require(stop == len(sequence.all_tokens()), "the prefill samples before its end")
            row.length = stop
            row.state = state
            self._accept(batch, i, row, [next_token(state, self.vocab)], result)
            self._draft(batch, i, row)

    def _check_chunk(self, batch: Batch, i: int, row: RowState, start: int, stop: int) -> None:
        """Check the fields that a draft reads for a chunk: ``next_ids`` and ``resumed``."""
        chunk = i - batch.num_decodes
        number = int(batch.rows[i])
        self._require(
            batch.next_ids is not None and batch.resumed is not None,
            "next_ids or resumed is missing",
        )
        assert batch.next_ids is not None and batch.resumed is not None
        following = 0 if batch.samples[i] else int(self.table.tokens[number, stop])
        self._require(
            int(batch.next_ids[chunk]) == following, f"row {number} continues with another token"
        )
        self._require(
            bool(batch.resumed[chunk]) == (start > 0 and not row.begun),
            f"row {number}: wrong resumed flag",
        )
        row.begun = True

    def _draft(self, batch: Batch, i: int, row: RowState) -> None:
        """Write invalid entries behind the accepted tokens, where a draft would write its own.

        The entries are on the row's own pages, and the next step overwrites them.
        """
        limit = int(self.table.max_length[int(batch.rows[i])])
        for position in range(row.length - 1, min(row.length - 1 + self.lookahead, limit - 1)):
            self._write(batch, i, position, POISON, EMPTY_HASH)

    def _decode(self, batch: Batch, i: int, row: RowState, result: StepResult) -> None:
        """Compute the tokens of decoding row ``i`` and accept its correct drafts."""
        number = int(batch.rows[i])
        limit = int(self.table.max_length[number])
        if row.length >= limit:
            self._skip_full(i, number, result)
            return
        first = row.length - 1  # position of the last accepted token, whose entry is computed now
        self._check_bound(batch, i, first + self._step_width)
        state = self._read(batch, i, first)
        self._require(
            extend(state, row.last) == row.state, f"row {number}: prefix differs from the device's"
        )
        truth = self._following(row.state)
        drafts = self._drafts(truth)
        self._write_all(batch, i, first, state, [row.last, *drafts])
        accepted = truth[: 1 + _right(drafts, truth)]
        self._accept(batch, i, row, accepted, result)
        self._draft(batch, i, row)

    def _skip_full(self, i: int, row: int, result: StepResult) -> None:
        """Return an arbitrary token for a row at its maximum length; the commit drops the token."""
        self._require(self.width > 1, f"row {row} is launched although it was known to be full")
        result.tokens[i] = 0
        result.counts[i] = 1

    def _write_all(self, batch: Batch, i: int, first: int, state: int, tokens: list[int]) -> None:
        """Write entries of ``tokens`` from position ``first`` on, up to the row's limit."""
        limit = int(self.table.max_length[int(batch.rows[i])])
        for position, token in enumerate(tokens, first):
            state = extend(state, token)
            if position < limit - 1:
                self._write(batch, i, position, token, state)

    def _check_bound(self, batch: Batch, i: int, exact: int) -> None:
        """Check that ``kv_lens`` of row ``i`` is ``exact`` or a valid upper bound.

        Each step in flight may raise the bound by ``width - 1``.
        """
        bound = int(batch.kv_lens[i])
        most = exact + self.depth * (self.width - 1)
        self._require(
            min(exact, self.table.context) <= bound <= most,
            f"row {int(batch.rows[i])} has {exact} to {most} entries after this step, the batch "
            f"has {bound}",
        )

    def _following(self, state: int) -> list[int]:
        """Return as many tokens as a row computes, which follow the prefix with hash ``state``."""
        tokens = []
        for _ in range(self._step_width):
            tokens.append(next_token(state, self.vocab))
            state = extend(state, tokens[-1])
        return tokens

    def _drafts(self, truth: list[int]) -> list[int]:
        """Return drafts for all but the last of ``truth``, each right with probability ``hit``."""
        return [
            token if self._random.random() < self.hit else (token + 1) % self.vocab
            for token in truth[:-1]
        ]

    def _accept(
        self,
        batch: Batch,
        i: int,
        row: RowState,
        tokens: list[int],
        result: StepResult,
    ) -> None:
        assert result.logprobs is not None
        for place, token in enumerate(tokens):
            result.tokens[i, place] = token
            result.logprobs[0][i * self._step_width + place] = logprob_of(row.state)
            row.state = extend(row.state, token)
            row.last = token
            row.length += 1
        result.counts[i] = len(tokens)
        sequence = self.table.sequences[int(batch.rows[i])]
        if sequence is not None and self.bad is not None and sequence.id == self.bad[0]:
            result.bad[i] = row.length - len(sequence.prompt) >= self.bad[1]

    def _score(
        self, batch: Batch, i: int, start: int, state: int, ids: list[int], result: StepResult
    ) -> None:
        if batch.prompt_logprobs is None or not batch.prompt_logprobs[i]:
            return
        values = []
        for token in ids:  # as in a real model, a position's value is that of the next token
            state = extend(state, token)
            values.append(logprob_of(state))
        row = int(batch.rows[i])
        keep = min(len(values), max(0, int(self.table.prompt_len[row]) - 1 - start))
        if keep:
            token_values = np.array(values[:keep], np.float32)
            result.prompt_logprobs.append(
                PromptLogprobs(
                    row,
                    start + 1,
                    token_values,
                    np.zeros((keep, 1), np.int64),
                    token_values[:, None],
                )
            )

    # ---- the store -------------------------------------------------------------------------------

    def _kv_slots(self, batch: Batch, i: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        size = self.table.page_size
        pages: NDArray[np.int64] = batch.pages[i, positions // size].astype(np.int64)
        self._require(
            bool((pages > 0).all()), f"row {int(batch.rows[i])} has no page for a position it needs"
        )
        return pages * size + positions % size

    def _read(self, batch: Batch, i: int, count: int) -> int:
        """Check the first ``count`` cache entries of a row and return the hash of these tokens."""
        if count == 0:
            return EMPTY_HASH
        kv_slots = self._kv_slots(batch, i, np.arange(count, dtype=np.int64))
        self._require(
            bool((self.positions[kv_slots] == np.arange(count)).all()),
            f"row {int(batch.rows[i])} reads entries of other rows: "
            f"{self.positions[kv_slots].tolist()}",
        )
        states = self.states[kv_slots]
        before = np.concatenate([np.array([EMPTY_HASH], np.uint64), states[:-1]])
        self._require(
            bool((extend_all(before, self.tokens[kv_slots].astype(np.uint64)) == states).all()),
            f"row {int(batch.rows[i])} reads an entry of another prefix",
        )
        return int(states[-1])

    def _write(self, batch: Batch, i: int, position: int, token: int, state: int) -> None:
        kv_slot = int(self._kv_slots(batch, i, np.array([position], np.int64))[0])
        self.tokens[kv_slot] = token
        self.positions[kv_slot] = position
        self.states[kv_slot] = state

    # ---- checks ----------------------------------------------------------------------------------

    def _check_shape(self, batch: Batch) -> None:
        self._require(batch.step > self._last_step, "steps are not numbered upwards")
        self._last_step = batch.step
        rows = batch.num_rows
        self._require(
            rows > 0 and len(set(batch.rows.tolist())) == rows, "a row occurs twice in the batch"
        )
        for name in ("epochs", "query_lens", "kv_lens", "samples", "pages"):
            self._require(len(getattr(batch, name)) == rows, f"{name} has another length than rows")
        self._require(bool((batch.query_lens > 0).all()), "a row computes nothing")
        self._require(
            bool((batch.query_lens[: batch.num_decodes] == self._step_width).all()),
            "a decoding row of wrong width",
        )
        self._require(
            bool((self.table.epoch[batch.rows] == batch.epochs).all()), "a row's epoch is wrong"
        )
        decode = Mode.DECODE if self._step_width == 1 else Mode.VERIFY
        expected = decode if batch.num_decodes == rows else Mode.PREFILL
        self._require(batch.mode is expected, f"mode {batch.mode} for a {expected} batch")

    @staticmethod
    def _require(condition: bool, message: str) -> None:
        if not condition:
            raise CacheFault(message)


def _right(drafts: list[int], truth: list[int]) -> int:
    """Return the number of drafts before the first wrong one."""
    count = 0
    while count < len(drafts) and drafts[count] == truth[count]:
        count += 1
    return count
