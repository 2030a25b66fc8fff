"""The runtime of ``triton_mla``."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import MlaLayer, Worker
from glowplug.core.step.batch import Batch
from glowplug.kernels.formats.fp8 import Blocks
from glowplug.kernels.mla import value_projection as mla_values
from glowplug.kernels.mla.decode import Tiling, decode_parts, mla_decode, ring_fits, tiling
from glowplug.kernels.mla.prefill import mla_prefill
from glowplug.plugins.attention.mla.triton import TritonMlaOptions
from glowplug.plugins.attention.shared.mla_base import PagedMla
from glowplug.plugins.attention.shared.prefill_calls import RaggedCall


@dataclass(frozen=True)
class _Rows:
    """Decoding rows of the step: page_table int32 [R, P], lens int32 [R], none of them ever above
    ``longest``, tree int64 [R, width] or None."""

    page_table: Tensor
    lens: Tensor
    longest: int
    width: int
    first_key: int
    tree: Tensor | None


class TritonMla(PagedMla):
    """Both kernels read a step's tensors as they lie, so nothing is prepared and nothing belongs to
    a slot.
    """

    follows = True

    def __init__(self, options: TritonMlaOptions, plan: EnginePlan, worker: Worker) -> None:
        super().__init__(options, plan, worker)
        self._context = plan.sizes.positions
        self._rows: _Rows | None = None

    def plan_decode(
        self, batch: Batch, slot: object | None, first: int, rows: int, width: int
    ) -> None:
        own = slice(first, first + rows)
        tree = None if batch.tree_mask is None else batch.tree_mask[own]
        self._rows = _Rows(
            batch.page_table[own],
            batch.kv_lens_device[own],
            batch.longest or self._context,
            width,
            batch.first_key,
            tree,
        )

    def decode(self, query: Tensor, kv: Tensor, scale: float, layer: MlaLayer) -> Tensor:
        rows, cut = self._cut(query, kv, layer)
        return mla_decode(
            query,
            kv,
            rows.page_table,
            rows.lens,
            scale,
            self._page_size,
            layer.lora_rank,
            cut,
            rows.first_key,
            rows.tree,
        )

    def decode_values(
        self, query: Tensor, kv: Tensor, layer: MlaLayer, stored: Blocks | None, out: Tensor
    ) -> None:
        rows, cut = self._cut(
            query, kv, layer, stored is None and mla_values.fits(layer.lora_rank, layer.v_dim)
        )
        if not cut.apart:
            return super().decode_values(query, kv, layer, stored, out)
        partial, lse = decode_parts(
            query,
            kv,
            rows.page_table,
            rows.lens,
            layer.scale,
            self._page_size,
            layer.lora_rank,
            cut,
            rows.first_key,
            rows.tree,
        )
        mla_values.project(partial, lse, rows.lens, layer.w_uv, out, cut.block_n)

    def _cut(
        self, query: Tensor, kv: Tensor, layer: MlaLayer, apart: bool = False
    ) -> tuple[_Rows, Tiling]:
        """The step's rows and how their keys are cut; ``apart``: into parts that ``mla_values`` may
        join.
        """
        rows = self._rows
        assert rows is not None
        ring = ring_fits(
            query.dtype, kv.dtype, self._page_size, layer.lora_rank, layer.rope_dim, query.device
        )
        return rows, tiling(
            len(rows.lens),
            rows.width,
            layer.heads,
            rows.longest,
            query.dtype,
            kv.dtype,
            ring,
            apart,
        )

    def _call(
        self, call: RaggedCall, query: Tensor, own: Tensor, kv: Tensor, layer: MlaLayer, out: Tensor
    ) -> Tensor:
        """As the base's, but the one rotary part of all heads is read as it lies."""
        keys = own if call.slots is None else self._kernels.gather(kv, call.slots, query.dtype)
        latent, k_rope = keys.split_with_sizes([layer.lora_rank, layer.rope_dim], dim=-1)
        k_nope, value = layer.expand(latent)
        return mla_prefill(
            query,
            k_nope,
            k_rope,
            value,
            call.q_starts,
            call.k_starts,
            call.max_q,
            layer.scale,
            call.causal,
            out,
        )[1]
