"""``triton_mha`` passes the attention slot's suite interpreted, trees included. For the sizes of
models see test_gpu_mha.
"""

from __future__ import annotations

import pytest
import torch

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Worker
from glowplug.core.testing.harness.paged_world import Row, make_world
from glowplug.core.testing.suites.attention import MhaSuite
from glowplug.kernels.mha import reference as mha
from glowplug.plugins.attention.mha.triton import TritonMhaOptions
from glowplug.plugins.attention.shared.entry_moves import TritonEntryMoves

pytest.importorskip("triton")
from glowplug.plugins.attention.mha.triton_runtime import TritonMha


class Suite(MhaSuite):
    """Few programs, because each is interpreted: four heads, and keys in at most two splits."""

    heads, kv_heads, queries = 4, 2, ((4, 8),)
    page_sizes, max_width = (7,), 2

    def make(self, plan: EnginePlan, worker: Worker) -> TritonMha:
        made = TritonMha(TritonMhaOptions(), plan, worker)
        made._context = 32
        made._moves = TritonEntryMoves()  # on a CPU, too: interpreted
        return made


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: kernels are not interpreted")
class TestInterpreted(Suite):
    pass


@pytest.mark.gpu
class TestCuda(Suite):
    device, error = "cuda", 1e-4


def test_a_tree_in_the_batch_is_read() -> None:
    """Two branches follow a root: the second branch's token attends to the root and not to the
    first branch's.
    """
    suite = TestCuda() if torch.cuda.is_available() else TestInterpreted()
    generator = torch.Generator().manual_seed(1)
    world = make_world([Row(30, 3), Row(4, 3)], 16, 1)
    layer, args = suite.layer(generator), suite.arguments(world, generator)
    world.batch.tree_mask = torch.tensor([[1, 3, 5], [1, 3, 7]], device=suite.device)
    got = suite.step(suite.backend(16), world, layer, args)
    batch = world.batch
    expected = mha.paged_reference(
        args[0],
        world.pools["k"].cpu(),
        world.pools["v"].cpu(),
        batch.page_table.cpu(),
        batch.kv_lens_device.cpu(),
        layer.scale,
        16,
        tree=batch.tree_mask.cpu(),
    )
    suite.close(got, expected.flatten(1))
