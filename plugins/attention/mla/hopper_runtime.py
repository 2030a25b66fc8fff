"""Runtime of the attention backend ``hopper_mla``."""

from __future__ import annotations

from torch import Tensor

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.byte_costs import DecodingRows
from glowplug.core.plugin.options import AttentionOptions
from glowplug.core.protocols import MlaLayer, Worker
from glowplug.core.step.batch import Batch
from glowplug.kernels.formats.fp8 import Blocks
from glowplug.plugins.attention.mla.flashmla_runtime import FlashMla
from glowplug.plugins.attention.mla.hopper import DECODES_WITH
from glowplug.plugins.attention.mla.triton import TritonMlaOptions
from glowplug.plugins.attention.mla.triton_runtime import TritonMla
from glowplug.plugins.attention.shared.attention_tables import StepTables
from glowplug.plugins.attention.shared.decode_choice import fastest
from glowplug.plugins.attention.shared.hopper_libraries import SIXTEEN_BITS
from glowplug.plugins.attention.shared.table_bytes import no_bytes


class HopperMla(FlashMla):
    """MLA backend that decodes by FlashMLA's or Triton's kernels, chosen for each step.

    Decode rows use the Triton kernels in four cases, otherwise FlashMLA: over an FP8 cache; for
    trees of drafts; for a draft's own cache, whose first position is empty (``Batch.first_key``);
    where the Triton kernels were measured to be faster.
    """

    def __init__(self, options: AttentionOptions, plan: EnginePlan, worker: Worker) -> None:
        super().__init__(options, plan, worker)
        self._triton = TritonMla(TritonMlaOptions(), plan, worker)
        self._triton_only = plan.kv_dtype not in SIXTEEN_BITS
        self._by_triton = False
        self._measurements = StepTables(plan)
        self._longest = plan.sizes.positions

    def reserves(self, step: DecodingRows) -> int:
        return no_bytes(step)

    def plans_on_device(self, first_key: int) -> bool:
        """Return whether plans of captured decoding rows need no host; see ``AttentionBackend``."""
        return self._triton_only or first_key > 0

    def plan_decode(
        self, batch: Batch, graph: object | None, first: int, rows: int, width: int
    ) -> None:
        self._by_triton = (
            self._triton_only
            or batch.first_key > 0
            or batch.tree_mask is not None
            or self._fastest(rows, batch.longest or self._longest, width) == DECODES_WITH[0]
        )
        self.follows = self._by_triton and self._triton.follows
        planned = self._triton.plan_decode if self._by_triton else super().plan_decode
        planned(batch, graph, first, rows, width)

    def _fastest(self, rows: int, longest: int, width: int) -> str:
        """Return the backend whose kernel decodes rows: the one measured on this card, or the rule.

        Arguments as in ``decode_choice.fastest``.
        """
        found = self._measurements.fastest(DECODES_WITH, rows, width, longest)
        by_rule = fastest(width * self._heads, rows, longest, width)
        return found or DECODES_WITH[by_rule != "triton"]

    def decode(self, query: Tensor, kv: Tensor, scale: float, layer: MlaLayer) -> Tensor:
        decode = self._triton.decode if self._by_triton else super().decode
        return decode(query, kv, scale, layer)

    def decode_values(
        self, query: Tensor, kv: Tensor, layer: MlaLayer, stored: Blocks | None, out: Tensor
    ) -> None:
        decode = self._triton.decode_values if self._by_triton else super().decode_values
        decode(query, kv, layer, stored, out)
