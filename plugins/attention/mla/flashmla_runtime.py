"""Runtime of the attention backend ``flashmla``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from torch import Tensor

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.byte_costs import DecodingRows
from glowplug.core.plugin.options import AttentionOptions
from glowplug.core.protocols import Limits, MlaLayer, Worker
from glowplug.core.step.batch import Batch
from glowplug.plugins.attention.mla.fa3_runtime import Fa3Mla
from glowplug.plugins.attention.shared.table_bytes import shifted_bytes


@dataclass(eq=False)
class _Rows:
    """Decode rows of the step that FlashMLA runs.

    Attributes:
        rows: Number of rows, R.
        width: Number of query tokens per row.
        table: Page table, int32 [R, P].
        lens: Number of keys of each row, int32 [R].
        schedule: The library's distribution of the rows over multiprocessors: its metadata and
            split counts.
    """

    rows: int
    width: int
    table: Tensor
    lens: Tensor
    schedule: tuple[Tensor, ...]


class FlashMla(Fa3Mla):
    """MLA backend by FlashMLA, whose schedule is computed once per step on the device.

    Prefill rows use FlashAttention-3, and so do the rows of a draft, whose cache has no entry at
    the first position (``Batch.first_key``).

    Over an FP8 cache FlashMLA multiplies in E4M3: the queries are rounded to E4M3, and inside the
    kernel the softmax weights as well. Each has one scale per launch, which is 1. NOTE: a scale
    that follows the largest query of a step would gain nothing (E4M3 rounds as finely at 2**-6 as
    at 448), and would make a row's result depend on the other rows of the step.
    """

    def __init__(self, options: AttentionOptions, plan: EnginePlan, worker: Worker) -> None:
        super().__init__(options, plan, worker)
        self._rows: _Rows | None = None
        self._fp8 = False
        self._unscaled = torch.ones(1, device=self._device)

    def reserves(self, step: DecodingRows) -> int:
        return shifted_bytes(step)

    def reserve(self, limits: Limits) -> None:
        super().reserve(limits)
        self._fp8 = any(kv.dtype is torch.float8_e4m3fn for kv in self._kv)

    def plans_on_device(self, first_key: int) -> bool:
        """Return whether plans of captured decoding rows need no host; see ``AttentionBackend``."""
        return first_key > 0  # by FlashAttention-3

    def plan_decode(
        self, batch: Batch, graph: object | None, first: int, rows: int, width: int
    ) -> None:
        self._rows = None
        if batch.first_key:
            assert not self._fp8, "FlashAttention-3 reads no FP8 cache; the plan refuses it"
            super().plan_decode(batch, graph, first, rows, width)
            return
        lens = batch.kv_lens_device[first : first + rows]
        if self._fp8:
            # NOTE: for a row without keys the kernel would look up the page before the first one.
            lens = lens.clamp(min=1)
            metadata, splits = get_mla_metadata(lens, width * self._heads, 1, is_fp8_kvcache=True)
            lens, *schedule = self._buffers.keep(graph, (lens, metadata, splits))
        else:
            schedule = [
                *self._buffers.keep(graph, tuple(get_mla_metadata(lens, width * self._heads, 1)))
            ]
        self._rows = _Rows(
            rows, width, batch.page_table[first : first + rows], lens, tuple(schedule)
        )

    def decode(self, query: Tensor, kv: Tensor, scale: float, layer: MlaLayer) -> Tensor:
        step = self._rows
        if step is None:
            return super().decode(query, kv, scale, layer)
        descale = self._unscaled if self._fp8 else None
        kernel_query = self._kernels.in_e4m3(query) if self._fp8 else query
        out, _ = flash_mla_with_kvcache(
            kernel_query.view(step.rows, step.width, *query.shape[1:]),
            kv.view(-1, self._page_size, 1, kv.shape[1]),
            step.table,
            step.lens,
            self._lora,
            *step.schedule,
            softmax_scale=scale,
            causal=step.width > 1,
            descale_q=descale,
            descale_k=descale,
            is_fp8_kvcache=self._fp8,
        )
        return torch.flatten(out, 0, 1).to(query.dtype)  # for E4M3 queries the output is bfloat16
