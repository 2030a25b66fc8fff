"""Runtime of the collectives "local": every collective of a single rank returns its input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Worker

if TYPE_CHECKING:
    from torch import Tensor

    from glowplug.plugins.collectives.local import LocalOptions


class Local:
    """``Collectives`` for an engine of one rank, which exchanges nothing."""

    def __init__(self, options: LocalOptions, plan: EnginePlan, worker: Worker) -> None:
        del options, plan
        assert worker.ranks == 1, "local collectives support one rank only"

    def all_reduce(self, x: Tensor, axis: str) -> Tensor:
        return x

    def all_gather(self, x: Tensor, axis: str, dim: int = 0) -> Tensor:
        return x

    def reduce_scatter(self, x: Tensor, axis: str) -> Tensor:
        return x

    def all_to_all(self, x: Tensor, axis: str) -> Tensor:
        return x

    def all_to_all_rows(
        self, x: Tensor, counts: Sequence[int], received: Sequence[int], axis: str
    ) -> Tensor:
        return x

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        assert data is not None
        return data

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def all_gather_numbers(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        return values[None]

    def close(self) -> None:
        return None
