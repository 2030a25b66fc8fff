"""Conformance suite of the ``policy`` slot. Subclass it and define ``make``."""

from __future__ import annotations

import random

import pytest

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import SchedulingPolicy
from glowplug.core.step.request import Sequence
from glowplug.core.testing.harness.drive import sequence
from glowplug.core.testing.harness.plans import bare_plan


def some(rng: random.Random, count: int) -> list[Sequence]:
    """Return ``count`` sequences in order of arrival, some of which were preempted before."""
    made = [
        sequence(
            i,
            [i + 1] * rng.randrange(1, 9),
            arrival=i * rng.random() * 4,
            priority=rng.randrange(-2, 3),
        )
        for i in range(count)
    ]
    for one in made:
        one.preemptions = rng.choice([0, 0, 0, 1])
    return made


class PolicySuite:
    """Tests that every scheduling policy must pass.

    A policy orders sequences, neither loses nor adds any, and is pure.
    """

    def make(self, plan: EnginePlan) -> SchedulingPolicy:
        """Return the policy under test for ``plan``."""
        raise NotImplementedError

    @pytest.fixture
    def policy(self) -> SchedulingPolicy:
        return self.make(bare_plan())

    @pytest.mark.parametrize("seed", range(10))
    def test_order_is_a_permutation(self, policy: SchedulingPolicy, seed: int) -> None:
        rng = random.Random(seed)
        waiting = some(rng, rng.randrange(0, 30))
        cached = {one.id: rng.randrange(5) for one in waiting}
        before = list(waiting)
        ordered = policy.order(waiting, cached)
        assert sorted(one.id for one in ordered) == sorted(one.id for one in waiting)
        assert waiting == before, "the argument was changed"
        assert ordered is not waiting
        assert {id(one) for one in ordered} == {id(one) for one in before}, "sequences were copied"
        policy.order(waiting[::2], {one.id: 1 for one in waiting})
        assert [one.id for one in policy.order(waiting, cached)] == [one.id for one in ordered], (
            "it is not pure"
        )

    @pytest.mark.parametrize("seed", range(10))
    def test_victim_is_one_of_the_running(self, policy: SchedulingPolicy, seed: int) -> None:
        rng = random.Random(seed)
        running = some(rng, rng.randrange(1, 30))
        victim = policy.victim(running)
        assert any(victim is one for one in running)
        assert policy.victim(running) is victim, "it is not pure"
        assert policy.victim(running[::2]) in running[::2]
        assert policy.victim(running) is victim, "an earlier call changes the result"

    def test_a_victim_does_not_come_straight_back_first(self, policy: SchedulingPolicy) -> None:
        """The last of equal sequences is preempted, so that the first always finishes."""
        running = [sequence(i, [1, 2, 3], arrival=float(i)) for i in range(5)]
        assert policy.victim(running).id == 4

    @pytest.mark.parametrize("seed", range(5))
    def test_sequences_and_cached_prefixes_are_only_read(
        self, policy: SchedulingPolicy, seed: int
    ) -> None:
        rng = random.Random(seed)
        waiting = some(rng, 12)
        cached = {one.id: rng.randrange(5) for one in waiting}
        kept = dict(cached)
        states = [(one.id, one.arrival, one.preemptions, one.row) for one in waiting]
        policy.order(waiting, cached)
        policy.victim(waiting)
        assert cached == kept, "the cached prefixes were changed"
        found = [(one.id, one.arrival, one.preemptions, one.row) for one in waiting]
        assert found == states, "a sequence was changed"

    @pytest.mark.parametrize("count", [1, 2, 9])
    def test_a_newcomer_does_not_overtake_its_equals(
        self, policy: SchedulingPolicy, count: int
    ) -> None:
        """Sequences that differ in their arrival only keep its order."""
        waiting = [sequence(i, [1, 2, 3], arrival=float(i)) for i in range(count)]
        ordered = policy.order(waiting, dict.fromkeys(range(count), 0))
        assert [one.id for one in ordered] == list(range(count))

    def test_equals_keep_the_queues_order(self, policy: SchedulingPolicy) -> None:
        waiting = [sequence(i, [1, 2, 3], arrival=1.0) for i in range(9)]
        assert [one.id for one in policy.order(waiting, dict.fromkeys(range(9), 0))] == list(
            range(9)
        )
