"""Runtime objects of ``tests.plugins.projected_mla``."""

from __future__ import annotations

import torch
from torch import Tensor

from glowplug.core.protocols import MlaLayer, RopeRows
from glowplug.core.step.batch import Batch
from glowplug.kernels.elementwise.rope_reference import rotate_reference
from glowplug.kernels.mha import reference as mha
from glowplug.plugins.attention.shared.mla_base import PagedMla
from glowplug.plugins.ops.torch_ops_runtime import TorchOps


class RowsOps(TorchOps):
    """Torch's ops, whose rotary factors are rows, so that layers pass raw projections on."""

    def rope_at(self, table: Tensor, positions: Tensor, interleaved: bool) -> object:
        return RopeRows(table.index_select(0, positions), interleaved)

    def rope(self, q: Tensor, k: Tensor, at: object) -> tuple[Tensor, Tensor]:
        assert isinstance(at, RopeRows)
        return rotate_reference(q, *at), rotate_reference(k, *at)


class PlainMla(PagedMla):
    """Kernels replaced by loops over rows."""

    def plan_decode(
        self, batch: Batch, graph: object | None, first: int, rows: int, width: int
    ) -> None:
        self._rows = (
            batch.page_table[first : first + rows],
            batch.kv_lens_device[first : first + rows].tolist(),
            width,
            batch.first_key,
        )

    def decode(self, query: Tensor, kv: Tensor, scale: float, layer: MlaLayer) -> Tensor:
        table, lens, width, first = self._rows
        out = torch.zeros(*query.shape[:2], self._lora)
        for row, end in enumerate(lens):
            keys = kv.view(-1, self._page_size, kv.shape[1])[table[row].long()].flatten(0, 1)
            keys = keys[first : max(end, first + width), None]
            tokens = slice(row * width, (row + 1) * width)
            out[tokens] = mha.partial_attention(
                query[tokens], keys, keys[..., : self._lora], scale, causal=True
            )[0]
        return out

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
        queries, keys = q_starts.tolist(), k_starts.tolist()
        assert max_q == max(b - a for a, b in zip(queries, queries[1:]))
        assert max_k == max(b - a for a, b in zip(keys, keys[1:]))
        parts = [
            mha.partial_attention(q[a:b], k[c:d], v[c:d], scale, causal)
            for a, b, c, d in zip(queries, queries[1:], keys, keys[1:])
        ]
        out.copy_(torch.cat([part for part, _ in parts]))
        return torch.cat([lse for _, lse in parts])


class CountedMla(PlainMla):
    """Counts the layers of prepared steps.

    Attributes:
        prepared: their number, in all engines of this process.
    """

    prepared = 0

    def attend_prepared(self, layer: MlaLayer, query: Tensor, *keys: Tensor) -> Tensor:
        CountedMla.prepared += 1
        return super().attend_prepared(layer, query, *keys)
