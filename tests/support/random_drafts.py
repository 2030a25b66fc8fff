"""Drafts whose size differs at random from step to step."""

from __future__ import annotations

import random
from typing import Any

from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.step.batch import Batch
from glowplug.plugins.scheduler.continuous_runtime import Continuous


class RandomDrafts:
    """A ``DraftPolicy`` that chooses a size at random; policies of one seed choose alike.

    Attributes:
        clocked: it wants the seconds of steps, although it does not choose by them.
        seconds: the seconds of steps.
    """

    clocked = True

    def __init__(self, shapes: tuple[DraftShape, ...], seed: int = 0) -> None:
        self.shapes = shapes
        self.chosen: list[DraftShape] = []
        self.observed: list[tuple[DraftShape, list[int]]] = []
        self.seconds: list[float] = []
        self._random = random.Random(seed)

    def choose(self, rows: Any, most: int) -> DraftShape:
        assert len(rows) and most >= len(rows)
        self.chosen.append(self._random.choice(self.shapes))
        return self.chosen[-1]

    def observe(self, rows: Any, shape: DraftShape, counts: Any) -> None:
        assert len(rows) == len(counts) and 1 <= counts.min() and counts.max() <= shape.tokens
        self.observed.append((shape, counts.tolist()))

    def took(self, rows: int, shape: DraftShape, seconds: float) -> None:
        assert rows > 0 and shape in self.shapes and seconds > 0
        self.seconds.append(seconds)

    def forget(self, row: int) -> None:
        assert row >= 0


class Widened(Continuous):
    """A scheduler whose steps are widened at random, as beside another group of ranks."""

    def next_batch(self) -> Batch | None:
        batch = super().next_batch()
        policy = self.decodes.policy
        if batch is not None and batch.num_decodes and isinstance(policy, RandomDrafts):
            wider = policy.choose(batch.rows, batch.num_rows)
            assert batch.draft_shape is not None
            if wider.tokens > batch.draft_shape.tokens:
                self.widen(batch, wider)
        return batch
