"""The runtime of ``flashmla``."""
from __future__ import annotations

from dataclasses import dataclass

import torch
from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from torch import Tensor

from glowplug.core.batch import Batch
from glowplug.core.options import AttentionOptions
from glowplug.core.plan import EnginePlan
from glowplug.core.protocols import MlaLayer, Worker
from glowplug.plugins.attention.fa3_mla_runtime import Fa3Mla


@dataclass(eq=False)
class _Rows:
    """``schedule``: how the library splits the step's rows among multiprocessors, its metadata and split counts."""

    rows: int
    width: int
    table: Tensor
    lens: Tensor
    schedule: tuple[Tensor, ...]


class FlashMla(Fa3Mla):
    """Decoding rows by FlashMLA, whose schedule is made once a step on the device.

    Prefill, and a draft's rows, whose first position holds nothing, go by FlashAttention-3.
    """

    def __init__(self, options: AttentionOptions, plan: EnginePlan, worker: Worker) -> None:
        super().__init__(options, plan, worker)
        self._rows: _Rows | None = None

    def plan_decode(self, batch: Batch, slot: object | None, first: int, rows: int, width: int) -> None:
        self._rows = None
        if batch.first_key:
            super().plan_decode(batch, slot, first, rows, width)
            return
        lens = batch.kv_lens_device[first : first + rows]
        schedule = self._buffers.keep(slot, tuple(get_mla_metadata(lens, width * self._heads, 1)))
        self._rows = _Rows(rows, width, batch.page_table[first : first + rows], lens, schedule)

    def decode(self, query: Tensor, kv: Tensor, scale: float, layer: MlaLayer) -> Tensor:
        step = self._rows
        if step is None:
            return super().decode(query, kv, scale, layer)
        out, _ = flash_mla_with_kvcache(
            query.view(step.rows, step.width, *query.shape[1:]), kv.view(-1, self._page_size, 1, kv.shape[1]),
            step.table, step.lens, self._lora, *step.schedule, softmax_scale=scale, causal=step.width > 1)
        return torch.flatten(out, 0, 1)
