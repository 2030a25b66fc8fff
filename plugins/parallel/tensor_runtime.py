"""Runtime of the parallelism strategy "tensor"."""

from __future__ import annotations

from typing import TYPE_CHECKING

from glowplug.core.facts.mesh import axis_size, coordinates, deal
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Shard, Worker
from glowplug.plugins.parallel.unsplit import Unsplit

if TYPE_CHECKING:
    from glowplug.plugins.parallel.tensor import TensorOptions

#: roles of weights whose outputs are partial sums, to be all-reduced
REDUCED_ROLES = frozenset({"row", "expert_width"})
#: roles of weights that are split over the ranks
SPLIT_ROLES = REDUCED_ROLES | {"column", "heads", "vocab"}


class TensorParallel(Unsplit):
    """The ``ParallelStrategy`` of tensor parallelism.

    Heads, intermediate sizes and vocabulary are split into equal parts; latents, norms, gates and
    experts are whole on every rank.
    """

    def __init__(self, options: TensorOptions, plan: EnginePlan, worker: Worker) -> None:
        del options
        self._ranks = axis_size("tp", plan.mesh)
        self._index = coordinates(worker.rank, plan.mesh).get("tp", 0)

    def shard(self, role: str, name: str, full: int, block: int = 1) -> Shard | None:
        if role not in SPLIT_ROLES or self._ranks == 1:
            return None
        start, size = deal(full, self._ranks, self._index, block)
        return Shard(
            start,
            size,
            full,
            reduce=role in REDUCED_ROLES,
            gather=role == "vocab",
            parts=self._ranks,
        )
