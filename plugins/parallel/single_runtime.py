"""Runtime of the parallelism strategy "single", which splits nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Worker
from glowplug.plugins.parallel.unsplit import Unsplit

if TYPE_CHECKING:
    from glowplug.plugins.parallel.single import SingleOptions


class Single(Unsplit):
    """The ``ParallelStrategy`` of an engine with one rank."""

    def __init__(self, options: SingleOptions, plan: EnginePlan, worker: Worker) -> None:
        del options, plan, worker
