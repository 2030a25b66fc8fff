"""Runtime of the attention backend ``hopper_mha``."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.byte_costs import DecodingRows
from glowplug.core.plugin.options import AttentionOptions
from glowplug.core.protocols import Worker
from glowplug.core.step.batch import Batch
from glowplug.plugins.attention.mha.fa3_runtime import Fa3Mha
from glowplug.plugins.attention.mha.hopper import DECODES_WITH
from glowplug.plugins.attention.mha.triton_runtime import TritonMha
from glowplug.plugins.attention.shared.attention_tables import StepTables
from glowplug.plugins.attention.shared.decode_choice import fastest_mha
from glowplug.plugins.attention.shared.hopper_libraries import SIXTEEN_BITS
from glowplug.plugins.attention.shared.table_bytes import hopper_mha_bytes


class HopperMha(Fa3Mha):
    """Multi-head backend that uses FlashAttention-3's or Triton's kernels, chosen for each step.

    Over an FP8 cache, which FlashAttention-3 does not read, all rows use the Triton kernels. Over
    a 16-bit cache prefill rows use FlashAttention-3. Decode rows there use the Triton kernels in
    three cases, otherwise FlashAttention-3: for trees of drafts; for a draft's own cache, whose
    first position is empty (``Batch.first_key``); where the Triton kernels were measured to be
    faster.
    """

    def __init__(self, options: AttentionOptions, plan: EnginePlan, worker: Worker) -> None:
        super().__init__(options, plan, worker)
        self._triton = TritonMha(options, plan, worker)
        self._triton_only = plan.kv_dtype not in SIXTEEN_BITS
        self._by_triton = False
        self._measurements = StepTables(plan)

    def reserves(self, step: DecodingRows) -> int:
        return hopper_mha_bytes(step)

    def plan_decode(self, batch: Batch, graph: object | None, rows: int, width: int) -> None:
        self._by_triton = (
            self._triton_only
            or batch.first_key > 0
            or batch.tree_mask is not None
            or self._fastest(rows, width) == DECODES_WITH[0]
        )
        self.follows = self._by_triton and self._triton.follows
        plan = self._triton.plan_decode if self._by_triton else super().plan_decode
        plan(batch, graph, rows, width)

    def _fastest(self, rows: int, width: int) -> str:
        """Return the backend whose kernel decodes rows: the one measured on this card, or the rule.

        Args:
            rows: number of decode rows.
            width: number of tokens of a row.
        """
        found = self._measurements.fastest(DECODES_WITH, rows, width, self._plan.sizes.positions)
        by_rule = fastest_mha(width * self._heads // self._kv_heads, rows)
        return found or DECODES_WITH[by_rule != "triton"]

    def decode(self, query: Tensor, kv: Mapping[str, Tensor], scale: float) -> Tensor:
        decode = self._triton.decode if self._by_triton else super().decode
        return decode(query, kv, scale)

    def plan_prefill(self, batch: Batch, first: int) -> None:
        plan = self._triton.plan_prefill if self._triton_only else super().plan_prefill
        plan(batch, first)

    def prefill(
        self, query: Tensor, k: Tensor, v: Tensor, kv: Mapping[str, Tensor], scale: float
    ) -> Tensor:
        prefill = self._triton.prefill if self._triton_only else super().prefill
        return prefill(query, k, v, kv, scale)
