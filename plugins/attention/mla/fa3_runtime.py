"""Runtime of the attention backend ``fa3_mla``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sgl_kernel.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from torch import Tensor

from glowplug.core.facts.mesh import axis_size
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.byte_costs import DecodingRows
from glowplug.core.plugin.options import AttentionOptions
from glowplug.core.protocols import Limits, MlaLayer, Worker
from glowplug.core.step.batch import Batch
from glowplug.plugins.attention.shared.mla_base import PagedMla
from glowplug.plugins.attention.shared.page_tables import GraphBuffers, decoding_rows
from glowplug.plugins.attention.shared.table_bytes import fa3_mla_bytes, mla_small_pages


@dataclass(eq=False)
class _Decode:
    """Decode rows of the step, as FlashAttention-3 reads them.

    Attributes:
        rows: Number of rows, R.
        page: Number of tokens per page of ``table``.
        table: Page table, int32 [R, pages].
        lens: Number of keys of each row, int32 [R].
    """

    rows: int
    page: int
    table: Tensor
    lens: Tensor


class Fa3Mla(PagedMla):
    """MLA backend by FlashAttention-3.

    The rotary part of the queries is passed as ``q`` and the absorbed part as ``qv``; keys and
    values are two views of the cache.
    """

    def __init__(self, options: AttentionOptions, plan: EnginePlan, worker: Worker) -> None:
        super().__init__(options, plan, worker)
        self._heads = plan.facts.model.num_heads // axis_size("attn_tp", plan.mesh)
        self._buffers = GraphBuffers()
        self._decode: _Decode | None = None

    def reserves(self, step: DecodingRows) -> int:
        """Return the bytes of the largest page table that this backend makes for decode rows.

        The same number as ``AttentionOffers.reserves``, by which the plan counts these bytes.
        ``step``: the largest decode step.
        """
        return fa3_mla_bytes(step)

    def reserve(self, limits: Limits) -> None:
        super().reserve(limits)
        self._buffers.reserve(
            self.reserves(decoding_rows(limits, self._plan, self._heads)), self._device
        )

    def plans_on_device(self, first_key: int) -> bool:
        """Return whether plans of captured decoding rows need no host; see ``AttentionBackend``."""
        return True

    def plan_decode(
        self, batch: Batch, graph: object | None, first: int, rows: int, width: int
    ) -> None:
        table = batch.page_table[first : first + rows]
        lens = batch.kv_lens_device[first : first + rows]
        page = self._page_size
        if batch.first_key:
            table, lens = self._buffers.shifted(graph, table, lens, batch.first_key, page)
            page = 1
        elif (split := mla_small_pages(page, width * self._heads)) > 1:
            # NOTE: if a page holds whole tiles, the kernel copies by TMA, and a NaN beyond a row's
            # end, left by another sequence, enters the sum as 0 * NaN. With smaller pages the
            # kernel takes its other path, which reads nothing beyond the end.
            table = self._buffers.small_pages(graph, table, split)
            page //= split
        self._decode = _Decode(rows, page, table, lens)

    def decode(self, query: Tensor, kv: Tensor, scale: float, layer: MlaLayer) -> Tensor:
        step = self._decode
        assert step is not None
        query = query.view(step.rows, -1, *query.shape[1:])
        cache = kv.view(-1, step.page, 1, kv.shape[1])
        out = flash_attn_with_kvcache(
            q=query[..., self._lora :],
            k_cache=cache[..., self._lora :],
            v_cache=cache[..., : self._lora],
            qv=query[..., : self._lora],
            cache_seqlens=step.lens,
            page_table=step.table,
            softmax_scale=scale,
            causal=query.shape[1] > 1,
        )
        return torch.flatten(out, 0, 1)

    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_starts: Tensor,
        k_starts: Tensor,
        max_q: int,
        max_k: int,
        scale: float,
        causal: bool,
        out: Tensor,
    ) -> Tensor:
        lse: Tensor = flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=q_starts,
            cu_seqlens_k=k_starts,
            max_seqlen_q=max_q,
            max_seqlen_k=max_k,
            softmax_scale=scale,
            causal=causal,
            return_softmax_lse=True,
            out=out,
        )[1]
        return lse.t()
