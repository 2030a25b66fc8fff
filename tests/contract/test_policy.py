"""The built-in scheduling policies pass the conformance suite and keep their documented order."""

from __future__ import annotations

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Worker
from glowplug.core.testing.harness.drive import sequence
from glowplug.core.testing.suites.policy import PolicySuite
from glowplug.plugins.scheduler.policies import FcfsOptions, LongestPrefixOptions, PriorityOptions
from glowplug.plugins.scheduler.policies_runtime import Fcfs, LongestPrefix, Priority


class TestFcfs(PolicySuite):
    def make(self, plan: EnginePlan) -> Fcfs:
        return Fcfs(FcfsOptions(), plan, Worker())

    def test_the_cache_is_not_searched(self, policy: Fcfs) -> None:
        waiting = [sequence(i, [1]) for i in range(3)]
        assert policy.order(waiting, {}) == waiting


class TestPriority(PolicySuite):
    def make(self, plan: EnginePlan) -> Priority:
        return Priority(PriorityOptions(), plan, Worker())

    def test_smaller_numbers_first_and_larger_give_way(self, policy: Priority) -> None:
        some = [
            sequence(i, [1], priority=priority, arrival=float(i))
            for i, priority in enumerate([2, 0, 1, 0, 2, 1])
        ]
        assert [one.id for one in policy.order(some, {})] == [1, 3, 2, 5, 0, 4]
        assert policy.victim(some).id == 4
        assert policy.victim(some[:4]).id == 0


class TestLongestPrefix(PolicySuite):
    def make(self, plan: EnginePlan) -> LongestPrefix:
        return LongestPrefix(LongestPrefixOptions(window=4, patience=10.0), plan, Worker())

    def test_longest_first_within_the_window(self, policy: LongestPrefix) -> None:
        waiting = [sequence(i, [1], arrival=float(i)) for i in range(6)]
        cached = {0: 0, 1: 8, 2: 16, 3: 8, 4: 99, 5: 99}
        assert [one.id for one in policy.order(waiting, cached)] == [2, 1, 3, 0, 4, 5]

    def test_no_sequence_is_overtaken_for_ever(self, policy: LongestPrefix) -> None:
        waiting = [
            sequence(0, [1], arrival=0.0),
            *(sequence(i, [1], arrival=11.0) for i in range(1, 4)),
        ]
        assert [one.id for one in policy.order(waiting, {0: 0, 1: 4, 2: 8, 3: 4})] == [0, 2, 1, 3]

    def test_a_preempted_sequence_is_not_overtaken(self, policy: LongestPrefix) -> None:
        waiting = [sequence(i, [1]) for i in range(3)]
        waiting[1].preemptions = 1
        assert [one.id for one in policy.order(waiting, {0: 4, 1: 0, 2: 8})] == [1, 2, 0]
