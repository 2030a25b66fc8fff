"""``triton_mla`` passes the attention slot's suite: interpreted, on a GPU, over long prefixes, with
an FP8 cache.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import MlaLayer, Worker
from glowplug.core.testing.harness.paged_world import Row, make_world
from glowplug.core.testing.suites.attention import MlaSuite
from glowplug.kernels.mla import reference as mla
from glowplug.plugins.attention.mla.triton import TritonMlaOptions
from glowplug.plugins.attention.shared.entry_moves import TritonEntryMoves
from tests.contract.gpu_mla import GpuMlaSuite, Projections

pytest.importorskip("triton")
from glowplug.kernels.mla import value_projection as mla_values
from glowplug.kernels.mla.decode_tiling import MlaTiling
from glowplug.plugins.attention.mla.triton_runtime import TritonMla, _Rows


class Suite(MlaSuite):
    """Sizes that are not powers of two."""

    merged = True

    def make(self, plan: EnginePlan, worker: Worker) -> TritonMla:
        made = TritonMla(TritonMlaOptions(), plan, worker)
        made._moves = TritonEntryMoves()  # on a CPU, too: interpreted
        return made


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


class Apart(TritonMla):
    """A backend that leaves the merge of three KV splits to W_UV's GEMM wherever possible."""

    def _tiled_rows(
        self, query: Tensor, kv: Tensor, layer: MlaLayer, merge_in_values: bool = False
    ) -> tuple[_Rows, MlaTiling]:
        rows, tiling = super()._tiled_rows(query, kv, layer, merge_in_values)
        merge_in_values = merge_in_values and rows.width == 1
        return rows, replace(tiling, block_n=16, splits=3, merge_in_values=merge_in_values)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: kernels are not interpreted")
@pytest.mark.parametrize("first_key", [0, 1])
def test_splits_merged_by_the_values_gemm_interpreted(
    first_key: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding rows of few and of many keys run beside a prompt; rows of several tokens merge
    separately.
    """
    calls: list[Tensor] = []
    product = mla_values.merge_and_project
    monkeypatch.setattr(
        mla_values, "merge_and_project", lambda *given: [calls.append(given[4]), product(*given)]
    )
    suite = TestInterpreted()
    suite.lora, suite.value, suite.heads = 64, 32, 2
    for width in (1, 2):
        generator = torch.Generator().manual_seed(width)
        world = make_world(
            [*(Row(n, width) for n in (width + first_key, 16, 17, 70)), Row(9, 4, True)], 16, width
        )
        world.batch.first_key = first_key
        layer, args = suite.layer(generator), suite.arguments(world, generator)
        plan = suite.backend(16)._plan  # type: ignore[attr-defined]
        backend = Apart(TritonMlaOptions(), plan, Worker(device="cpu", dtype=torch.float32))
        want = suite.expected(world, layer, args)
        suite.close(suite.step(backend, world, layer, args), want)
        assert [out.shape for out in calls] == [(4, 2, 32)], "for one token a row"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "rows"), [(8, 1), (8, 5), *itertools.product((8, 16), (8, 17, 32))], ids=str
)
@pytest.mark.parametrize("first_key", [0, 1])
@pytest.mark.parametrize("kept", [None, torch.float8_e4m3fn])
def test_parts_joined_by_the_values_product(
    heads: int, rows: int, first_key: int, kept: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding rows run beside a prompt; rows of several tokens and stored blocks merge
    separately.
    """
    suite = TestPublishedSizes() if kept is None else TestFp8Cache()
    suite.heads = heads
    calls: list[Tensor] = []
    product = mla_values.merge_and_project
    monkeypatch.setattr(
        mla_values, "merge_and_project", lambda *given: [calls.append(given[4]), product(*given)]
    )
    hopper = torch.cuda.get_device_capability() == (9, 0)
    for width in (1, 2):
        generator = torch.Generator().manual_seed(rows + width)
        lengths = torch.randint(width + first_key, 900, (rows,), generator=generator).tolist()
        world = make_world(
            [*(Row(n, width) for n in (width + first_key, *lengths[1:])), Row(50, 33, True)],
            64,
            rows,
        )
        world.batch.first_key = first_key
        layer, args = suite.layer(generator), suite.arguments(world, generator)
        backend, want = suite.backend(64), suite.expected(world, layer, args)
        backend._context = 2048
        suite.close(suite.step(backend, world, layer, args), want)
        assert len(calls) == int(hopper), "for one token a row"


@pytest.mark.gpu
def test_stored_blocks_are_joined_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla_values, "merge_and_project", None)
    suite, generator = TestPublishedSizes(), torch.Generator().manual_seed(1)
    world = make_world([Row(n, 1) for n in (1, 70, 200, 500, 64, 65, 900, 333)], 64, 1)
    suite.arguments(world, generator)
    layer, projected = suite.stored(generator), Projections(suite, 8, 1)
    world.move(suite.device, suite.cached)
    outs = []
    for option, stored in (("fp8", layer.kv_stored), ("bf16", None)):
        backend = suite.backend(64)
        backend._absorbed, backend._context, layer.kv_stored = option, 2048, stored
        if stored is None:
            monkeypatch.setattr(mla_values, "sizes_fit", lambda lora, value: False)
        backend.reserve(world.limits())
        backend.plan_step(world.batch, None)
        outs.append(projected.give(backend, True, layer))
    torch.testing.assert_close(outs[1], outs[0], rtol=10 * suite.error, atol=10 * suite.error)


def test_a_tree_in_the_batch_is_read() -> None:
    """Two branches follow a root: the second branch's token attends to the root and not to the
    first branch's.
    """
    suite = TestCuda() if torch.cuda.is_available() else TestInterpreted()
    generator = torch.Generator().manual_seed(1)
    world = make_world([Row(30, 3), Row(4, 3)], 16, 1)
    layer, args = suite.layer(generator), suite.arguments(world, generator)
    world.batch.tree_mask = torch.tensor([[1, 3, 5], [1, 3, 7]], device=suite.device)
    backend = suite.backend(16)
    got = suite.step(backend, world, layer, args)
    q_nope, q_rope = args[:2]
    query = torch.cat((mla.absorb_query(q_nope, layer.w_uk), q_rope), dim=-1)
    latent = mla.paged_latent_reference(
        query,
        world.pools["kv"].cpu(),
        world.batch.page_table.cpu(),
        world.batch.kv_lens_device.cpu(),
        layer.scale,
        16,
        layer.lora_rank,
        tree=world.batch.tree_mask.cpu(),
    )
    suite.close(got, mla.project_output(latent, layer.w_uv.double()))
