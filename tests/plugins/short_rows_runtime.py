"""The runtime of the attention backend "short_mla"."""

from __future__ import annotations

from typing import Any

from glowplug.core.step.batch import Batch
from glowplug.plugins.attention.mla.torch_runtime import TorchMla

PLANNED: list[
    tuple[int, int, int]
] = []  #: of every replayed step: rows, its longest row, and the limit passed to it


class ShortMla(TorchMla):
    def plan_step(self, batch: Batch, graph: Any) -> None:
        longest = int(batch.kv_lens.max(initial=0))
        assert not batch.longest or longest <= batch.longest, (
            "a row is longer than the limit passed to attention"
        )
        if graph is not None:
            PLANNED.append((batch.num_rows, longest, batch.longest))
        super().plan_step(batch, graph)
