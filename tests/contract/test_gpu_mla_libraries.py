"""The libraries' latent-attention backends pass the attention slot's suite on Hopper."""
from __future__ import annotations

import pytest
import torch

from glowplug.core.plan import EnginePlan
from glowplug.core.protocols import AttentionBackend, Worker
from glowplug.core.testing.paged_world import Row, make_world
from tests.contract.gpu_mla import GpuMlaSuite

pytestmark = pytest.mark.gpu
HERE = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@pytest.mark.skipif(not HERE, reason="needs a Hopper GPU")
class TestFa3(GpuMlaSuite):
    def make(self, plan: EnginePlan, worker: Worker) -> AttentionBackend:
        pytest.importorskip("sgl_kernel")
        from glowplug.plugins.attention.fa3_mla import Fa3MlaOptions
        from glowplug.plugins.attention.fa3_mla_runtime import Fa3Mla

        made = Fa3Mla(Fa3MlaOptions(), plan, worker)
        made._most_keys = self.most_keys
        return made


class TestFa3AtV3Heads(TestFa3):
    heads, page_sizes, capture_widths, most_keys = 128, (64,), (1, 2), 1 << 20


@pytest.mark.skipif(not HERE, reason="needs a Hopper GPU")
class TestFlashMla(GpuMlaSuite):
    page_sizes = (64,)

    def make(self, plan: EnginePlan, worker: Worker) -> AttentionBackend:
        pytest.importorskip("sgl_kernel")
        from glowplug.plugins.attention.flashmla import FlashMlaOptions
        from glowplug.plugins.attention.flashmla_runtime import FlashMla

        made = FlashMla(FlashMlaOptions(), plan, worker)
        made._most_keys = self.most_keys
        return made


class TestFlashMlaAtV3Heads(TestFlashMla):
    heads, capture_widths, most_keys = 128, (1, 2), 1 << 20


class TestHopper(TestFlashMla):
    """The choice between its two kernels, made for a step of six rows as the table makes it for many and for few."""

    kernel = "flashmla"

    @pytest.fixture(autouse=True)
    def _table(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("glowplug.plugins.attention.measured.FASTEST", {16: ((1e9, self.kernel),)})

    def make(self, plan: EnginePlan, worker: Worker) -> AttentionBackend:
        pytest.importorskip("sgl_kernel")
        from glowplug.plugins.attention.hopper_mla import HopperMlaOptions
        from glowplug.plugins.attention.hopper_mla_runtime import HopperMla

        made = HopperMla(HopperMlaOptions(), plan, worker)
        made._most_keys = self.most_keys
        return made


class TestHopperByTriton(TestHopper):
    kernel = "triton"

    @pytest.mark.parametrize("width", [1, 2])
    def test_parts_joined_by_the_values_product(self, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its own kernels' way from decode to values, of rows that are cut into parts."""
        from glowplug.kernels.triton import mla_values

        calls, product = [], mla_values.project
        monkeypatch.setattr(mla_values, "project", lambda *given: [calls.append(1), product(*given)])
        generator = torch.Generator().manual_seed(width)
        world = make_world([Row(width + 67 * row, width) for row in range(12)], 64, width)
        layer, args = self.layer(generator), self.arguments(world, generator)
        backend, want = self.backend(64), self.expected(world, layer, args)
        backend._own._context = 2048
        self.close(self.step(backend, world, layer, args), want)
        assert len(calls) == (width == 1)


class TestHopperWithAnFp8Cache(TestHopper):
    kv_dtype, error = torch.float8_e4m3fn, 3e-2


@pytest.mark.skipif(not HERE, reason="needs a Hopper GPU")
class TestFlashInfer(GpuMlaSuite):
    max_width, capture_widths, first_key = 1, (1,), False

    def make(self, plan: EnginePlan, worker: Worker) -> AttentionBackend:
        pytest.importorskip("flashinfer")
        from glowplug.plugins.attention.flashinfer_mla import FlashInferMlaOptions
        from glowplug.plugins.attention.flashinfer_mla_runtime import FlashInferMla

        made = FlashInferMla(FlashInferMlaOptions(), plan, worker)
        made._most_keys = self.most_keys
        return made

    def test_lengths_known_on_the_device_only(self) -> None:
        pytest.skip("it plans with the host's lengths, and so offers no mode where those are upper bounds")


class TestFlashInferAtV3Heads(TestFlashInfer):
    heads, page_sizes, most_keys = 128, (64,), 1 << 20
