"""A deterministic stand-in for runner, model and sampler that proves scheduling right without
torch.

The next token is a hash of the whole prefix. Each computed token leaves its id, its position and
the prefix's hash in a paged store; every step reads back all that it attends to and checks it, so a
wrong slot, a page reused too early, a missing chunk or a lost token raises :class:`CacheFault` or
changes the output. Freed pages are poisoned.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glowplug.core.plugin.offers import Mode
from glowplug.core.step.batch import Batch, PromptLogprobs, StepResult
from glowplug.core.step.pages import PageAllocator
from glowplug.core.step.request import SamplingParams
from glowplug.core.step.sequence_table import SequenceTable

MASK = (1 << 64) - 1
START = 0x51ED270B
# constants of splitmix64
GOLDEN = 0x9E3779B97F4A7C15
MIX = 0xBF58476D1CE4E5B9
STIR = 0x94D049BB133111EB
POISON = -7


class CacheFault(AssertionError):
    """A step read a slot that does not hold what the sequence computed there, or was told nonsense."""


def extend(prefix_hash: int, token: int) -> int:
    """Hash of a prefix and one more token."""
    value = (prefix_hash ^ (token + GOLDEN)) * MIX & MASK
    return (value ^ (value >> 29)) * STIR & MASK


def extend_all(prefix_hashes: NDArray[np.uint64], tokens: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The same for many at once."""
    value = (prefix_hashes ^ (tokens + np.uint64(GOLDEN))) * np.uint64(MIX)
    mixed: NDArray[np.uint64] = (value ^ (value >> np.uint64(29))) * np.uint64(STIR)
    return mixed


def next_token(prefix_hash: int, vocab: int) -> int:
    return (prefix_hash >> 17) % vocab


def logprob_of(prefix_hash: int) -> float:
    """A made-up log-probability of the token that follows."""
    return -float((prefix_hash >> 5) % 1000) / 128


def reference(
    prompt: list[int], params: SamplingParams, stop_ids: frozenset[int], *, vocab: int, context: int
) -> tuple[list[int], str]:
    """(output, finish reason) that any right schedule must give."""
    state = START
    for token in prompt:
        state = extend(state, token)
    output: list[int] = []
    assert params.max_tokens is not None
    while True:
        token = next_token(state, vocab)
        output.append(token)
        state = extend(state, token)
        if token in stop_ids and len(output) >= params.min_tokens:
            return output, "stop"
        if len(output) == params.max_tokens or len(prompt) + len(output) == context:
            return output, "length"


