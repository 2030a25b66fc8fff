"""Conformance suite of the ``speculative`` slot. Subclass it and define ``make``."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.plugin.offers import Mode
from glowplug.core.protocols import Limits, Sampled, SpeculativeAlgorithm
from glowplug.core.step.batch import Accepted, Batch
from glowplug.core.testing.harness.drive import sequence
from glowplug.core.testing.harness.plans import bare_plan
from glowplug.core.testing.harness.scripted_drive import ScriptedDrive
from glowplug.core.testing.harness.scripted_target import HIDDEN, PAGE, VOCAB
from glowplug.core.testing.harness.stateless_sampler import StatelessSampler

ROWS = 8
REQUESTS = 24  #: requests of a driven run
ABORTED = 3  #: the request that is aborted in flight
ABORT_TURN = 12
STEMS = 3  #: texts with which prompts begin, so that requests share prefixes
STEM_TOKENS = 30
LONE_TOKENS = 45


@dataclass(frozen=True)
class DriveCase:
    """The conditions of a driven run.

    Attributes:
        seed: seed of the script and of the prompts.
        depth: number of steps that may be in flight when the next one is scheduled.
        cached: whether requests share prefixes.
        chunk: most prompt tokens of a step.
        pages: pages of the pool; with few of them, requests are preempted.
    """

    seed: int
    depth: int = 1
    cached: bool = True
    chunk: int = 16
    pages: int = 8 * 16 + 1


DRIVES = (
    DriveCase(0),
    DriveCase(1, depth=0, cached=False),
    DriveCase(2, chunk=5),
    DriveCase(3, pages=26),
    DriveCase(4, chunk=3, depth=0),
)


class Greedy(StatelessSampler):
    """A ``Sampler`` that takes the most likely token and counts the observed tokens."""

    def __init__(self) -> None:
        self.observed = 0

    def capture_key(self) -> str | None:
        return "greedy"

    def sample(
        self, logits: Tensor, rows: Tensor, positions: Tensor, ahead: Tensor | None = None
    ) -> Sampled:
        assert len(logits) == len(rows) == len(positions)
        return Sampled(logits.argmax(-1), logits.isnan().any(-1))

    def observe(self, tokens: Tensor, counts: Tensor, rows: Tensor) -> None:
        self.observed += int(counts.sum())


def step(
    rows: list[int],
    decodes: int,
    queries: list[int],
    kv_lens: list[int],
    samples: list[bool] | None = None,
) -> Batch:
    """Return a batch with all the runner's fields that an algorithm may read.

    Args:
        rows: rows of the sequence table.
        decodes: number of decoding rows, which come first.
        queries: number of tokens of each row in this step.
        kv_lens: number of tokens in each row's cache after this step.
        samples: whether each row yields a token; None: all do.
    """
    count = len(rows)
    query_lens = np.asarray(queries, np.int32)
    decoding = Mode.DECODE if max(queries) == 1 else Mode.VERIFY
    batch = Batch(
        step=1,
        mode=Mode.PREFILL if decodes < count else decoding,
        rows=np.asarray(rows, np.int32),
        epochs=np.zeros(count, np.int64),
        num_decodes=decodes,
        query_lens=query_lens,
        kv_lens=np.asarray(kv_lens, np.int32),
        samples=np.asarray(samples or [True] * count, np.bool_),
        prompt_ids=np.zeros(int(query_lens[decodes:].sum()), np.int32),
        pages=np.zeros((count, 4), np.int32),
    )
    _set_device_fields(batch)
    return batch


def _set_device_fields(batch: Batch) -> None:
    """Set the fields that the runner would set, on the CPU; all page numbers and KV slots are 0."""
    lens = batch.kv_lens
    starts = np.concatenate([[0], np.cumsum(batch.query_lens)]).astype(np.int32)
    owner = np.repeat(np.arange(batch.num_rows), batch.query_lens)
    positions = np.arange(len(owner)) - starts[owner] + (lens - batch.query_lens)[owner]
    batch.row_ids = torch.from_numpy(batch.rows).long()
    batch.kv_lens_device = torch.from_numpy(lens)
    batch.query_starts = torch.from_numpy(starts)
    batch.page_table = torch.from_numpy(batch.pages)
    batch.positions = torch.from_numpy(positions)
    batch.kv_slots = torch.zeros(len(owner), dtype=torch.int64)
    batch.input_ids = torch.ones(len(owner), dtype=torch.int64)
    if batch.num_decodes < batch.num_rows:
        batch.logits_index = _logits_index(batch, starts)


def _logits_index(batch: Batch, starts: NDArray[np.int32]) -> Tensor:
    """Return the indices of decode tokens and of the last tokens of prompts that sample."""
    decodes = batch.num_decodes
    sampling = np.flatnonzero(batch.samples[decodes:]) + decodes
    index = np.concatenate([np.arange(starts[decodes]), starts[sampling + 1] - 1])
    return torch.from_numpy(index).long()


def likely(tokens: list[int]) -> Tensor:
    """Return logits float32 [N, V] whose most likely token in row i is ``tokens[i]``."""
    logits = torch.randn(len(tokens), VOCAB, generator=torch.Generator().manual_seed(len(tokens)))
    logits[torch.arange(len(tokens)), torch.tensor(tokens, dtype=torch.int64)] = 9.0
    return logits


class SpeculativeSuite:
    """Tests of the results that the runner relies on, for any algorithm.

    The first tests check single steps: shapes, the rows that yield a token, and the token that
    follows. The driven ones run requests to their end around a target that follows a script
    (``scripted_target``): prompts in chunks beside decoding rows, cached prefixes, rows with new
    owners, preempted and aborted requests, and steps without rows.

    An algorithm for a plan with other sizes than those of ``harness.plans.sizes`` is not tested. A
    draft model that shifts its cache by one can be a ``harness.scripted_draft.ScriptedDraft``,
    which checks the hidden states and the cache entries that a draft pass reads.

    Attributes:
        shape: size of the drafts of the algorithm that ``make`` returns; None: a chain.
        sizes: smaller sizes of drafts that steps may have (``Batch.draft_shape``); (): none.
    """

    shape: DraftShape | None = None
    sizes: tuple[DraftShape, ...] = ()

    def make(self, limits: Limits) -> SpeculativeAlgorithm:
        """Return the algorithm with its draft model (if any) built and reserved."""
        raise NotImplementedError

    @pytest.fixture
    def algorithm(self) -> SpeculativeAlgorithm:
        return self.make(
            Limits(rows=ROWS, context=99, num_pages=33, width=1, vocab=VOCAB, hidden=HIDDEN)
        )

    def accept(self, algorithm: SpeculativeAlgorithm, batch: Batch, tokens: list[int]) -> Accepted:
        """Accept a step whose most likely tokens are ``tokens``, and check the result's shapes."""
        sampler = Greedy()
        made = algorithm.accept(
            likely(tokens), torch.randn(batch.num_tokens, HIDDEN), batch, sampler
        )
        rows = batch.num_rows
        width = algorithm.width()
        assert made.tokens.shape == (rows, width) and made.tokens.dtype == torch.int64
        assert made.counts.shape == (rows,) and made.counts.dtype == torch.int32
        assert made.bad.shape == (rows,) and made.bad.dtype == torch.bool
        assert sampler.observed == int(made.counts.sum()), "the sampler observed other tokens"
        return made

    def test_width_and_lengths_agree(self, algorithm: SpeculativeAlgorithm) -> None:
        width = algorithm.width()
        lengths = algorithm.lengths(step([7, 5], 2, [width] * 2, [6 + width, 3 + width]))
        assert width >= 1 and (lengths is None) == (width == 1)

    def test_prompts_yield_one_token_and_it_comes_next(
        self, algorithm: SpeculativeAlgorithm
    ) -> None:
        made = self.accept(algorithm, step([5, 2, 7], 0, [3, 4, 2], [3, 4, 6]), [1, 2, 3])
        assert made.counts.tolist() == [1, 1, 1] and made.tokens[:, 0].tolist() == [1, 2, 3]
        width = algorithm.width()
        drafted = algorithm.draft(step([7, 5], 2, [width] * 2, [6 + width, 3 + width]))
        assert drafted.shape == (2, width) and drafted.dtype == torch.int64
        assert drafted[:, 0].tolist() == [3, 1]
        assert ((drafted >= 0) & (drafted < VOCAB)).all()

    def test_a_chunk_that_does_not_end_its_prompt_yields_nothing(
        self, algorithm: SpeculativeAlgorithm
    ) -> None:
        made = self.accept(
            algorithm, step([4, 1, 6], 0, [5, 4, 3], [5, 4, 3], [False, True, False]), [10]
        )
        assert made.counts.tolist() == [0, 1, 0] and made.tokens[1, 0] == 10

    def test_decoding_rows_accept_at_least_one(self, algorithm: SpeculativeAlgorithm) -> None:
        self.accept(algorithm, step([3, 0], 0, [2, 2], [2, 2]), [4, 5])
        width = algorithm.width()
        batch = step([0, 3], 2, [width] * 2, [2 + width] * 2)
        batch.input_ids = algorithm.draft(batch).flatten()
        tokens = [(6 + place) % VOCAB for place in range(2 * width)]
        made = self.accept(algorithm, batch, tokens)
        assert set(made.counts.tolist()) <= set(range(1, width + 1))
        assert made.tokens[:, 0].tolist() == tokens[::width], "the first token is the target's"
        last = made.tokens.gather(1, made.counts.long()[:, None] - 1)
        following = algorithm.draft(step([3, 0], 2, [width] * 2, [9] * 2))[:, :1]
        assert torch.equal(following, last.flip(0))

    def test_rows_do_not_mix(self, algorithm: SpeculativeAlgorithm) -> None:
        """Computing one row does not change the other rows' next tokens."""
        self.accept(algorithm, step([1, 2], 0, [2, 2], [2, 2]), [8, 9])
        self.accept(algorithm, step([6], 0, [3], [3]), [11])
        width = algorithm.width()
        drafted = algorithm.draft(step([2, 6, 1], 3, [width] * 3, [9] * 3))
        assert drafted[:, 0].tolist() == [9, 11, 8]

    # ---- driven runs -----------------------------------------------------------------------------

    def prepare(self, drive: ScriptedDrive) -> None:
        """Change the parts of a driven run before it begins."""

    def driven(self, case: DriveCase, sizes: Seq[DraftShape] = ()) -> ScriptedDrive:
        """Run requests to their end, compare every step with the script, and return the driver."""
        limits = Limits(
            rows=ROWS + 1, context=128, num_pages=case.pages, width=1, vocab=VOCAB, hidden=HIDDEN
        )
        algorithm = self.make(limits)
        width = algorithm.width()
        shape = self.shape or DraftShape.chain(width - 1)
        plan = bare_plan(
            width=width,
            draft_shape=shape,
            lookahead=shape.lookahead,
            num_pages=case.pages,
            chunk_size=case.chunk,
            max_step_tokens=case.chunk + ROWS * width,
            page_size=PAGE,
        )
        drive = ScriptedDrive(
            algorithm,
            plan,
            seed=case.seed,
            depth=case.depth,
            cached=case.cached,
            sizes=[shape, *sizes] if sizes else (),
        )
        self.prepare(drive)
        rng = random.Random(case.seed)
        # first a request alone, so that its chunks end where the page table ends
        drive.add(sequence(REQUESTS, _tokens(rng, LONE_TOKENS), max_tokens=9))
        drive.run()
        _submit(drive, rng)
        for _ in range(ABORT_TURN):
            drive.turn()
        drive.abort(ABORTED)
        drive.run()
        return drive

    @pytest.mark.parametrize("case", DRIVES, ids=str)
    def test_answers_follow_the_script(self, case: DriveCase) -> None:
        drive = self.driven(case)
        stats = drive.scheduler.load()
        assert (stats.preemptions > 0) == (case.pages < DRIVES[0].pages)
        hits = [seen.admitted.cached_tokens for seen in drive.seen.values() if seen.admitted]
        assert (sum(hits) > 0) == case.cached
        if drive.runner.speculative.width() > 1:
            assert min(drive.counts) == 1 < max(drive.counts), "no draft was accepted"

    @pytest.mark.parametrize("case", DRIVES[:3], ids=str)
    def test_drafts_may_change_their_size(self, case: DriveCase) -> None:
        if not self.sizes:
            pytest.skip("all steps have drafts of one size")
        drive = self.driven(case, self.sizes)
        assert min(drive.counts) == 1 < max(drive.counts), "no draft was accepted"


def _submit(drive: ScriptedDrive, rng: random.Random) -> None:
    """Submit requests, some of which begin alike."""
    stems = [_tokens(rng, STEM_TOKENS) for _ in range(STEMS)]
    for id in range(REQUESTS):
        stem = rng.choice(stems)[: rng.randrange(STEM_TOKENS)]
        prompt = stem + _tokens(rng, rng.randint(1, 13))
        drive.add(sequence(id, prompt, max_tokens=rng.randint(1, 30)))


def _tokens(rng: random.Random, count: int) -> list[int]:
    """Return random tokens without the last id, which the script does not use."""
    return [rng.randrange(VOCAB - 1) for _ in range(count)]
