"""``torch_mla`` passes the attention slot's suite: absorbed and not, in one piece and in many."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from glowplug.core.plan import EnginePlan
from glowplug.core.protocols import Worker
from glowplug.core.testing.attention_suite import MlaSuite
from glowplug.plugins.attention.torch_mla import TorchMlaOptions
from glowplug.plugins.attention.torch_mla_runtime import TorchMla


class TestAbsorbed(MlaSuite):
    absorb = True

    def make(self, plan: EnginePlan, worker: Worker) -> TorchMla:
        plan = replace(plan, kv_dtype=str(self.dtype).removeprefix("torch."))
        return TorchMla(TorchMlaOptions(absorb=self.absorb), plan, worker)


class TestNaive(TestAbsorbed):
    absorb = False


class TestInPieces(TestAbsorbed):
    """Groups split, and prefixes go in pieces, at these lengths already."""

    def make(self, plan: EnginePlan, worker: Worker) -> TorchMla:
        made = super().make(plan, worker)
        made._limits = replace(made._limits, decode_keys=97, keys=23, queries=60)
        return made


class TestNaiveInPieces(TestInPieces):
    absorb = False


class TestBfloat16(TestInPieces):
    dtype, error = torch.bfloat16, 3e-2


@pytest.mark.gpu
class TestCuda(TestInPieces):
    device, error = "cuda", 5e-3


@pytest.mark.gpu
class TestCudaBfloat16(TestAbsorbed):
    device, dtype, error = "cuda", torch.bfloat16, 3e-2
