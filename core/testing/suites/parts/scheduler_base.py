"""Base of the conformance suite of the ``scheduler`` slot: a driven scheduler and its checks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import PrefixCache, Scheduler, SchedulingPolicy
from glowplug.core.step.request import Sequence
from glowplug.core.testing.harness.drive import Drive
from glowplug.core.testing.harness.plans import VOCAB, bare_plan
from glowplug.core.testing.harness.prefix_hash import reference
from glowplug.core.testing.harness.simple import FirstCome, KeepsNothing

SEEDS = range(3)


class ManualClock:
    """A clock that tests move forward."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(length)]


class SchedulerBase:
    """Construction, driving and checking of a scheduler, which all tests share."""

    def make(self, plan: EnginePlan, clock: Callable[[], float]) -> Scheduler:
        """Return an unbound scheduler that uses ``clock`` for deadlines and queue times."""
        raise NotImplementedError

    def cache(self, plan: EnginePlan) -> PrefixCache:
        return KeepsNothing()

    def policy(self, plan: EnginePlan) -> SchedulingPolicy:
        return FirstCome()

    # ---- helpers ---------------------------------------------------------------------------------

    def drive(
        self,
        clock: Callable[[], float] = ManualClock(),  # noqa: B008
        depth: int = 1,
        seed: int = 0,
        bad: tuple[int, int] | None = None,
        **sizes: Any,
    ) -> Drive:
        plan = bare_plan(**sizes)
        return Drive(
            self.make(plan, clock),
            plan,
            self.cache(plan),
            self.policy(plan),
            depth=depth,
            seed=seed,
            bad=bad,
        )

    def expect(self, drive: Drive, sequences: list[Sequence]) -> None:
        """Check outputs and finish reasons of ``sequences`` against the reference."""
        for one in sequences:
            tokens, reason = reference(
                one.prompt.tolist(),
                one.params,
                one.stop_ids,
                vocab=VOCAB,
                context=drive.plan.sizes.context_length,
            )
            seen = drive.seen[one.id]
            assert seen.tokens == tokens, f"sequence {one.id}: other tokens"
            assert seen.finished is not None and seen.finished.reason == reason

    def run(self, drive: Drive, sequences: list[Sequence]) -> None:
        for one in sequences:
            drive.add(one)
        drive.run()
        self.expect(drive, sequences)
