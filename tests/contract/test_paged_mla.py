"""The shared base of GPU backends of latent attention, run on the CPU with attention by the
definition.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.options import AttentionOptions
from glowplug.core.protocols import AttentionBackend, MlaLayer, Worker
from glowplug.core.step.batch import Batch
from glowplug.kernels.mha import reference as mha
from glowplug.plugins.attention.shared.mla_base import PagedMla
from tests.contract.gpu_mla import ProjectedSuite


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


class TestPagedMla(ProjectedSuite):
    tree = False

    def make(self, plan: EnginePlan, worker: Worker) -> AttentionBackend:
        return PlainMla(AttentionOptions(use="plain"), plan, worker)


class TestPagedMlaOfStoredBlocks(TestPagedMla):
    """On the CPU blocks are dequantised in float32, so results equal those of the dense weights."""

    nope, value, lora = 128, 128, 128

    def test_stored_blocks_are_read(self) -> None:
        with pytest.raises(AssertionError, match="they are read"):
            super().test_stored_blocks_are_read()


class TestPagedMlaOverLongPrefixes(TestPagedMla):
    """A budget so small that prefixes are attended piece by piece."""

    def make(self, plan: EnginePlan, worker: Worker) -> AttentionBackend:
        backend = PlainMla(AttentionOptions(use="plain"), plan, worker)
        backend._most_keys = 20
        return backend


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: kernels are not interpreted")
class TestPagedMlaByHeads(TestPagedMla):
    """Keys and values alternate in one tensor, interpreted; own tokens, cached prefixes, and
    prefixes in pieces.
    """

    page_sizes, max_width, nope, value = (7, 16), 2, 8, 8

    def make(self, plan: EnginePlan, worker: Worker) -> AttentionBackend:
        mla_expand = pytest.importorskip("glowplug.kernels.mla.expand")
        backend = PlainMla(AttentionOptions(use="plain"), plan, worker)
        backend._most_keys, backend._expand = 40, mla_expand.expand
        return backend


class TestPagedMlaByHeadsApart(TestPagedMlaByHeads):
    """Values have another size than the keys' latent parts."""

    page_sizes, value = (16,), 12


class TestPagedMlaByHeadsOfFp8(TestPagedMlaByHeads):
    """The cache is in FP8; its rounding is not measured here."""

    page_sizes, kv_dtype, error = (16,), torch.float8_e4m3fn, 0.02
