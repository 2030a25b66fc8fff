"""The multi-head backends pass the attention slot's suite on a GPU, and captured steps replay with
the results of eager ones.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import AttentionBackend, Worker
from glowplug.core.testing.harness.paged_world import Row, World, make_world
from glowplug.core.testing.suites.attention import MhaCase, MhaSuite, MlaCase
from tests.contract import fa3_build
from tests.contract.gpu_graphs import padded, plant, refill
from tests.contract.gpu_mla import drafting

pytestmark = pytest.mark.gpu
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


class GpuMhaSuite(MhaSuite):
    """bf16 at the sizes of Llama-3-8B. Subclasses set ``sizes``: heads, key heads, elements of
    a head.
    """

    device, dtype, error = "cuda", torch.bfloat16, 1e-2
    sizes: tuple[int, int, int] = (32, 8, 128)
    page_sizes: tuple[int, ...] = (16, 64)
    page_size = 64
    capture_widths: tuple[int, ...] = (1, 3)

    @property
    def heads(self) -> int:  # type: ignore[override]
        return self.sizes[0]

    @property
    def kv_heads(self) -> int:  # type: ignore[override]
        return self.sizes[1]

    @property
    def queries(self) -> tuple[tuple[int, ...], ...]:  # type: ignore[override]
        return ((self.sizes[0], self.sizes[2]),)

    @property
    def entries(self) -> dict[str, tuple[int, ...]]:  # type: ignore[override]
        return {"k": self.sizes[1:], "v": self.sizes[1:]}

    def facts(self) -> ModelFacts:
        return replace(super().facts(), head_dim=self.sizes[2])

    def layer(self, generator: torch.Generator) -> MhaCase:
        return MhaCase(*self.sizes[:2], head_dim=self.sizes[2], scale=self.sizes[2] ** -0.5)

    def definition(
        self, queries: list[Tensor], history: list[Tensor], layer: MlaCase | MhaCase
    ) -> Tensor:
        """Compute the definition on the device, which is faster in float64."""
        moved = [[x.to(self.device) for x in given] for given in (queries, history)]
        return super().definition(*moved, layer).cpu()

    @pytest.mark.parametrize("first_key", [0, 1])
    @pytest.mark.parametrize("trees", [False, True])
    def test_a_graph_replays_decoding_steps(self, first_key: int, trees: bool) -> None:
        """The graph is captured over padding rows only, and replayed with other lengths, pages,
        tokens and trees each time.
        """
        if trees:
            self.needs_trees()
        if first_key and not self.first_key:
            pytest.skip("this backend reads every position")
        for width in self.capture_widths:
            generator = torch.Generator().manual_seed(width)
            layer, backend, key = self.layer(generator), self.backend(self.page_size), object()
            worlds = [self.decoding(number, width, first_key) for number in range(3)]
            pool = {
                name: torch.cat([world.pools[name] for world in worlds]) for name in self.entries
            }
            for cache in pool.values():
                cache[: self.page_size] = 0.0
            backend.reserve(worlds[0].limits((pool,)))
            static = padded(width, first_key, self.page_size, self.device, self.cached)
            if trees:
                plant(static, 0)
            given = [
                torch.zeros(static.num_tokens, *shape, device=self.device, dtype=self.dtype)
                for shape in (*self.queries, *self.entries.values())
            ]
            backend.plan_step(static, key)
            backend.mha(*given, layer)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = backend.mha(*given, layer)
            offset, real = 0, 4 * width
            for world in worlds:
                for x in given:
                    x.copy_(torch.randn(x.shape, generator=generator))
                refill(static, world.batch, offset, self.page_size)
                if trees:
                    plant(static, offset)
                backend.plan_step(static, key)
                out.fill_(float("nan"))
                graph.replay()
                replayed = out.clone()
                assert torch.isfinite(replayed).all()
                backend.plan_step(static, None)
                torch.testing.assert_close(
                    replayed[:real],
                    backend.mha(*given, layer)[:real],
                    rtol=self.error,
                    atol=self.error,
                )
                offset += world.num_pages

    def decoding(self, seed: int, width: int, first_key: int) -> World:
        lengths = np.random.default_rng(seed).integers(1, 700, 4)
        world = make_world(
            [Row(int(n) + width + first_key, width) for n in lengths], self.page_size, seed, 12
        )
        world.batch.first_key = first_key
        for name, shape in self.entries.items():
            world.fill(name, shape, torch.Generator().manual_seed(seed), self.cached)
        world.move(self.device, self.cached)
        return world


class TestTriton(GpuMhaSuite):
    def make(self, plan: EnginePlan, worker: Worker) -> AttentionBackend:
        pytest.importorskip("triton")
        from glowplug.plugins.attention.mha.triton import TritonMhaOptions
        from glowplug.plugins.attention.mha.triton_runtime import TritonMha

        return TritonMha(TritonMhaOptions(), plan, worker)


class TestTritonAtSmolLm(TestTriton):
    """Three query heads share a key head, and heads have 64 elements, each exact in float16."""

    sizes, page_sizes, dtype, error = (9, 3, 64), (1,), torch.float16, 3e-3


class TestTritonMqa(TestTriton):
    """More query heads than a block holds, of an odd size."""

    sizes, page_sizes = (71, 1, 96), (64,)


class TestTritonFp8(TestTriton):
    kv_dtype, error, page_sizes = torch.float8_e4m3fn, 2e-2, (64,)


class TestTritonFp8E5m2(TestTriton):
    kv_dtype, error, page_sizes = torch.float8_e5m2, 2e-2, (64,)


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
class TestFa3(GpuMhaSuite):
    tree = False

    def make(self, plan: EnginePlan, worker: Worker) -> AttentionBackend:
        pytest.importorskip("sgl_kernel")
        from glowplug.plugins.attention.mha.fa3 import Fa3MhaOptions
        from glowplug.plugins.attention.mha.fa3_runtime import Fa3Mha

        return Fa3Mha(Fa3MhaOptions(), drafting(plan), worker)


class TestHopper(TestFa3):
    """The choice between the two, set as the table makes it for some steps and for others."""

    kernel, page_sizes, tree = "triton", (64,), True

    @pytest.fixture(autouse=True)
    def _table(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            "glowplug.plugins.attention.shared.decode_choice.FASTEST_MHA",
            {4: ((1e9, self.kernel),)},
        )

    def make(self, plan: EnginePlan, worker: Worker) -> AttentionBackend:
        pytest.importorskip("sgl_kernel")
        from glowplug.plugins.attention.mha.hopper import HopperMhaOptions
        from glowplug.plugins.attention.mha.hopper_runtime import HopperMha

        return HopperMha(HopperMhaOptions(), plan, worker)


class TestHopperByLibrary(TestHopper):
    kernel = "fa3"


class TestHopperWithAnFp8Cache(TestHopper):
    kv_dtype, error = torch.float8_e4m3fn, 2e-2


class OtherHeads(TestFa3):
    """Heads that the plan admits because the published builds of the library have their kernels."""

    @pytest.fixture(autouse=True)
    def _built(self) -> None:
        """Fail where a kernel is missing, before the library ends this process."""
        pytest.importorskip("sgl_kernel")
        assert fa3_build.lacks(*self.sizes, self.dtype) is None


class TestFa3AtSmolLm(OtherHeads):
    sizes, page_sizes, dtype, error = (9, 3, 64), (1,), torch.float16, 3e-3


class TestFa3LargePages(OtherHeads):
    sizes, page_sizes, page_size = (12, 4, 96), (128,), 128


class TestFa3AtLlamaInHalf(OtherHeads):
    page_sizes, dtype, error = (64,), torch.float16, 3e-3


class TestFa3HeadsOf96InHalf(OtherHeads):
    sizes, page_sizes, dtype, error = (12, 4, 96), (64,), torch.float16, 3e-3


class TestFa3HeadsOf192(OtherHeads):
    sizes, page_sizes = (8, 2, 192), (64,)


class TestFa3HeadsOf256(OtherHeads):
    sizes, page_sizes = (8, 2, 256), (64,)


class TestFa3HeadsOf256InHalf(OtherHeads):
    sizes, page_sizes, dtype, error = (8, 2, 256), (16,), torch.float16, 3e-3