class PoisonedPages(PageAllocator):
    """An allocator that tells the fake model which pages were freed."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self.model: FakeModel | None = None

    def give(self, pages: NDArray[np.int32]) -> None:
        super().give(pages)
        if self.model is not None:
            self.model.poison(pages)


@dataclass(eq=False)
class RowState:
    """What the device knows of a row: accepted tokens, the hash of them, and the next input."""

    length: int = 0
    last: int = 0
    state: int = START
    begun: bool = False


class FakeModel:
    """Executes batches in launch order, at once; results are the caller's to commit later.

    Args:
        width: tokens a decoding row computes; beyond one, drafts are right with probability
            ``hit``.
        bad: (sequence id, output length) at which the logits turn to NaN.
        lookahead: entries that a draft writes behind what was accepted; nobody reads them.
        depth: steps that may be in flight when one is launched; each may make a bound too high by
            ``width - 1``.
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
        self.hit = hit
        self.bad = bad
        self.depth = depth
        self.lookahead = lookahead
        slots = num_pages * table.page_size
        self.tokens = np.full(slots, POISON, np.int64)
        self.positions = np.full(slots, POISON, np.int64)
        self.states = np.zeros(slots, np.uint64)
        self.rows: dict[int, RowState] = {}
        self.computed = 0  #: tokens of all steps
        self._random = random.Random(seed)
        self._last_step = 0

    def poison(self, pages: NDArray[np.int32]) -> None:
        slots = (pages[:, None] * self.table.page_size + np.arange(self.table.page_size)).ravel()
        self.tokens[slots] = self.positions[slots] = POISON
        self.states[slots] = 0

    def launch(self, batch: Batch) -> StepResult:
        self._check_shape(batch)
        for row in batch.left:
            self._require(row in self.rows, f"row {row} left without having joined")
            del self.rows[row]
        for sequence in batch.joined:
            self._require(sequence.row not in self.rows, f"row {sequence.row} joined twice")
            self.rows[sequence.row] = RowState()
        result = StepResult(
            np.full((batch.num_rows, self.width), POISON, np.int64),
            np.zeros(batch.num_rows, np.int32),
            np.zeros(batch.num_rows, np.bool_),
        )
        logprobs = np.zeros(batch.num_rows * self.width, np.float32)
        at = 0
        for i, row in enumerate(batch.rows.tolist()):
            self.computed += int(batch.query_lens[i])
            if i < batch.num_decodes:
                self._decode(batch, i, self.rows[row], result, logprobs)
            else:
                count = int(batch.query_lens[i])
                self._prefill(
                    batch,
                    i,
                    self.rows[row],
                    batch.prompt_ids[at : at + count].tolist(),
                    result,
                    logprobs,
                )
                at += count
        self._require(at == len(batch.prompt_ids), "prompt_ids do not match the prefill rows")
        top_ids = result.tokens.reshape(-1, 1)
        result.logprobs = logprobs, top_ids, logprobs[:, None]
        return result

    # ---- rows ------------------------------------------------------------------------------------

    def _prefill(
        self,
        batch: Batch,
        i: int,
        row: RowState,
        ids: list[int],
        result: StepResult,
        logprobs: NDArray[np.float32],
    ) -> None:
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
            self._accept(batch, i, row, [next_token(state, self.vocab)], result, logprobs)
            self._draft(batch, i, row)

    def _check_chunk(self, batch: Batch, i: int, row: RowState, start: int, stop: int) -> None:
        """What a draft is told of a chunk: the token behind it, and whether it goes on from a
        cached prefix.
        """
        chunk = i - batch.num_decodes
        number = int(batch.rows[i])
        self._require(
            batch.next_ids is not None and batch.resumed is not None,
            "next_ids or resumed is missing",
        )
        assert batch.next_ids is not None and batch.resumed is not None
        following = 0 if batch.samples[i] else int(self.table.tokens[number, stop])
        self._require(
            int(batch.next_ids[chunk]) == following, f"row {number} goes on with another token"
        )
        self._require(
            bool(batch.resumed[chunk]) == (start > 0 and not row.begun),
            f"row {number} is not resumed here",
        )
        row.begun = True

    def _draft(self, batch: Batch, i: int, row: RowState) -> None:
        """A draft's entries behind the accepted tokens: written over by the next step, on pages
        that are the row's.
        """
        limit = int(self.table.max_length[int(batch.rows[i])])
        for position in range(row.length - 1, min(row.length - 1 + self.lookahead, limit - 1)):
            self._write(batch, i, position, POISON, START)

    def _decode(
        self, batch: Batch, i: int, row: RowState, result: StepResult, logprobs: NDArray[np.float32]
    ) -> None:
        first = row.length - 1  # position of the last accepted token, whose entry is computed now
        number = int(batch.rows[i])
        bound = int(batch.kv_lens[i])
        limit = int(self.table.max_length[number])
        if (
            row.length >= limit
        ):  # full, which only the device knows yet: the host will drop what comes of this
            self._require(
                self.width > 1, f"row {number} is launched although it was known to be full"
            )
            result.tokens[i], result.counts[i] = 0, 1
            return
        exact = first + self.width
        most = exact + self.depth * (self.width - 1)
        self._require(
            min(exact, self.table.context) <= bound <= most,
            f"row {number} has {exact} to {most} entries after this step, the batch says {bound}",
        )
        before = self._read(batch, i, first)
        self._require(
            extend(before, row.last) == row.state, f"row {number} is not where the device left it"
        )
        inputs = [row.last]
        truth = []
        state = row.state
        for _ in range(self.width):
            truth.append(next_token(state, self.vocab))
            state = extend(state, truth[-1])
        inputs += [
            token if self._random.random() < self.hit else (token + 1) % self.vocab
            for token in truth[:-1]
        ]
        state = before
        for offset, token in enumerate(inputs):
            state = extend(state, token)
            if first + offset < limit - 1:
                self._write(batch, i, first + offset, token, state)
        count = 1
        while count < self.width and inputs[count] == truth[count - 1]:
            count += 1
        self._accept(batch, i, row, truth[:count], result, logprobs)
        self._draft(batch, i, row)

    def _accept(
        self,
        batch: Batch,
        i: int,
        row: RowState,
        tokens: list[int],
        result: StepResult,
        logprobs: NDArray[np.float32],
    ) -> None:
        for place, token in enumerate(tokens):
            result.tokens[i, place] = token
            logprobs[i * self.width + place] = logprob_of(row.state)
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
        for token in (
            ids
        ):  # the value at a position is that of the token which follows it, as a real model's
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

    def _slots(self, batch: Batch, i: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        size = self.table.page_size
        pages: NDArray[np.int64] = batch.pages[i, positions // size].astype(np.int64)
        self._require(
            bool((pages > 0).all()), f"row {int(batch.rows[i])} has no page for a position it needs"
        )
        return pages * size + positions % size

    def _read(self, batch: Batch, i: int, count: int) -> int:
        """Check the first ``count`` entries of a row against one another; returns the hash of that
        prefix.
        """
        if count == 0:
            return START
        slots = self._slots(batch, i, np.arange(count, dtype=np.int64))
        self._require(
            bool((self.positions[slots] == np.arange(count)).all()),
            f"row {int(batch.rows[i])} reads entries that are not its own: {self.positions[slots].tolist()}",
        )
        states = self.states[slots]
        before = np.concatenate([np.array([START], np.uint64), states[:-1]])
        self._require(
            bool((extend_all(before, self.tokens[slots].astype(np.uint64)) == states).all()),
            f"row {int(batch.rows[i])} reads an entry of another prefix",
        )
        return int(states[-1])

    def _write(self, batch: Batch, i: int, position: int, token: int, state: int) -> None:
        slot = int(self._slots(batch, i, np.array([position], np.int64))[0])
        self.tokens[slot], self.positions[slot], self.states[slot] = token, position, state

    # ---- checks ----------------------------------------------------------------------------------

    def _check_shape(self, batch: Batch) -> None:
        self._require(batch.step > self._last_step, "steps are not numbered upwards")
        self._last_step = batch.step
        rows = batch.num_rows
        self._require(
            rows > 0 and len(set(batch.rows.tolist())) == rows, "a row is twice in the batch"
        )
        for name in ("epochs", "query_lens", "kv_lens", "samples", "pages"):
            self._require(len(getattr(batch, name)) == rows, f"{name} has another length than rows")
        self._require(bool((batch.query_lens > 0).all()), "a row computes nothing")
        self._require(
            bool((batch.query_lens[: batch.num_decodes] == self.width).all()),
            "a decoding row of odd width",
        )
        self._require(
            bool((self.table.epoch[batch.rows] == batch.epochs).all()), "an epoch is not the row's"
        )
        decode = Mode.DECODE if self.width == 1 else Mode.VERIFY
        expected = decode if batch.num_decodes == rows else Mode.PREFILL
        self._require(batch.mode is expected, f"mode {batch.mode} for a {expected} batch")

    @staticmethod
    def _require(condition: bool, message: str) -> None:
        if not condition:
            raise CacheFault(message)
