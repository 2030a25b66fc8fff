"""The runtime of ``hopper_mla``."""

from __future__ import annotations

from torch import Tensor

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.byte_costs import DecodingRows
from glowplug.core.plugin.options import AttentionOptions
from glowplug.core.protocols import MlaLayer, Worker
from glowplug.core.step.batch import Batch
from glowplug.kernels.formats.fp8 import Blocks
from glowplug.plugins.attention.mla.flashmla_runtime import FlashMla
from glowplug.plugins.attention.mla.triton import TritonMlaOptions
from glowplug.plugins.attention.mla.triton_runtime import TritonMla
from glowplug.plugins.attention.shared.decode_choice import fastest
from glowplug.plugins.attention.shared.hopper_libraries import SIXTEEN_BITS
from glowplug.plugins.attention.shared.table_bytes import no_bytes


class HopperMla(FlashMla):
    """FlashMLA's steps and the Triton backend's, over one cache. What FlashMLA cannot do goes the
    other way: trees, a first position that holds nothing, an FP8 cache."""

    def __init__(self, options: AttentionOptions, plan: EnginePlan, worker: Worker) -> None:
        super().__init__(options, plan, worker)
        self._own = TritonMla(TritonMlaOptions(), plan, worker)
        self._only_own = plan.kv_dtype not in SIXTEEN_BITS
        self._by_own = False
        self._longest = plan.sizes.positions

    def reserves(self, step: DecodingRows) -> int:
        return no_bytes(step)

    def plan_decode(
        self, batch: Batch, slot: object | None, first: int, rows: int, width: int
    ) -> None:
        self._by_own = (
            self._only_own
            or batch.first_key > 0
            or batch.tree_mask is not None
            or fastest(width * self._heads, rows, batch.longest or self._longest, width) == "triton"
        )
        self.follows = self._by_own and self._own.follows
        planned = self._own.plan_decode if self._by_own else super().plan_decode
        planned(batch, slot, first, rows, width)

    def decode(self, query: Tensor, kv: Tensor, scale: float, layer: MlaLayer) -> Tensor:
        return (self._own.decode if self._by_own else super().decode)(query, kv, scale, layer)

    def decode_values(
        self, query: Tensor, kv: Tensor, layer: MlaLayer, stored: Blocks | None, out: Tensor
    ) -> None:
        (self._own.decode_values if self._by_own else super().decode_values)(
            query, kv, layer, stored, out
        )
