"""Steps without drafts write the draft's cache entries later, but before they matter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from glowplug.core.plugin.draft_shape import NO_DRAFTS, DraftShape
from glowplug.core.protocols import Limits
from glowplug.core.step.batch import Batch
from glowplug.core.step.graph_pieces import ExtendWork
from glowplug.core.testing.suites.speculative import HIDDEN, VOCAB, Greedy, likely
from glowplug.plugins.speculative.nextn_runtime import NextN
from glowplug.plugins.speculative.shared import pending_tokens
from glowplug.plugins.speculative.shared.pending_tokens import PendingTokens
from tests.contract.test_speculative_nextn import LIMITS, PAGE, make, shifted

CHAIN = DraftShape.chain(2)
ROWS, LENGTHS = [4, 1, 6], [3, 9, 14]


class Drive:
    """An algorithm over steps whose tokens and hidden states depend on their number only."""

    def __init__(self, *, pending: bool, on_host: bool, limits: Limits = LIMITS) -> None:
        self.algorithm, self.draft = make(limits, CHAIN.steps)
        self.algorithm._on_host = on_host
        self._record = self.draft.fill
        self.draft.fill = self._fill  # type: ignore[method-assign]
        self.algorithm._draft_extend.work = ExtendWork(self._fill, HIDDEN, torch.float32)
        if pending:
            cpu = torch.device("cpu")
            self.algorithm._pending = PendingTokens(HIDDEN, torch.float32, cpu)
        self.lengths = dict(zip(ROWS, LENGTHS, strict=True))
        self.number = 0
        for row, length in self.lengths.items():
            self.algorithm._computed[row] = length

    def _fill(self, *parts: Tensor) -> None:
        """Record copies: the memory of kept tokens is used again."""
        self._record(*(part.clone() for part in parts))

    def step(self, rows: list[int], shape: DraftShape) -> None:
        """Run a step of decoding rows in which no draft is accepted."""
        self.number += 1
        rng = np.random.default_rng(self.number)
        lens = [self.lengths[row] + shape.tokens for row in rows]
        batch = self._batch(rows, [shape.tokens] * len(rows), lens, len(rows))
        batch.draft_shape = shape
        batch.input_ids = self.algorithm.draft(batch).flatten()
        unlike = ((batch.input_ids + 1) % VOCAB).roll(-1)
        hidden = rng.standard_normal((batch.num_tokens, HIDDEN), np.float32)
        self.algorithm.accept(likely(unlike.tolist()), torch.from_numpy(hidden), batch, Greedy())
        for row in rows:
            self.lengths[row] += int(self.algorithm._computed[row]) - self.lengths[row]

    def prompt(self, row: int) -> None:
        """Run a step that computes a prompt of three tokens."""
        batch = self._batch([row], [3], [3], 0)
        batch.input_ids = torch.arange(3)
        self.algorithm.draft(batch)
        hidden = torch.ones(3, HIDDEN)
        self.algorithm.accept(likely([2]), hidden, batch, Greedy())
        self.lengths[row] = 3

    def _batch(self, rows: list[int], queries: list[int], lens: list[int], decodes: int) -> Batch:
        batch = shifted(self.algorithm, rows, queries, lens, [False] * len(rows), decodes)
        pages = np.array([[1 + 8 * ROWS.index(row) + i for i in range(8)] for row in rows])
        batch.pages = pages.astype(np.int32)
        batch.page_table = torch.from_numpy(batch.pages)
        owner = np.repeat(np.arange(len(rows)), batch.query_lens)
        at = batch.positions.numpy()
        slots = batch.pages[owner, at // PAGE].astype(np.int64) * PAGE + at % PAGE
        batch.kv_slots = torch.from_numpy(slots)
        return batch

    def cache(self) -> dict[int, tuple[object, ...]]:
        """Return the entries of the draft's cache by slot, those of the scratch page left out."""
        found = {}
        for fill in self.draft.fills:
            parts = (fill[name].tolist() for name in ("input_ids", "positions", "previous"))
            for slot, *entry in zip(fill["kv_slots"].tolist(), *parts):
                if slot >= PAGE:
                    found[slot] = tuple(map(str, entry))
        return found


def both(on_host: bool) -> tuple[Drive, Drive]:
    return Drive(pending=True, on_host=on_host), Drive(pending=False, on_host=on_host)


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("then", ["drafts", "other rows", "another order", "a prompt"])
def test_kept_entries_are_written_before(then: str, on_host: bool) -> None:
    kept, at_once = both(on_host)
    for drive in (kept, at_once):
        for _ in range(5):
            drive.step(ROWS, NO_DRAFTS)
    assert not kept.draft.fills and at_once.draft.fills
    for drive in (kept, at_once):
        if then == "drafts":
            drive.step(ROWS, CHAIN)
        elif then == "other rows":
            drive.step(ROWS[1:], NO_DRAFTS)
        elif then == "another order":
            drive.step(ROWS[::-1], NO_DRAFTS)
        else:
            drive.prompt(ROWS[0])
    written, wanted = kept.cache(), at_once.cache()
    if then in ("other rows", "another order"):  # the last step's own entries are kept again
        kept.prompt(ROWS[0])
        at_once.prompt(ROWS[0])
        written, wanted = kept.cache(), at_once.cache()
    assert len(wanted) >= 15 and written == wanted


@pytest.mark.parametrize("on_host", [True, False])
def test_entries_are_written_when_no_more_can_be_kept(
    on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_tokens, "PENDING_TOKENS", 7)
    kept, at_once = both(on_host)
    for number in range(1, 6):
        for drive in (kept, at_once):
            drive.step(ROWS, NO_DRAFTS)
        assert len(kept.cache()) == (number - 1) // 2 * 6
    for drive in (kept, at_once):
        drive.step(ROWS, CHAIN)
    assert kept.cache() == at_once.cache()


def test_many_rows_keep_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step's tokens would fill the memory; their entries are written at once."""
    monkeypatch.setattr(pending_tokens, "PENDING_TOKENS", 5)
    kept, at_once = both(on_host=False)
    for drive in (kept, at_once):
        drive.step(ROWS, NO_DRAFTS)
    assert kept.cache() == at_once.cache() and len(at_once.cache()) == 3


def test_a_drafting_algorithm_of_one_size_keeps_nothing() -> None:
    algorithm, _ = make(LIMITS, 3)
    assert isinstance(algorithm, NextN) and algorithm._pending is None
