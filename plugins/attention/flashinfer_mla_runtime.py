"""The runtime of ``flashinfer_mla``."""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flashinfer.mla import BatchMLAPagedAttentionWrapper
from flashinfer.prefill import BatchPrefillWithRaggedKVCacheWrapper
from numpy.typing import NDArray
from torch import Tensor

from glowplug.core.batch import Batch
from glowplug.core.layers.rope import RopeConfig
from glowplug.core.mesh import axis_size
from glowplug.core.plan import EnginePlan
from glowplug.core.protocols import Limits, MlaLayer, Worker
from glowplug.plugins.attention.flashinfer_mla import FlashInferMlaOptions
from glowplug.plugins.attention.paged_mla import PagedMla
from glowplug.plugins.attention.ragged import RaggedCall, RaggedRows

WORKSPACE = 128 << 20  #: bytes of partial results, as the library's documentation asks for
LN2 = math.log(2)


@dataclass(eq=False)
class _Wrapper:
    """One of the library's wrappers. What its last plan copies to the device is there when ``planned`` is."""

    made: Any
    planned: torch.cuda.Event

    def plan(self, *arguments: Any, **named: Any) -> None:
        self.planned.synchronize()  # NOTE: a plan writes the pinned buffer that the one before is copied from
        self.made.plan(*arguments, **named)
        self.planned.record()


class FlashInferMla(PagedMla):
    """Every plan is made from lengths on the host, so that none waits for the device.

    A graph's slot has a wrapper of its own, whose buffers the captured kernels read.
    """

    def __init__(self, options: FlashInferMlaOptions, plan: EnginePlan, worker: Worker) -> None:
        super().__init__(options, plan, worker)
        facts = plan.facts.model
        self._heads = facts.num_heads // axis_size("attn_tp", plan.mesh)
        self._query, self._value = facts.config["qk_nope_head_dim"] + self._rope, facts.config["v_head_dim"]
        self._scale = RopeConfig.read(facts.config).softmax_scale(self._query)
        self._workspace: Tensor | None = None  # one for all: their kernels run one after the other
        self._wrappers: dict[object, _Wrapper] = {}
        self._decode: _Wrapper | None = None
        self._calls: dict[int, _Wrapper] = {}

    def reserve(self, limits: Limits) -> None:
        super().reserve(limits)
        if self._workspace is None:
            self._workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=self._device)

    def plan_decode(self, batch: Batch, slot: object | None, first: int, rows: int, width: int) -> None:
        pages: Tensor = batch.page_table[first : first + rows].reshape(-1)
        if slot not in self._wrappers:
            made = BatchMLAPagedAttentionWrapper(self._workspace) if slot is None else self._captured(rows, pages)
            self._wrappers[slot] = _Wrapper(made, torch.cuda.Event())
        self._decode = self._wrappers[slot]
        starts = torch.arange(rows + 1, dtype=torch.int32)
        self._decode.plan(
            starts, starts * (len(pages) // rows), pages, torch.from_numpy(batch.kv_lens[first : first + rows]),
            self._heads, self._lora, self._rope, self._page_size, False, self._scale, self._dtype, self._kv[0].dtype)

    def _captured(self, rows: int, pages: Tensor) -> BatchMLAPagedAttentionWrapper:
        starts, key_starts, lens = (torch.zeros(count, dtype=torch.int32, device=self._device)
                                    for count in (rows + 1, rows + 1, rows))
        return BatchMLAPagedAttentionWrapper(self._workspace, use_cuda_graph=True, qo_indptr=starts,
                                             kv_indptr=key_starts, kv_indices=pages, kv_len_arr=lens)

    def decode(self, query: Tensor, kv: Tensor, scale: float, layer: MlaLayer) -> Tensor:
        assert self._decode is not None and math.isclose(scale, self._scale)
        cache = kv.view(-1, self._page_size, kv.shape[1])
        out: Tensor = self._decode.made.run(query[..., : self._lora], query[..., self._lora :],
                                            cache[..., : self._lora], cache[..., self._lora :])
        return out

    def plan_prefill(self, ragged: list[RaggedRows]) -> None:
        self._calls = {}
        for number, call in enumerate(call for rows in ragged for call in rows.calls):
            key = ("ragged", number)
            if key not in self._wrappers:
                made = BatchPrefillWithRaggedKVCacheWrapper(self._workspace, "NHD")
                self._wrappers[key] = _Wrapper(made, torch.cuda.Event())
            self._calls[id(call)] = self._wrappers[key]
            self._wrappers[key].plan(
                _sums(call.q_lens), _sums(call.k_lens), self._heads, self._heads, self._query, head_dim_vo=self._value,
                causal=call.causal, sm_scale=self._scale, q_data_type=self._dtype)

    def attend_ragged(self, call: RaggedCall, q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor) -> Tensor:
        assert math.isclose(scale, self._scale)
        lse: Tensor = self._calls[id(call)].made.run(q, k, v, out=out, return_lse=True)[1]
        return lse * LN2


def _sums(lens: NDArray[np.int32]) -> Tensor:
    sums = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(lens, out=sums[1:])
    return torch.from_numpy(sums)
