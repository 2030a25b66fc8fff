"""The libraries' latent-attention backends pass the attention slot's suite on Hopper."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import AttentionBackend, Worker
from glowplug.core.testing.harness.paged_world import Row, make_world
from glowplug.kernels.mla import reference as mla
from tests.contract.gpu_mla import GpuMlaSuite, drafting

pytestmark = pytest.mark.gpu
HERE = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@pytest.mark.skipif(not HERE, reason="needs a Hopper GPU")
class TestFa3(GpuMlaSuite):
    tree = False

    def make(self, plan: EnginePlan, worker: Worker) -> AttentionBackend:
        pytest.importorskip("sgl_kernel")
        from glowplug.plugins.attention.mla.fa3 import Fa3MlaOptions
        from glowplug.plugins.attention.mla.fa3_runtime import Fa3Mla

        made = Fa3Mla(Fa3MlaOptions(), drafting(plan), worker)
        made._most_keys = self.most_keys
        return made


class TestFa3AtV3Heads(TestFa3):
    heads, page_sizes, capture_widths, most_keys = 128, (64,), (1, 2), 1 << 20


@pytest.mark.skipif(not HERE, reason="needs a Hopper GPU")
class TestFlashMla(GpuMlaSuite):
    page_sizes, tree = (64,), False

    def make(self, plan: EnginePlan, worker: Worker) -> AttentionBackend:
        pytest.importorskip("sgl_kernel")
        from glowplug.plugins.attention.mla.flashmla import FlashMlaOptions
        from glowplug.plugins.attention.mla.flashmla_runtime import FlashMla

        made = FlashMla(FlashMlaOptions(), drafting(plan), worker)
        made._most_keys = self.most_keys
        return made


class TestFlashMlaAtV3Heads(TestFlashMla):
    heads, capture_widths, most_keys = 128, (1, 2), 1 << 20


class TestFlashMlaWithAnFp8Cache(TestFlashMla):
    """Queries and the softmax's weights are E4M3, too, which rounds by up to 2**-4 of a number,
    2.7% in the mean.

    Scores here have a spread of 1.3, so rounded queries add 0.035 to each. With the weights' own
    0.027 a weight is off by 4.4% in the mean, and so is an output at most. The worst single
    numbers, 5 sigma between values of two keys that far apart, mean little; the test below bounds
    them by the definition on the numbers that the kernel multiplies.
    """

    kv_dtype, error, first_key = torch.float8_e4m3fn, 0.15, False

    def close(self, got: torch.Tensor, expected: torch.Tensor) -> None:
        super().close(got, expected)
        assert float((got.double() - expected).square().mean()) < 0.07**2 * float(
            expected.square().mean()
        )

    @pytest.mark.parametrize("width", [1, 2, 3])
    @pytest.mark.parametrize("longest", [90, 3000])
    def test_of_rounded_queries_only_the_weights_are_rounded(
        self, width: int, longest: int
    ) -> None:
        """Rows in one split and in several are compared with the definition on the numbers that the
        kernel multiplies.
        """
        generator, rng = (
            torch.Generator().manual_seed(width),
            np.random.default_rng(longest + width),
        )
        rows = [Row(int(n) + width, width) for n in (1, *rng.integers(1, longest, 5))]
        world = make_world(rows, 64, width, spare_columns=3)
        layer, backend = self.layer(generator), self.backend(64)
        args = self.arguments(world, generator)
        self.step(backend, world, layer, args)
        query = torch.randn(
            world.batch.num_tokens, self.heads, self.lora + self.rope, generator=generator
        )
        query = query.to(self.device, self.dtype)
        by_row = len(rows), width, self.heads, -1
        got = backend.decode(query, world.pools["kv"], layer.scale, layer).double().view(by_row)
        rounded = mla.in_e4m3(query).double().view(by_row)
        for index, row in enumerate(rows):
            keys = world.pools["kv"][world.kv_slots_of(index).to(self.device)].double()
            scores = torch.einsum("whc,kc->whk", rounded[index], keys) * layer.scale
            hidden = torch.arange(row.length) > torch.arange(width)[:, None] + (row.length - width)
            weights = scores.masked_fill(hidden[:, None].to(self.device), float("-inf")).softmax(-1)
            values = keys[:, : self.lora]
            most = (2**-4 + 2**-7) * (
                weights @ values.abs()
            )  # the second term: sums of 14 bits, and bfloat16
            lost = (
                2**-10 * weights.amax(-1, keepdim=True) * values.abs().sum(0)
            )  # below the smallest E4M3 number
            assert ((got[index] - weights @ values).abs() <= most + lost).all(), row


class TestFlashMlaWithAnFp8CacheAtV3Heads(TestFlashMlaWithAnFp8Cache):
    heads, capture_widths, most_keys = 128, (1, 2), 1 << 20


class TestHopper(TestFlashMla):
    """The choice between its two kernels, set for a step of six rows as the table makes it for many
    and for few.
    """

    kernel, tree = "flashmla", True

    @pytest.fixture(autouse=True)
    def _table(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            "glowplug.plugins.attention.shared.decode_choice.FASTEST", {16: ((1e9, self.kernel),)}
        )

    def make(self, plan: EnginePlan, worker: Worker) -> AttentionBackend:
        pytest.importorskip("sgl_kernel")
        from glowplug.plugins.attention.mla.hopper import HopperMlaOptions
        from glowplug.plugins.attention.mla.hopper_runtime import HopperMla

        made = HopperMla(HopperMlaOptions(), plan, worker)
        made._most_keys = self.most_keys
        return made


class TestHopperByTriton(TestHopper):
    kernel = "triton"

    @pytest.mark.parametrize("width", [1, 2])
    def test_parts_joined_by_the_values_product(
        self, width: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its own kernels' path from decode to values, for rows with several splits."""
        from glowplug.kernels.mla import value_projection as mla_values

        calls, product = [], mla_values.merge_and_project
        monkeypatch.setattr(
            mla_values, "merge_and_project", lambda *given: [calls.append(1), product(*given)]
        )
        generator = torch.Generator().manual_seed(width)
        world = make_world([Row(width + 67 * row, width) for row in range(12)], 64, width)
        layer, args = self.layer(generator), self.arguments(world, generator)
        backend, want = self.backend(64), self.expected(world, layer, args)
        backend._triton._context = 2048
        self.close(self.step(backend, world, layer, args), want)
        assert len(calls) == (width == 1)


