"""A plugin with which rank 1 runs out of memory while it serves: a step observer that allocates
more than there is.
"""

from __future__ import annotations

from typing import Any

from glowplug.core.plugin.hookspecs import hookimpl

RANK = 1
STEP = 12  #: number of the step after which it fails
BYTES = 1 << 50


class Greedy:
    def __init__(self, device: str) -> None:
        self._device = device
        self._steps = 0

    def step(self, batch: Any, output: Any) -> None:
        import torch

        self._steps += 1
        if self._steps == STEP:
            torch.empty(BYTES, dtype=torch.uint8, device=self._device)


@hookimpl
def step_observers(worker: Any, plan: Any) -> list[Greedy]:
    return [Greedy(worker.device)] if worker.rank == RANK else []
