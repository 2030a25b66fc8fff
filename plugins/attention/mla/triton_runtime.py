"""Runtime of the attention backend ``triton_mla``."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import MlaLayer, Worker
from glowplug.core.step.batch import Batch
from glowplug.kernels.formats.fp8 import Blocks
from glowplug.kernels.mla import value_projection
from glowplug.kernels.mla.decode import decode_splits, mla_decode
from glowplug.kernels.mla.decode_tiling import MlaTiling, mla_tiling, pipeline_fits
from glowplug.kernels.mla.prefill import mla_prefill
from glowplug.plugins.attention.mla.triton import TritonMlaOptions
from glowplug.plugins.attention.shared.attention_tables import StepTables, tiling_of
from glowplug.plugins.attention.shared.mla_base import PagedMla
from glowplug.plugins.attention.shared.prefill_calls import RaggedCall


@dataclass(frozen=True)
class _Rows:
    """Decode rows of the step, as the Triton kernels read them.

    Attributes:
        page_table: Page table of the rows, int32 [R, P].
        lens: Number of keys of each row, int32 [R].
        longest: Upper bound of every length that ``lens`` can ever hold.
        width: Number of query tokens per row.
        first_key: First position whose cache entry holds a key.
        tree: Tree mask, int64 [R, width], or None for a causal chain.
        tree_span: Number of keys that the mask names; 0: ``width``.
    """

    page_table: Tensor
    lens: Tensor
    longest: int
    width: int
    first_key: int
    tree: Tensor | None
    tree_span: int


class TritonMla(PagedMla):
    """MLA backend by Triton kernels, which read the step's own tensors.

    No other tensors are prepared for a step, so captured graphs need no tensors of their own.

    Attributes:
        tile: tiling of all decode steps, to measure it; None: the measured one, or the rule's.
        used: tiling of the newest decode step.
    """

    follows = True

    def __init__(self, options: TritonMlaOptions, plan: EnginePlan, worker: Worker) -> None:
        super().__init__(options, plan, worker)
        self._context = plan.sizes.positions
        self._measurements = StepTables(plan)
        self._rows: _Rows | None = None
        self.tile: MlaTiling | None = None
        self.used: MlaTiling | None = None

    def plans_on_device(self, first_key: int) -> bool:
        """Return whether plans of captured decoding rows need no host; see ``AttentionBackend``."""
        return True

    def plan_decode(
        self, batch: Batch, graph: object | None, first: int, rows: int, width: int
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
            batch.tree_span,
        )

    def decode(self, query: Tensor, kv: Tensor, scale: float, layer: MlaLayer) -> Tensor:
        rows, tile = self._tiled_rows(query, kv, layer)
        return mla_decode(
            query,
            kv,
            rows.page_table,
            rows.lens,
            scale,
            self._page_size,
            layer.lora_rank,
            tile,
            rows.first_key,
            rows.tree,
            rows.tree_span,
        )

    def decode_values(
        self, query: Tensor, kv: Tensor, layer: MlaLayer, stored: Blocks | None, out: Tensor
    ) -> None:
        rows, tile = self._tiled_rows(
            query,
            kv,
            layer,
            stored is None and value_projection.sizes_fit(layer.lora_rank, layer.v_dim),
        )
        if not tile.merge_in_values:
            return super().decode_values(query, kv, layer, stored, out)
        partial, lse = decode_splits(
            query,
            kv,
            rows.page_table,
            rows.lens,
            layer.scale,
            self._page_size,
            layer.lora_rank,
            tile,
            rows.first_key,
            rows.tree,
            rows.tree_span,
        )
        value_projection.merge_and_project(partial, lse, rows.lens, layer.w_uv, out, tile.block_n)

    def _tiled_rows(
        self, query: Tensor, kv: Tensor, layer: MlaLayer, merge_in_values: bool = False
    ) -> tuple[_Rows, MlaTiling]:
        """Return the step's decode rows, and the tiling by which the kernel divides their keys.

        Args:
            query: Absorbed query, [n, H, lora + rope].
            kv: The layer's cache.
            layer: The layer's sizes.
            merge_in_values: Whether the kernel that multiplies by W_UV may also merge the partial
                results of KV splits.
        """
        rows = self._rows
        assert rows is not None
        pipeline = pipeline_fits(
            query.dtype, kv.dtype, self._page_size, layer.lora_rank, layer.rope_dim, query.device
        )
        count = len(rows.lens)
        tile = self.tile or self._measured(count, rows.width, rows.longest, pipeline)
        if tile is None:
            tile = mla_tiling(
                count,
                rows.width,
                layer.heads,
                rows.longest,
                query.dtype,
                kv.dtype,
                pipeline,
                merge_in_values,
            )
        elif tile.merge_in_values and not merge_in_values:
            tile = replace(tile, merge_in_values=False)
        self.used = tile
        return rows, tile

    def _measured(self, rows: int, width: int, longest: int, pipeline: bool) -> MlaTiling | None:
        """Return the tiling measured for a step on this card; None if there is none that runs.

        Arguments as in ``mla_tiling``.
        """
        tile = tiling_of(self._measurements.find(rows, width, longest), MlaTiling)
        return None if tile is None or tile.pipeline and not pipeline else tile

    def keys_of(self, entries: Tensor, layer: MlaLayer) -> tuple[Tensor, ...]:
        """Return a head's keys without RoPE, the rotary part, and values of cache entries.

        Unlike in ``PagedMla.keys_of``, the rotary part, which all heads share, is not copied into
        each head's keys.
        """
        latent, k_rope = entries.split_with_sizes([layer.lora_rank, layer.rope_dim], dim=-1)
        k_nope, value = layer.expand(latent)
        return k_nope, k_rope, value

    def attend_keys(
        self,
        call: RaggedCall,
        query: Tensor,
        keys: tuple[Tensor, ...],
        layer: MlaLayer,
        out: Tensor,
    ) -> Tensor:
        """Compute one call over expanded keys; see ``PagedMla.attend_keys``."""
        k_nope, k_rope, value = keys
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
