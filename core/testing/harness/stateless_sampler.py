"""Base of samplers for tests that keep nothing of a row's parameters."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from glowplug.core.protocols import Limits
from glowplug.core.step.batch import Batch
from glowplug.core.step.request import SamplingParams


class StatelessSampler:
    """The methods of a ``Sampler`` that prepare rows and steps, without effect."""

    def reserve(self, limits: Limits) -> None:
        return

    def join(
        self,
        row: int,
        params: SamplingParams,
        tokens: NDArray[np.int32],
        prompt_len: int,
        stop_ids: frozenset[int],
    ) -> None:
        return

    def leave(self, row: int) -> None:
        return

    def plan_step(self, batch: Batch) -> None:
        return
