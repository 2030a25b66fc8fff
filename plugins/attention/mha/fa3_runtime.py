"""Runtime of the attention backend ``fa3_mha``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from sgl_kernel.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from torch import Tensor

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.byte_costs import DecodingRows
from glowplug.core.plugin.options import AttentionOptions
from glowplug.core.protocols import Limits, Worker
from glowplug.core.step.batch import Batch
from glowplug.plugins.attention.shared.mha_base import PagedMha
from glowplug.plugins.attention.shared.page_tables import GraphBuffers, decoding_rows
from glowplug.plugins.attention.shared.table_bytes import SMALL_PAGE, fa3_mha_bytes, mha_small_pages


@dataclass(eq=False)
class _Rows:
    """Decode rows or prefill rows of a step, as FlashAttention-3 reads them.

    Attributes:
        page: Number of tokens per page of ``table``.
        table: Page table, int32 [R, P]; None if the keys are the rows' own tokens.
        lens: Number of keys of each row, int32 [R].
        starts: Prefix sums of the prefill rows' numbers of queries, int32 [R + 1].
        longest: Largest number of queries of a prefill row.
    """

    page: int
    table: Tensor | None
    lens: Tensor
    starts: Tensor | None = None
    longest: int = 0


class Fa3Mha(PagedMha):
    """Multi-head backend by FlashAttention-3.

    Decode rows attend over the cache. Prefill rows do the same, unless every prefill row of the
    step begins its sequence: then each attends over its own keys.
    """

    def __init__(self, options: AttentionOptions, plan: EnginePlan, worker: Worker) -> None:
        super().__init__(options, plan, worker)
        self._buffers = GraphBuffers()
        self._device = torch.device(worker.device)
        self._decoding: _Rows | None = None
        self._prefilling: _Rows | None = None

    def reserves(self, step: DecodingRows) -> int:
        """Return the bytes of the largest page table that this backend makes for decode rows.

        The same number as ``AttentionOffers.reserves``, by which the plan counts these bytes.
        ``step``: the largest decode step.
        """
        return fa3_mha_bytes(step)

    def reserve(self, limits: Limits) -> None:
        super().reserve(limits)
        rows = decoding_rows(limits, self._plan, self._heads)
        self._buffers.reserve(self.reserves(rows), self._device)

    def plans_on_device(self, first_key: int) -> bool:
        """Return whether plans of captured decoding rows need no host; see ``AttentionBackend``."""
        return True

    def plan_decode(self, batch: Batch, graph: object | None, rows: int, width: int) -> None:
        self._decoding = self._rows(batch, graph, 0, rows, self._buffers)

    def _rows(
        self, batch: Batch, graph: object | None, first: int, end: int, buffers: GraphBuffers
    ) -> _Rows:
        table = batch.page_table[first:end]
        lens = batch.kv_lens_device[first:end]
        page = self._page_size
        if batch.first_key:
            table, lens = buffers.shifted(graph, table, lens, batch.first_key, page)
            page = 1
        elif (split := mha_small_pages(page)) > 1:
            table = buffers.small_pages(graph, table, split)
            page = SMALL_PAGE
        return _Rows(page, table, lens)

    def decode(self, query: Tensor, kv: Mapping[str, Tensor], scale: float) -> Tensor:
        rows = self._decoding
        assert rows is not None
        query = query.unflatten(0, (len(rows.lens), -1))
        out = flash_attn_with_kvcache(
            q=query,
            k_cache=_paged(kv["k"], rows),
            v_cache=_paged(kv["v"], rows),
            cache_seqlens=rows.lens,
            page_table=rows.table,
            softmax_scale=scale,
            causal=query.shape[1] > 1,
        )
        return torch.flatten(out, 0, 1)

    def plan_prefill(self, batch: Batch, first: int) -> None:
        queries = batch.query_lens[first:]
        keys = batch.kv_lens[first:] - batch.first_key
        # new buffers, because those of the decode rows are in use
        rows = self._rows(batch, None, first, batch.num_rows, GraphBuffers())
        rows.starts = batch.query_starts[first:] - batch.decode_tokens
        rows.longest = int(queries.max())
        if np.array_equal(queries, keys):
            rows.table = None
        self._prefilling = rows

    def prefill(
        self, query: Tensor, k: Tensor, v: Tensor, kv: Mapping[str, Tensor], scale: float
    ) -> Tensor:
        rows = self._prefilling
        assert rows is not None
        if rows.table is None:
            return flash_attn_varlen_func(  # type: ignore[no-any-return]
                query,
                k,
                v,
                cu_seqlens_q=rows.starts,
                cu_seqlens_k=rows.starts,
                max_seqlen_q=rows.longest,
                max_seqlen_k=rows.longest,
                softmax_scale=scale,
                causal=True,
            )
        return flash_attn_with_kvcache(  # type: ignore[no-any-return]
            q=query,
            k_cache=_paged(kv["k"], rows),
            v_cache=_paged(kv["v"], rows),
            cache_seqlens=rows.lens,
            page_table=rows.table,
            cu_seqlens_q=rows.starts,
            max_seqlen_q=rows.longest,
            softmax_scale=scale,
            causal=True,
        )


def _paged(cache: Tensor, rows: _Rows) -> Tensor:
    """Return a view of ``cache`` [kv_slots, K, D] as [pages, tokens of a page, K, D]."""
    return cache.view(-1, rows.page, *cache.shape[1:])
