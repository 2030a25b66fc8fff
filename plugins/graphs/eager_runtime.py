"""Runtime of the graph runner "eager"."""
from __future__ import annotations

from typing import TYPE_CHECKING

from glowplug.core.batch import Batch
from glowplug.core.offers import Mode
from glowplug.core.plan import EnginePlan
from glowplug.core.protocols import Worker
from glowplug.plugins.graphs.eager import EagerOptions

if TYPE_CHECKING:
    from torch import Tensor


class Eager:
    """See ``protocols.GraphRunner``. It has no slot for any batch, so ``run`` is never reached."""

    def __init__(self, options: EagerOptions, plan: EnginePlan, worker: Worker) -> None:
        pass

    def shapes(self, plan: EnginePlan) -> list[tuple[Mode, int, int]]:
        return []

    def capture(self, runner: object) -> None:
        pass

    def slot_for(self, batch: Batch) -> object | None:
        return None

    def run(self, slot: object, batch: Batch) -> tuple[Tensor, Tensor]:
        raise AssertionError("the eager graph runner captured nothing, so there is nothing to replay")

    def close(self) -> None:
        pass
