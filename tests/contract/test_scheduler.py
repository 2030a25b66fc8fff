"""The continuous scheduler passes the conformance suite under each cache and policy, and keeps its
own promises.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import PrefixCache, SchedulingPolicy, Worker
from glowplug.core.step.request import Sequence
from glowplug.core.testing.harness.drive import Drive, sequence
from glowplug.core.testing.harness.plans import bare_plan
from glowplug.core.testing.suites.scheduler import ManualClock, SchedulerSuite, prompt
from glowplug.plugins.cache.radix import RadixOptions
from glowplug.plugins.cache.radix_runtime import RadixCache
from glowplug.plugins.scheduler.continuous import ContinuousOptions
from glowplug.plugins.scheduler.continuous_runtime import Continuous
from glowplug.plugins.scheduler.policies import FcfsOptions, LongestPrefixOptions, PriorityOptions
from glowplug.plugins.scheduler.policies_runtime import Fcfs, LongestPrefix, Priority


class Base(SchedulerSuite):
    options = ContinuousOptions()

    def make(self, plan: EnginePlan, clock: Callable[[], float]) -> Continuous:
        return Continuous(self.options, plan, Worker(), clock=clock)


class TestWithoutCache(Base):
    pass


class TestRadixFcfs(Base):
    def cache(self, plan: EnginePlan) -> PrefixCache:
        return RadixCache(RadixOptions(), plan, Worker())

    def policy(self, plan: EnginePlan) -> SchedulingPolicy:
        return Fcfs(FcfsOptions(), plan, Worker())

    @pytest.mark.parametrize("count", [2, 5])
    def test_like_prompts_that_arrive_together_are_computed_once(self, count: int) -> None:
        ids = prompt(random.Random(9), 70)
        drive = self.drive(context_length=128, chunk_size=100, max_step_tokens=120)
        self.run(
            drive,
            [
                sequence(i, ids if i < count else prompt(random.Random(i), 9), max_tokens=4)
                for i in range(count + 1)
            ],
        )
        assert drive.model.computed < 70 + 9 + count * (4 + 4)

    def test_waiting_for_a_like_prompt_ends_when_that_is_aborted(self) -> None:
        ids = prompt(random.Random(9), 100)
        drive = self.drive(context_length=128)
        drive.add(sequence(0, ids))
        drive.add(other := sequence(1, ids, max_tokens=4))
        drive.step()
        drive.abort(0)
        drive.run()
        self.expect(drive, [other])

    def test_a_cached_prefix_survives_preemption_pressure(self) -> None:
        """Tokens computed by a preempted sequence are found again, unless their pages were
        needed.
        """
        drive = self.drive(num_pages=34, max_running=4, context_length=64)
        sequences = [
            sequence(i, prompt(random.Random(i), 20), max_tokens=40, arrival=float(i))
            for i in range(4)
        ]
        self.run(drive, sequences)
        assert drive.scheduler.load().preemptions > 0
        recomputed = drive.model.computed - sum(20 + 39 for _ in sequences)
        assert recomputed < 100


class TestRadixPriority(TestRadixFcfs):
    def policy(self, plan: EnginePlan) -> SchedulingPolicy:
        return Priority(PriorityOptions(), plan, Worker())

    def test_the_important_run_first(self) -> None:
        drive = self.drive(max_running=1)
        for i in range(6):
            drive.add(sequence(i, [i + 1] * 5, max_tokens=2, priority=-i))
        drive.run()
        order = [one.id for batch in drive.batches for one in batch.joined]
        assert order == [5, 4, 3, 2, 1, 0]


class TestRadixLongestPrefix(TestRadixFcfs):
    def policy(self, plan: EnginePlan) -> SchedulingPolicy:
        return LongestPrefix(LongestPrefixOptions(window=4), plan, Worker())

    def test_cached_prompts_run_first(self) -> None:
        drive = self.drive(max_running=1)
        self.run(drive, [sequence(0, [5] * 30, max_tokens=2)])
        for i in range(1, 4):
            drive.add(sequence(i, ([5] if i == 3 else [i + 10]) * 30, max_tokens=2))
        drive.run()
        assert [one.id for batch in drive.batches for one in batch.joined] == [0, 3, 1, 2]


class TestPromptsFirst(TestRadixFcfs):
    options = ContinuousOptions(mixed=False)

    def test_no_step_mixes(self) -> None:
        drive = self.drive()
        self.run(drive, [sequence(i, [i + 1] * 30, arrival=float(i)) for i in range(6)])
        assert all(batch.num_decodes in (0, batch.num_rows) for batch in drive.batches)


class TestSmallCache(Base):
    def cache(self, plan: EnginePlan) -> PrefixCache:
        return RadixCache(RadixOptions(max_pages=5), plan, Worker())

    def test_a_finished_prompt_is_reused(self) -> None:
        drive = self.drive()
        self.run(drive, [sequence(1, [4] * 40)])
        self.run(drive, [sequence(2, [4] * 40)])
        admitted = drive.seen[2].admitted
        assert admitted is not None and admitted.cached_tokens == 20

    def test_waiting_for_a_like_prompt_is_given_up_when_the_cache_cannot_keep_it(self) -> None:
        """The other seven prompts wait once, then all run; they do not wait for one another."""
        drive = self.drive(context_length=128, chunk_size=1000, max_step_tokens=1000, num_pages=400)
        self.run(drive, [sequence(i, [4] * 100, max_tokens=2) for i in range(8)])
        prefills = sum(batch.num_decodes < batch.num_rows for batch in drive.batches)
        assert prefills == 2


class Contrary:
    """A legal policy that does its worst: reversed order, and the sequence with most to lose is
    preempted.
    """

    def order(self, waiting: list[Sequence], cached: Any) -> list[Sequence]:
        return waiting[::-1]

    def victim(self, running: list[Sequence]) -> Sequence:
        return max(running, key=lambda one: (-one.arrival, len(one.prompt)))


class TestContraryPolicy(TestRadixFcfs):
    """No policy can bring about a livelock."""

    def policy(self, plan: EnginePlan) -> SchedulingPolicy:
        return Contrary()  # type: ignore[return-value]


# ---- beyond the suite ----------------------------------------------------------------------------


def drive_of(depth: int = 1, **sizes: Any) -> Drive:
    plan = bare_plan(**sizes)
    worker = Worker()
    scheduler = Continuous(ContinuousOptions(), plan, worker, clock=ManualClock())
    cache, policy = RadixCache(RadixOptions(), plan, worker), Fcfs(FcfsOptions(), plan, worker)
    return Drive(scheduler, plan, cache, policy, depth=depth)


def test_decoding_goes_on_while_a_prompt_is_chunked() -> None:
    drive = drive_of(context_length=256, chunk_size=16)
    drive.add(sequence(0, [1] * 8, max_tokens=40))
    for _ in range(3):
        drive.step()
    drive.add(sequence(1, [2] * 160, max_tokens=4))
    for _ in range(8):
        drive.step()
    mixed = [batch for batch in drive.batches if 0 < batch.num_decodes < batch.num_rows]
    assert len(mixed) == 8
    drive.run()


def test_decode_of_the_next_step_is_launched_before_the_commit() -> None:
    drive = drive_of()
    drive.add(sequence(0, [1] * 5, max_tokens=20))
    drive.step()
    drive.step()
    assert drive.table.length[0] == 6 and drive.table.launched[0] == 6, (
        "one token is committed, the next one in flight"
    )
    drive.run()
    assert drive.model.computed == 5 + 19, "nothing is launched beyond the limit"


def test_pages_are_free_as_soon_as_an_abort_returns() -> None:
    drive = drive_of()
    drive.add(sequence(0, [1] * 30, max_tokens=20))
    for _ in range(3):
        drive.step()
    drive.abort(0)
    held, evictable = drive.cache.size()
    assert drive.pages.free + held == drive.pages.total and held == evictable


def test_commits_come_in_order() -> None:
    drive = drive_of(depth=2)
    drive.add(sequence(0, [1] * 5, max_tokens=20))
    drive.step()
    drive.step()
    (first, first_result), (second, second_result) = drive.inflight
    drive.scheduler.commit(second, second_result)
    with pytest.raises(AssertionError, match="launch order"):
        drive.scheduler.commit(first, first_result)


def test_stale_results_are_dropped_although_the_row_has_a_new_owner() -> None:
    drive = drive_of(max_running=1)
    drive.add(sequence(0, [1] * 5, max_tokens=20))
    drive.step()
    drive.step()
    drive.abort(0)
    drive.add(sequence(1, [2] * 5, max_tokens=3))
    drive.run()
    assert len(drive.seen[1].tokens) == 3
    assert drive.batches[-1].rows.tolist() == [0]