class TestHopperAtV3Heads(TestHopper):
    """By the table, few rows of many heads use our own kernels where no row can be long."""

    heads, capture_widths, most_keys = 128, (1, 2), 1 << 20

    @pytest.fixture(autouse=True)
    def _table(self) -> None:
        return


class TestHopperWithAnFp8Cache(TestHopper):
    kv_dtype, error = torch.float8_e4m3fn, 3e-2


@pytest.mark.skipif(not HERE, reason="needs a Hopper GPU")
class TestFlashInfer(GpuMlaSuite):
    tree = False

    def make(self, plan: EnginePlan, worker: Worker) -> AttentionBackend:
        pytest.importorskip("flashinfer")
        from glowplug.plugins.attention.mla.flashinfer import FlashInferMlaOptions
        from glowplug.plugins.attention.mla.flashinfer_runtime import FlashInferMla

        made = FlashInferMla(FlashInferMlaOptions(), drafting(plan), worker)
        made._most_keys = self.most_keys
        return made

    @pytest.mark.parametrize(("width", "first_key"), [(1, 1), (2, 0), (3, 0), (4, 0)])
    def test_bounds_far_beyond_the_lengths(self, width: int, first_key: int) -> None:
        """Rows are long enough for several work items, of which the last have no keys, and one row
        has none.
        """
        for rows in (3, 40):
            generator, rng = torch.Generator().manual_seed(rows), np.random.default_rng(rows)
            lengths = [int(n) for n in rng.integers(1, 2500, rows)]
            world = make_world(
                [Row(n + width + first_key, width) for n in (*lengths, 1)],
                64,
                rows,
                spare_columns=20,
            )
            world.batch.first_key = first_key
            layer, args = self.layer(generator), self.arguments(world, generator)
            expected = self.expected(world, layer, args)
            world.batch.kv_lens = world.batch.kv_lens + rng.integers(0, 1200, rows + 1).astype(
                np.int32
            )
            world.batch.kv_lens_device[-1] = 0
            world.batch.kv_slots[-width:] = 0
            got = self.step(self.backend(64), world, layer, args)
            assert torch.isfinite(got).all()
            self.close(got[:-width], expected[:-width])

    @pytest.mark.parametrize("captured", [False, True])
    def test_planning_does_not_wait_for_the_device(self, captured: bool) -> None:
        generator, backend, graph = (
            torch.Generator().manual_seed(0),
            self.backend(64),
            object() if captured else None,
        )
        world = make_world([Row(200, 2), Row(70, 2)], 64, 0)
        self.step(backend, world, self.layer(generator), self.arguments(world, generator))
        backend.plan_step(world.batch, graph)
        torch.cuda.synchronize()
        busy = torch.cuda.Event()
        torch.cuda._sleep(2_000_000_000)  # about a second
        busy.record()
        backend.plan_step(world.batch, graph)
        waited = busy.query()
        torch.cuda.synchronize()
        assert not waited


class TestFlashInferAtV3Heads(TestFlashInfer):
    heads, page_sizes, capture_widths, most_keys = 128, (64,), (1, 2), 1 << 20
