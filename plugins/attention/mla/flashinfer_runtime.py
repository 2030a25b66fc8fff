"""Runtime of the attention backend ``flashinfer_mla``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import torch
from flashinfer.mla import BatchMLAPagedAttentionWrapper
from flashinfer.prefill import BatchPrefillWithRaggedKVCacheWrapper
from numpy.typing import NDArray
from torch import Tensor

from glowplug.core.facts.mesh import axis_size
from glowplug.core.layers.rope import RopeConfig
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Limits, MlaLayer, Worker
from glowplug.core.step.batch import Batch
from glowplug.plugins.attention.mla.flashinfer import WORKSPACE_BYTES, FlashInferMlaOptions
from glowplug.plugins.attention.shared.flashinfer_lengths import check_layout, set_lengths, shrink
from glowplug.plugins.attention.shared.mla_base import PagedMla
from glowplug.plugins.attention.shared.page_tables import GraphBuffers, decoding_rows
from glowplug.plugins.attention.shared.prefill_calls import RaggedCall, RaggedRows
from glowplug.plugins.attention.shared.table_bytes import shifted_bytes

LN2 = math.log(2)


@dataclass(eq=False)
class _Wrapper:
    """A wrapper object of FlashInfer's MLA kernels, with the state of its last plan.

    Attributes:
        made: The wrapper object.
        planned: Event recorded after the copy of the last plan to the device.
        checked: Whether the memory layout of a plan has been checked (``check_layout``).
    """

    made: Any
    planned: torch.cuda.Event
    checked: bool = False

    def plan(self, *arguments: Any, **named: Any) -> None:
        # NOTE: planning overwrites the pinned buffer from which the previous plan is copied
        self.planned.synchronize()
        self.made.plan(*arguments, **named)
        self.planned.record()

    def set_lengths(self, lens: Tensor, bounds: NDArray[np.int32], width: int) -> None:
        if not self.checked:
            check_layout(self.made, bounds, width)
            self.checked = True
        set_lengths(self.made, lens, width)


class FlashInferMla(PagedMla):
    """MLA backend by FlashInfer, which plans each step on the host without waiting for the device.

    A plan is made from the rows' lengths known to the host. Where these are only upper bounds, the
    exact lengths are then written into the plan on the device.

    Each captured graph has its own wrapper, whose buffers the captured kernels read. An eager step
    uses a different wrapper for each plan that it makes, so that a plan never waits for kernels of
    the same step.
    """

    def __init__(self, options: FlashInferMlaOptions, plan: EnginePlan, worker: Worker) -> None:
        super().__init__(options, plan, worker)
        facts = plan.facts.model
        self._heads = facts.num_heads // axis_size("attn_tp", plan.mesh)
        self._query = facts.config["qk_nope_head_dim"] + self._rope
        self._value = facts.config["v_head_dim"]
        self._scale = RopeConfig.read(facts.config).softmax_scale(self._query)
        # shared by all wrappers, whose kernels run one after another
        self._workspace: Tensor | None = None
        self._wrappers: dict[object, _Wrapper] = {}
        self._buffers = GraphBuffers()
        self._drafts = plan.sizes.width > 1
        self._eager_wrappers = cycle(range(plan.sizes.width))
        self._decode: _Wrapper | None = None
        self._page = self._page_size
        self._calls: dict[int, _Wrapper] = {}

    def reserve(self, limits: Limits) -> None:
        super().reserve(limits)
        if self._workspace is None:
            self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        self._buffers.reserve(
            shifted_bytes(decoding_rows(limits, self._plan, self._heads)), self._device
        )

    def plan_decode(
        self, batch: Batch, graph: object | None, first: int, rows: int, width: int
    ) -> None:
        own = slice(first, first + rows)
        table = batch.page_table[own]
        lens = batch.kv_lens_device[own]
        bounds = batch.kv_lens[own]
        self._page = self._page_size
        if batch.first_key:
            table, lens = self._buffers.shifted(
                graph, table, lens, batch.first_key, self._page_size
            )
            bounds = np.maximum(bounds - batch.first_key, 0)
            self._page = 1
        pages = table.reshape(-1)
        starts = torch.arange(rows + 1, dtype=torch.int32)
        self._decode = self._wrapper(graph, rows, pages)
        self._decode.plan(
            starts * width,
            starts * table.shape[1],
            pages,
            torch.from_numpy(bounds),
            self._heads,
            self._lora,
            self._rope,
            self._page,
            width > 1,
            self._scale,
            self._dtype,
            self._kv[0].dtype,
        )
        # the host's lengths are exact for steps of an engine without drafts
        if self._drafts or width > 1 or batch.first_key:
            self._decode.set_lengths(lens, bounds, width)

    def _wrapper(self, graph: object | None, rows: int, pages: Tensor) -> _Wrapper:
        key = ("eager", next(self._eager_wrappers)) if graph is None else graph
        if key not in self._wrappers:
            made = (
                BatchMLAPagedAttentionWrapper(self._workspace)
                if graph is None
                else self._captured(rows, pages)
            )
            if self._drafts:
                shrink(made)
            self._wrappers[key] = _Wrapper(made, torch.cuda.Event())
        return self._wrappers[key]

    def _captured(self, rows: int, pages: Tensor) -> BatchMLAPagedAttentionWrapper:
        starts, key_starts, lens = (
            torch.zeros(count, dtype=torch.int32, device=self._device)
            for count in (rows + 1, rows + 1, rows)
        )
        return BatchMLAPagedAttentionWrapper(
            self._workspace,
            use_cuda_graph=True,
            qo_indptr=starts,
            kv_indptr=key_starts,
            kv_indices=pages,
            kv_len_arr=lens,
        )

    def decode(self, query: Tensor, kv: Tensor, scale: float, layer: MlaLayer) -> Tensor:
        assert self._decode is not None and math.isclose(scale, self._scale)
        cache = kv.view(-1, self._page, kv.shape[1])
        out: Tensor = self._decode.made.run(
            query[..., : self._lora],
            query[..., self._lora :],
            cache[..., : self._lora],
            cache[..., self._lora :],
        )
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
                _sums(call.q_lens),
                _sums(call.k_lens),
                self._heads,
                self._heads,
                self._query,
                head_dim_vo=self._value,
                causal=call.causal,
                sm_scale=self._scale,
                q_data_type=self._dtype,
            )

    def attend_ragged(
        self, call: RaggedCall, q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor
    ) -> Tensor:
        assert math.isclose(scale, self._scale)
        lse: Tensor = self._calls[id(call)].made.run(q, k, v, out=out, return_lse=True)[1]
        return lse * LN2


def _sums(lens: NDArray[np.int32]) -> Tensor:
    sums = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(lens, out=sums[1:])
    return torch.from_numpy(sums)
