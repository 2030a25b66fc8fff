"""Conformance suite of the ``scheduler`` slot. Subclass it in your own tests and define ``make``.

    class TestMine(SchedulerSuite):
        def make(self, plan, clock):
            return MyScheduler(MyOptions(), plan, Worker())

All tests run on the fake model, which checks each KV slot that a step reads; expected outputs
do not depend on the schedule. Override ``cache`` and ``policy`` to test with real ones.
"""

from __future__ import annotations

import random

import pytest

from glowplug.core.testing.harness.drive import sequence
from glowplug.core.testing.harness.plans import VOCAB
from glowplug.core.testing.harness.prefix_hash import reference
from glowplug.core.testing.suites.parts.scheduler_base import (
    SEEDS,
    ManualClock as ManualClock,
    prompt as prompt,
)
from glowplug.core.testing.suites.parts.scheduler_ends import SchedulerEndsSuite


class SchedulerSuite(SchedulerEndsSuite):
    """Tests that every scheduler must pass."""

    # ---- outputs ---------------------------------------------------------------------------------

    @pytest.mark.parametrize("depth", [0, 1, 2])
    @pytest.mark.parametrize("length", [1, 3, 4, 5, 16, 17, 40, 62, 63])
    def test_one_sequence(self, length: int, depth: int) -> None:
        one = sequence(1, prompt(random.Random(length), length), max_tokens=12)
        self.run(self.drive(depth=depth), [one])

    @pytest.mark.parametrize("depth", [0, 1, 2])
    @pytest.mark.parametrize("seed", SEEDS)
    def test_many_sequences(self, seed: int, depth: int) -> None:
        rng = random.Random(seed)
        sequences = [
            sequence(
                i,
                prompt(rng, rng.randrange(1, 50)),
                max_tokens=rng.randrange(1, 14),
                arrival=float(i),
            )
            for i in range(20)
        ]
        drive = self.drive(depth=depth)
        self.run(drive, sequences)
        assert len(drive.batches) < sum(
            len(one.prompt) + len(drive.seen[one.id].tokens) for one in sequences
        )
        assert any(batch.num_decodes > 1 for batch in drive.batches), "no two rows were batched"

    @pytest.mark.parametrize("width", [2, 3, 5])
    @pytest.mark.parametrize("seed", SEEDS)
    def test_speculation(self, seed: int, width: int) -> None:
        """Rows accept a random number of tokens a step; outputs do not change."""
        rng = random.Random(seed)
        stops = frozenset(rng.sample(range(VOCAB), 60))
        sequences = [
            sequence(
                i,
                prompt(rng, rng.randrange(1, 40)),
                max_tokens=rng.randrange(1, 24),
                logprobs=1,
                stop_ids=stops if i % 2 else frozenset(),
            )
            for i in range(8)
        ]
        drive = self.drive(width=width, lookahead=width - 1, seed=seed)
        self.run(drive, sequences)
        for one in sequences:
            assert len(drive.seen[one.id].logprobs) == len(drive.seen[one.id].tokens)
        gained = {count for one in sequences for count in drive.seen[one.id].counts}
        assert gained > {1}, "rows have to accept some drafts and refuse others"

    def test_stop_id_is_kept_and_ends(self) -> None:
        ids = prompt(random.Random(3), 9)
        full, _ = reference(ids, sequence(0, ids).params, frozenset(), vocab=VOCAB, context=64)
        one = sequence(1, ids, stop_ids=frozenset({full[4]}))
        early = sequence(2, ids, max_tokens=5)
        drive = self.drive()
        self.run(drive, [one, early])
        assert drive.seen[1].tokens == full[:5]
        finished = drive.seen[1].finished
        assert finished is not None and finished.stop_id == full[4]

    def test_min_tokens_holds_stops_back(self) -> None:
        ids = prompt(random.Random(3), 9)
        full, _ = reference(ids, sequence(0, ids).params, frozenset(), vocab=VOCAB, context=64)
        drive = self.drive()
        one = sequence(1, ids, stop_ids=frozenset({full[2], full[6]}), min_tokens=4)
        self.run(drive, [one])
        assert drive.seen[1].tokens == full[:7]

    def test_many_stop_ids(self) -> None:
        rng = random.Random(5)
        sequences = [
            sequence(
                i, prompt(rng, 5), max_tokens=40, stop_ids=frozenset(rng.sample(range(VOCAB), 100))
            )
            for i in range(6)
        ]
        drive = self.drive()
        self.run(drive, sequences)
        ends = {seen.finished.reason for seen in drive.seen.values() if seen.finished is not None}
        assert "stop" in ends

    def test_the_context_is_a_limit(self) -> None:
        drive = self.drive(context_length=32)
        self.run(drive, [sequence(1, prompt(random.Random(1), 20), max_tokens=500)])
        assert len(drive.seen[1].tokens) == 12

    def test_logprobs_go_with_tokens(self) -> None:
        rng = random.Random(8)
        sequences = [
            sequence(i, prompt(rng, 10), logprobs=i % 3 - 1 if i % 3 else None) for i in range(9)
        ]
        drive = self.drive()
        self.run(drive, sequences)
        for one in sequences:
            wanted = len(drive.seen[one.id].tokens) if one.params.logprobs is not None else 0
            assert len(drive.seen[one.id].logprobs) == wanted

    def test_prompt_logprobs_are_whole_and_never_from_the_cache(self) -> None:
        ids = prompt(random.Random(2), 30)
        drive = self.drive()
        self.run(drive, [sequence(1, ids)])
        self.run(drive, [sequence(2, ids, prompt_logprobs=1), sequence(3, ids, prompt_logprobs=0)])
        assert len(drive.seen[2].prompt_logprobs) == 29
        assert drive.seen[2].prompt_logprobs == drive.seen[3].prompt_logprobs
        assert drive.seen[1].prompt_logprobs == []

    # ---- memory pressure -------------------------------------------------------------------------

    @pytest.mark.parametrize("width", [1, 3])
    @pytest.mark.parametrize("depth", [0, 1])
    @pytest.mark.parametrize("seed", SEEDS)
    def test_a_tiny_pool_changes_nothing(self, seed: int, depth: int, width: int) -> None:
        """If pages suffice for little more than one sequence, the outputs stay the same."""
        rng = random.Random(seed)
        heads = [prompt(rng, 24) for _ in range(2)]
        sequences = [
            sequence(
                i,
                rng.choice(heads)[: rng.randrange(1, 24)] + prompt(rng, rng.randrange(0, 8)),
                max_tokens=rng.randrange(1, 30),
                arrival=float(i),
                priority=rng.randrange(3),
            )
            for i in range(12)
        ]
        drive = self.drive(
            depth=depth,
            width=width,
            lookahead=width - 1,
            seed=seed,
            num_pages=17 + rng.randrange(1, 6),
        )
        self.run(drive, sequences)

    def test_memory_pressure_preempts(self) -> None:
        drive = self.drive(num_pages=17, max_running=8)
        self.run(
            drive, [sequence(i, [i + 1] * 6, max_tokens=40, arrival=float(i)) for i in range(8)]
        )
        assert drive.scheduler.load().preemptions > 0

    # ---- the prefix cache ------------------------------------------------------------------------

    def test_a_finished_prompt_is_reused(self) -> None:
        ids = prompt(random.Random(1), 40)
        drive = self.drive()
        if not drive.cache.shares:
            pytest.skip("this cache shares nothing")
        self.run(drive, [sequence(1, ids, max_tokens=9)])
        before = drive.model.computed
        self.run(
            drive,
            [sequence(2, ids, max_tokens=1), sequence(3, ids + drive.seen[1].tokens, max_tokens=1)],
        )
        admitted = [drive.seen[i].admitted for i in (2, 3)]
        cached = [one.cached_tokens for one in admitted if one is not None]
        assert cached == [36, 48], "whole pages, and at least one token left to compute"
        assert drive.model.computed - before == 4 + 1

    def test_a_salt_separates(self) -> None:
        ids = prompt(random.Random(1), 40)
        drive = self.drive()
        self.run(drive, [sequence(1, ids, salt="a")])
        self.run(drive, [sequence(2, ids, salt="b")])
        admitted = drive.seen[2].admitted
        assert admitted is not None and admitted.cached_tokens == 0

    def test_flush(self) -> None:
        drive = self.drive()
        drive.add(sequence(1, [7] * 20))
        drive.step()
        assert not drive.scheduler.flush(), "flush while a sequence runs"
        drive.run()
        assert drive.scheduler.flush()
        assert drive.pages.free == drive.pages.total
        self.run(drive, [sequence(2, [7] * 20)])

    def test_statistics_add_up(self) -> None:
        rng = random.Random(4)
        drive = self.drive()
        sequences = [sequence(i, prompt(rng, 10), max_tokens=7) for i in range(5)]
        self.run(drive, sequences)
        stats = drive.scheduler.load()
        assert (stats.prompt_tokens, stats.output_tokens, stats.finished) == (50, 35, 5)
        assert stats.steps == len(drive.batches) and stats.pages_total == drive.pages.total
