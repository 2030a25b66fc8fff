"""FlashMLA's backend on the CPU, with a library that multiplies as its kernels do: 16 bits, and
E4M3 throughout.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import AttentionBackend, Worker
from glowplug.core.testing.harness.paged_world import Row, World, make_world
from glowplug.kernels.mla import reference as mla
from glowplug.plugins.attention.mla.flashmla import FlashMlaOptions
from tests.contract import fake_sgl_kernel
from tests.contract.fake_sgl_kernel import CALLS
from tests.contract.gpu_mla import ProjectedSuite

RUNTIMES = [
    "glowplug.plugins.attention.mla.flashmla_runtime",
    "glowplug.plugins.attention.mla.fa3_runtime",
]


@pytest.fixture(scope="module", autouse=True)
def _library() -> Iterator[None]:
    """The fake for this module; runtimes that imported it are unloaded with it."""
    before = {name: sys.modules.pop(name, None) for name in RUNTIMES}
    with pytest.MonkeyPatch.context() as patch:
        for name, made in fake_sgl_kernel.modules().items():
            patch.setitem(sys.modules, name, made)
        yield
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    CALLS.clear()


class TestFlashMla(ProjectedSuite):
    tree = False
    page_sizes, page_size, max_width = (64,), 64, 2
    nope, rope, value, lora = 16, 64, 8, 512

    def make(self, plan: EnginePlan, worker: Worker) -> AttentionBackend:
        backend: AttentionBackend = importlib.import_module(RUNTIMES[0]).FlashMla(
            FlashMlaOptions(), plan, worker
        )
        return backend


class TestFlashMlaWithAnFp8Cache(TestFlashMla):
    """Scores are of the order of one, with a rounded query: see ``test_gpu_mla_libraries`` for the
    bound.
    """

    kv_dtype, error, first_key = torch.float8_e4m3fn, 6e-2, False

    def ready(self, world: World, wide: bool = False) -> AttentionBackend:
        backend = self.backend(self.page_size)
        world.move(self.device, self.dtype if wide else self.cached)
        backend.reserve(world.limits())
        return backend

    def given(self, seed: int, lengths: tuple[int, ...] = (1, 64, 130), width: int = 1) -> World:
        world = make_world([Row(n + width, width) for n in lengths], self.page_size, seed)
        own = world.fill(
            "kv", (self.lora + self.rope,), torch.Generator().manual_seed(seed), self.cached
        )
        mla.store(own[:, : self.lora], own[:, self.lora :], world.pools["kv"], world.batch.kv_slots)
        return world

    def decode(
        self, backend: AttentionBackend, world: World, query: Tensor, graph: object | None = None
    ) -> Tensor:
        backend.plan_step(world.batch, graph)
        layer = self.layer(torch.Generator().manual_seed(0))
        out: Tensor = backend.decode(query, world.pools["kv"], layer.scale, layer)  # type: ignore[attr-defined]
        return out

    def query(self, world: World, scale: float = 1.0) -> Tensor:
        shape = world.batch.num_tokens, self.heads, self.lora + self.rope
        return torch.randn(shape, generator=torch.Generator().manual_seed(7)) * scale

    @pytest.mark.parametrize("width", [1, 2])
    def test_arguments_of_the_library(self, width: int) -> None:
        """Queries are in E4M3, saturated, with NaN kept; both scales are one; results have the
        compute dtype.
        """
        world = self.given(1, width=width)
        backend, query = self.ready(world), self.query(world)
        query[0, 0, :3] = torch.tensor([1e4, -1e4, 448.0])
        query[-1, -1, 5] = float("nan")
        out = self.decode(backend, world, query)
        call = CALLS.pop()
        assert call["q"].dtype == torch.float8_e4m3fn and call["q"].shape[:2] == (3, width)
        assert call["q"][0, 0, 0, :3].tolist() == [448.0, -448.0, 448.0]
        assert call["q"].float().isnan().nonzero().tolist() == [[2, width - 1, 2, 5]]
        assert call["descale_q"].tolist() == call["descale_k"].tolist() == [1.0]
        assert out.dtype == self.dtype and out[-1, -1].isnan().all() and out[:-1].isfinite().all()

    @pytest.mark.parametrize("scale", [0.06, 1.0, 30.0])
    def test_one_scale_serves_queries_of_any_size(self, scale: float) -> None:
        """E4M3 rounds numbers from 2**-6 to 448 alike: scores are off by the same fraction of
        themselves.
        """
        world = self.given(2)
        query = self.query(world, scale)
        keys = torch.randn(50, query.shape[-1], generator=torch.Generator().manual_seed(3))
        exact = query.double().flatten(0, 1) @ keys.double().T
        off = mla.in_e4m3(query).double().flatten(0, 1) @ keys.double().T - exact
        assert float(off.std() / exact.std()) < 2**-5

    def test_kernels_captured_in_a_slot_read_each_steps_lengths(self) -> None:
        """The arguments of a graph's first step hold the numbers of its later steps."""
        graph, worlds = (
            object(),
            [self.given(seed, lengths) for seed, lengths in ((3, (5, 70, 1)), (4, (200, 3, 66)))],
        )
        backend = self.backend(self.page_size)
        kept = []
        for world in worlds:
            world.move(self.device, self.cached)
            backend.reserve(world.limits())
            backend.plan_step(world.batch, graph)
            kept.append(backend._rows)  # type: ignore[attr-defined]
            fresh = fake_sgl_kernel.get_mla_metadata(
                world.batch.kv_lens_device, self.heads, 1, is_fp8_kvcache=True
            )
            held = kept[-1]
            assert torch.equal(held.lens, world.batch.kv_lens_device)
            assert all(torch.equal(*pair) for pair in zip(held.schedule, fresh, strict=True))
        for first, second in zip(
            (kept[0].lens, *kept[0].schedule), (kept[1].lens, *kept[1].schedule), strict=True
        ):
            assert first.data_ptr() == second.data_ptr()

    def test_a_cache_of_16_bits_is_read_as_such_for_any_plan(self) -> None:
        """This happens when the cost of an FP8 cache is measured beside a wide one."""
        world = self.given(5)
        query, outs = self.query(world), []
        for wide in (True, False):
            backend = self.ready(world, wide)
            outs.append(self.decode(backend, world, query))
            assert (CALLS[-1]["q"].dtype == torch.float8_e4m3fn) is not wide
        exact = mla.paged_latent_reference(
            query,
            world.pools["kv"].float(),
            world.batch.page_table,
            world.batch.kv_lens_device,
            self.layer(torch.Generator().manual_seed(0)).scale,
            self.page_size,
            self.lora,
        ).float()
        torch.testing.assert_close(outs[0], exact, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(outs[1], exact, rtol=1e-3, atol=1e-3), "queries are rounded"

    def test_drafts_rows_are_not_read_from_it(self) -> None:
        world = self.given(6)
        backend = self.ready(world)
        world.batch.first_key = 1
        with pytest.raises(AssertionError, match="the plan refuses it"):
            backend.plan_step(world.batch, None)
