"""Defaults of the parallelism strategies: nothing is split and nothing is exchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from glowplug.core.protocols import ExpertExchange, RequestRouter, Shard
from glowplug.core.step.batch import Batch, StepShape

if TYPE_CHECKING:
    from torch import Tensor


class Unsplit:
    """The ``ParallelStrategy`` that splits nothing; the base class of all other strategies."""

    moves_tokens = False

    def shard(self, role: str, name: str, full: int, block: int = 1) -> Shard | None:
        return None

    def agree(self, local: StepShape) -> StepShape:
        return local

    def router(self) -> RequestRouter | None:
        return None

    def enter_attention(self, x: Tensor, batch: Batch) -> Tensor:
        return x

    def leave_attention(self, x: Tensor, batch: Batch) -> Tensor:
        return x

    def expert_exchange(self, name: str, experts: int) -> ExpertExchange | None:
        return None
