"""``torch_mha`` passes the attention slot's suite: MHA, GQA and MQA, in one piece and in many."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Worker
from glowplug.core.testing.harness.paged_world import Row, make_world
from glowplug.core.testing.suites.attention import MhaCase, MhaSuite
from glowplug.plugins.attention.mha.torch import TorchMhaOptions
from glowplug.plugins.attention.mha.torch_runtime import TorchMha


class TestGqa(MhaSuite):
    def make(self, plan: EnginePlan, worker: Worker) -> TorchMha:
        return TorchMha(TorchMhaOptions(), plan, worker)


class TestGqaInPieces(TestGqa):
    """At these lengths groups are already split and prefixes attended in pieces."""

    def make(self, plan: EnginePlan, worker: Worker) -> TorchMha:
        made = super().make(plan, worker)
        made._limits = replace(made._limits, decode_keys=97, keys=23, queries=60)
        return made


class TestMha(TestGqaInPieces):
    heads, kv_heads, queries, entries = 4, 4, ((4, 8),), {"k": (4, 8), "v": (4, 8)}


class TestMqa(TestGqaInPieces):
    heads, kv_heads, queries, entries = 3, 1, ((3, 8),), {"k": (1, 8), "v": (1, 8)}


class TestBfloat16(TestGqaInPieces):
    dtype, error = torch.bfloat16, 3e-2


@pytest.mark.gpu
class TestCuda(TestGqaInPieces):
    device, error = "cuda", 5e-3


@pytest.mark.gpu
class TestCudaBfloat16(TestGqa):
    device, dtype, error = "cuda", torch.bfloat16, 3e-2


def test_cache_of_a_narrower_dtype_is_read_as_stored() -> None:
    """With a bfloat16 cache a chunk reads rounded keys, both cached keys and the keys of the chunk
    itself.
    """
    suite, generator, outs = TestGqa(), torch.Generator().manual_seed(3), []
    whole = make_world([Row(24, 24, prefill=True)], 16, 1)
    args = suite.arguments(whole, generator)
    for chunks in ((24,), (11, 13)):
        made, end, parts = suite.backend(16), 0, []
        pools = {
            name: torch.zeros(whole.num_pages * 16, *shape) for name, shape in suite.entries.items()
        }
        for chunk in chunks:
            start, end = end, end + chunk
            world = suite._continued(whole, start, end, pools)
            world.move("cpu", torch.bfloat16)
            pools = world.pools
            made.reserve(world.limits())
            made.plan_step(world.batch, None)
            parts.append(made.mha(*(x[start:end] for x in args), MhaCase()))
        outs.append(torch.cat(parts))
    torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=1e-6)
