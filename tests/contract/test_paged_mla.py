"""The shared base of GPU backends of latent attention, run on the CPU with attention by the
definition.
"""

from __future__ import annotations

import pytest
import torch

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.options import AttentionOptions
from glowplug.core.protocols import AttentionBackend, Worker
from tests.contract.gpu_mla import ProjectedSuite
from tests.plugins.projected_mla_runtime import PlainMla


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
