"""The runtime of ``flashmla``."""
from __future__ import annotations

from dataclasses import dataclass

import torch
from sgl_kernel.flash_attn import flash_attn_varlen_func
from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from torch import Tensor

from glowplug.core.batch import Batch
from glowplug.core.mesh import axis_size
from glowplug.core.plan import EnginePlan
from glowplug.core.protocols import MlaLayer, Worker
from glowplug.plugins.attention.flashmla import FlashMlaOptions
from glowplug.plugins.attention.paged_mla import PagedMla
from glowplug.plugins.attention.slot_buffers import SlotBuffers


@dataclass(eq=False)
class _Decode:
    """``schedule``: how the library splits the step's rows among multiprocessors, its metadata and split counts."""

    rows: int
    width: int
    table: Tensor
    lens: Tensor
    schedule: tuple[Tensor, ...]


class FlashMla(PagedMla):
    """Decoding rows by FlashMLA, whose schedule is made once a step on the device."""

    def __init__(self, options: FlashMlaOptions, plan: EnginePlan, worker: Worker) -> None:
        super().__init__(options, plan, worker)
        self._heads = plan.facts.model.num_heads // axis_size("attn_tp", plan.mesh)
        self._buffers = SlotBuffers()
        self._decode: _Decode | None = None

    def plan_decode(self, batch: Batch, slot: object | None, first: int, rows: int, width: int) -> None:
        lens = batch.kv_lens_device[first : first + rows]
        schedule = self._buffers.keep(slot, tuple(get_mla_metadata(lens, width * self._heads, 1)))
        self._decode = _Decode(rows, width, batch.page_table[first : first + rows], lens, schedule)

    def decode(self, query: Tensor, kv: Tensor, scale: float, layer: MlaLayer) -> Tensor:
        step = self._decode
        assert step is not None
        out, _ = flash_mla_with_kvcache(
            query.view(step.rows, step.width, *query.shape[1:]), kv.view(-1, self._page_size, 1, kv.shape[1]),
            step.table, step.lens, self._lora, *step.schedule, softmax_scale=scale, causal=step.width > 1)
        return torch.flatten(out, 0, 1)

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, k_starts: Tensor, max_q: int, max_k: int,
                scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        out, lse, *_ = flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=q_starts, cu_seqlens_k=k_starts, max_seqlen_q=max_q, max_seqlen_k=max_k,
            softmax_scale=scale, causal=causal, return_softmax_lse=True)
        return out, lse.t()
