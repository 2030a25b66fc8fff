"""Runtime of the attention backend ``triton_mha``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.options import AttentionOptions
from glowplug.core.protocols import Worker
from glowplug.core.step.batch import Batch
from glowplug.kernels.mha.decode import MhaTiling, mha_decode, mha_tiling
from glowplug.kernels.mha.prefill import mha_prefill
from glowplug.plugins.attention.shared.attention_tables import StepTables, tiling_of
from glowplug.plugins.attention.shared.mha_base import PagedMha


@dataclass(frozen=True)
class _Rows:
    """Decode rows or prefill rows of the step, as the Triton kernels read them.

    Attributes:
        page_table: Page table of the rows, int32 [R, P].
        lens: Number of keys of each row, int32 [R].
        first_key: First position whose cache entry holds a key.
        tile: Tiling of the decode kernel; decode rows only.
        tree: Tree mask of decode rows, int64 [R, width], or None.
        tree_span: Number of keys that the mask names; 0: ``width``.
        starts: Index in the step of each prefill row's first token, and of the end of the last row,
            int32 [R + 1].
        skip: Number of the step's tokens before the prefill rows.
    """

    page_table: Tensor
    lens: Tensor
    first_key: int
    tile: MhaTiling | None = None
    tree: Tensor | None = None
    tree_span: int = 0
    starts: Tensor | None = None
    skip: int = 0


class TritonMha(PagedMha):
    """Multi-head backend by Triton kernels, which read the step's own tensors.

    No other tensors are prepared for a step, so captured graphs need no tensors of their own.

    Attributes:
        tile: tiling of all decode steps, to measure it; None: the measured one, or the rule's.
        used: tiling of the newest decode step.
    """

    follows = True

    def __init__(self, options: AttentionOptions, plan: EnginePlan, worker: Worker) -> None:
        super().__init__(options, plan, worker)
        self._context = plan.sizes.positions
        self._measurements = StepTables(plan)
        self.tile: MhaTiling | None = None
        self.used: MhaTiling | None = None
        self._decoding: _Rows | None = None
        self._prefilling: _Rows | None = None

    def plans_on_device(self, first_key: int) -> bool:
        """Return whether plans of captured decoding rows need no host; see ``AttentionBackend``."""
        return True

    def plan_decode(self, batch: Batch, graph: object | None, rows: int, width: int) -> None:
        tree = None if batch.tree_mask is None else batch.tree_mask[:rows]
        found = self._measurements.find(rows, width, self._context)
        tile = self.tile or tiling_of(found, MhaTiling)
        if tile is None:
            sizes = self._heads, self._kv_heads, self._head_dim
            tile = mha_tiling(rows, width, *sizes, self._context, self._dtype)
        self.used = tile
        self._decoding = _Rows(
            batch.page_table[:rows],
            batch.kv_lens_device[:rows],
            batch.first_key,
            tile,
            tree,
            batch.tree_span,
        )

    def decode(self, query: Tensor, kv: Mapping[str, Tensor], scale: float) -> Tensor:
        rows = self._decoding
        assert rows is not None and rows.tile is not None
        return mha_decode(
            query,
            kv["k"],
            kv["v"],
            rows.page_table,
            rows.lens,
            scale,
            self._page_size,
            rows.tile,
            rows.first_key,
            rows.tree,
            rows.tree_span,
        )

    def plan_prefill(self, batch: Batch, first: int) -> None:
        self._prefilling = _Rows(
            batch.page_table[first:],
            batch.kv_lens_device[first:],
            batch.first_key,
            starts=batch.query_starts[first:],
            skip=batch.decode_tokens,
        )

    def prefill(
        self, query: Tensor, k: Tensor, v: Tensor, kv: Mapping[str, Tensor], scale: float
    ) -> Tensor:
        rows = self._prefilling
        assert rows is not None and rows.starts is not None
        return mha_prefill(
            query,
            kv["k"],
            kv["v"],
            rows.page_table,
            rows.lens,
            rows.starts,
            scale,
            self._page_size,
            rows.first_key,
            rows.skip,
        )
