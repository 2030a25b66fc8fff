"""``triton_mla`` passes the attention slot's suite: interpreted, on a GPU, over long prefixes, with an FP8 cache."""
from __future__ import annotations

import pytest
import torch

from glowplug.core.plan import EnginePlan
from glowplug.core.protocols import Worker
from glowplug.core.testing.attention_suite import MlaSuite
from glowplug.core.testing.paged_world import Row, make_world
from glowplug.kernels import mla
from glowplug.plugins.attention.triton_mla import TritonMlaOptions
from tests.contract.gpu_mla import GpuMlaSuite

pytest.importorskip("triton")
from glowplug.plugins.attention.triton_mla_runtime import TritonMla


class Suite(MlaSuite):
    """Sizes that are not powers of two."""

    merged = True

    def make(self, plan: EnginePlan, worker: Worker) -> TritonMla:
        return TritonMla(TritonMlaOptions(), plan, worker)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: kernels are not interpreted")
class TestInterpreted(Suite):
    page_sizes, max_width = (7, 16), 2


@pytest.mark.gpu
class TestCuda(Suite):
    device, error = "cuda", 1e-4


@pytest.mark.gpu
class TestCudaBfloat16(Suite):
    device, dtype, error = "cuda", torch.bfloat16, 3e-2
    page_sizes = (1, 16, 64)


class Published(GpuMlaSuite):
    def make(self, plan: EnginePlan, worker: Worker) -> TritonMla:
        made = TritonMla(TritonMlaOptions(), plan, worker)
        made._most_keys = self.most_keys
        return made


@pytest.mark.gpu
class TestPublishedSizes(Published):
    pass


@pytest.mark.gpu
class TestManyHeads(Published):
    heads, page_sizes = 128, (64,)


@pytest.mark.gpu
class TestFp8Cache(Published):
    kv_dtype, error = torch.float8_e4m3fn, 2e-2


def test_a_tree_in_the_batch_is_read() -> None:
    """Two branches behind a root: the second branch's token sees the root and not the first's."""
    suite = TestCuda() if torch.cuda.is_available() else TestInterpreted()
    generator = torch.Generator().manual_seed(1)
    world = make_world([Row(30, 3), Row(4, 3)], 16, 1)
    layer, args = suite.layer(generator), suite.arguments(world, generator)
    world.batch.tree_mask = torch.tensor([[1, 3, 5], [1, 3, 7]], device=suite.device)
    backend = suite.backend(16)
    got = suite.step(backend, world, layer, args)
    q_nope, q_rope = args[:2]
    query = torch.cat((mla.absorb_query(q_nope, layer.w_uk), q_rope), dim=-1)
    latent = mla.paged_latent_reference(query, world.pools["kv"].cpu(), world.batch.page_table.cpu(),
                                        world.batch.kv_lens_device.cpu(), layer.scale, 16, layer.lora_rank,
                                        tree=world.batch.tree_mask.cpu())
    suite.close(got, mla.project_output(latent, layer.w_uv.double()))
