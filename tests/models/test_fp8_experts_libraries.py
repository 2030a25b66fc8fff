"""Routed experts by DeepGEMM's masked layout and by CUTLASS's grouped GEMM, both simulated here in
float32: their arguments, and results against a loop over tokens. Without a GPU the kernels are
interpreted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from glowplug.core.errors import GlowplugError  # noqa: E402
from glowplug.core.testing.harness.plans import bare_plan  # noqa: E402
from glowplug.kernels.formats import fp8, fp8_triton as fp8_quant  # noqa: E402
from glowplug.plugins.quantization.block_fp8 import masked as block_fp8_masked  # noqa: E402
from glowplug.plugins.quantization.block_fp8.cuda import BlockFp8Cuda, grouped  # noqa: E402
from glowplug.plugins.quantization.block_fp8.cutlass import CutlassExperts  # noqa: E402
from glowplug.plugins.quantization.block_fp8.grouped import Grouped  # noqa: E402
from glowplug.plugins.quantization.block_fp8.masked import Masked  # noqa: E402
from glowplug.plugins.quantization.block_fp8.plugin import BlockFp8Options  # noqa: E402
from glowplug.plugins.quantization.shared.expert_bytes import DEEP_GEMM_TILE  # noqa: E402
from tests.models.test_fp8_grouped import EXPERTS, HIDDEN, INTER, WIDTH, blocks, wanted_of  # noqa: E402

Pair = tuple[Tensor, Tensor]


def product(values: Tensor, scales: Tensor, weight: Tensor, blocks: Tensor) -> Tensor:
    dense = fp8.dequantize_weight(weight, blocks, torch.float32)
    return (values.float() * scales.repeat_interleave(128, 1)) @ dense.t()


class DeepGemm:
    """DeepGEMM's masked GEMM: it writes whole tiles of rows, NaN into rows outside the counts, and
    checks the layouts.
    """

    def __init__(self) -> None:
        self.usual: list[int] = []

    def __call__(self, x: Pair, weight: Pair, out: Tensor, counts: Tensor, usual: int) -> None:
        self.usual.append(usual)
        (experts, rows, depth), groups = x[0].shape, x[1].shape[2]
        assert (
            rows % DEEP_GEMM_TILE == 0
            and out.shape == (experts, rows, weight[0].shape[1])
            and out.dtype == torch.bfloat16
        )
        assert x[1].stride() == (groups * rows, 1, rows) and groups * 128 == depth
        assert x[0].is_contiguous() and out.is_contiguous() and weight[1].is_contiguous()
        assert counts.dtype == torch.int32 and counts.shape == (experts,)
        out.fill_(torch.nan)
        for expert, count in enumerate(counts.tolist()):
            found = product(
                x[0][expert, :count], x[1][expert, :count], weight[0][expert], weight[1][expert]
            )
            out[expert, :count] = found.to(out.dtype)


class SglKernel:
    """sgl_kernel's grouped GEMM: it reads each problem at the addresses that its arguments give."""

    def __init__(self) -> None:
        self.dtypes: list[torch.dtype] = []

    def __call__(
        self,
        out: Tensor,
        a_ptrs: Tensor,
        b_ptrs: Tensor,
        out_ptrs: Tensor,
        a_scale_ptrs: Tensor,
        b_scale_ptrs: Tensor,
        a: Tensor,
        b: Tensor,
        scales_a: Tensor,
        scales_b: Tensor,
        stride_a: Tensor,
        stride_b: Tensor,
        stride_c: Tensor,
        layout_a: Tensor,
        layout_b: Tensor,
        sizes: Tensor,
        starts: Tensor,
        workspace: Tensor,
    ) -> None:
        self.dtypes.append(out.dtype)
        experts, depth, columns = b.shape
        for pointers in (
            a_ptrs,
            b_ptrs,
            out_ptrs,
            a_scale_ptrs,
            b_scale_ptrs,
            stride_a,
            stride_b,
            stride_c,
        ):
            assert (
                pointers.shape == (experts,)
                and pointers.dtype == torch.int64
                and pointers.is_contiguous()
            )
        for layout in (layout_a, layout_b):
            assert (
                layout.shape == (experts, 5)
                and layout.dtype == torch.int32
                and layout.is_contiguous()
            )
        assert (
            sizes.shape == (experts, 3)
            and sizes.dtype == starts.dtype == torch.int32
            and sizes.is_contiguous()
        )
        assert b.transpose(1, 2).is_contiguous() and scales_b.transpose(1, 2).is_contiguous()
        assert a.is_contiguous() and scales_a.is_contiguous() and out.is_contiguous()
        assert workspace.numel() >= 90_000 and workspace.dtype == torch.uint8
        assert (
            stride_a.tolist() == stride_b.tolist() == [depth] * experts
            and stride_c.tolist() == [columns] * experts
        )
        out.fill_(torch.nan)
        for expert, ((count, wide, deep), start) in enumerate(
            zip(sizes.tolist(), starts.tolist(), strict=True)
        ):
            assert (wide, deep) == (columns, depth)
            rows = slice(start, start + count)
            found = product(a[rows], scales_a[rows], b[expert].t(), scales_b[expert].t())
            out[rows] = found.to(out.dtype)


@pytest.fixture
def masked(monkeypatch: pytest.MonkeyPatch) -> DeepGemm:
    library = DeepGemm()
    monkeypatch.setitem(
        sys.modules, "deep_gemm", SimpleNamespace(fp8_m_grouped_gemm_nt_masked=library)
    )
    return library


@pytest.fixture
def cutlass(monkeypatch: pytest.MonkeyPatch) -> SglKernel:
    library = SglKernel()
    monkeypatch.setitem(
        sys.modules, "sgl_kernel", SimpleNamespace(fp8_blockwise_scaled_grouped_mm=library)
    )
    return library


def against_a_loop(made: Any, tokens: int, used: int, dtype: torch.dtype = torch.float32) -> None:
    generator = torch.Generator().manual_seed(tokens)
    w13, w2 = (
        blocks(EXPERTS, 2 * INTER, HIDDEN, generator=generator),
        blocks(EXPERTS, HIDDEN, INTER, generator=generator),
    )
    ids = (
        torch.stack([torch.randperm(used, generator=generator)[:WIDTH] for _ in range(tokens)])
        + EXPERTS
        - used
    )
    ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
    ids = ids.to(DEVICE, torch.int32)
    weights = torch.rand(tokens, WIDTH, generator=generator).to(DEVICE)
    x, scales = fp8_quant.quantize(torch.randn(tokens, HIDDEN, generator=generator).to(DEVICE))
    found = made.experts(x, scales, *w13, *w2, ids, weights, dtype)
    wanted = wanted_of(x.float() * scales.repeat_interleave(128, 1), ids, weights, w13, w2)
    assert found.dtype == dtype and torch.isfinite(found).all()
    assert (found.float() - wanted).norm() <= (1e-2 if DEVICE == "cuda" else 0.12) * wanted.norm()


@pytest.mark.parametrize(("tokens", "used"), [(1, 5), (9, 5), (40, 3)])
def test_masked_rows(masked: DeepGemm, tokens: int, used: int) -> None:
    made = grouped("deep_gemm_masked")
    assert isinstance(made, Masked) and made.pays(tokens, WIDTH, EXPERTS)
    against_a_loop(made, tokens, used)
    assert masked.usual == [-(-tokens * WIDTH // EXPERTS)] * 2


def test_steps_beyond_the_masked_ones_follow_auto(
    masked: DeepGemm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_fp8_masked, "MASKED_TOKENS", 8)
    asked: list[tuple[int, ...]] = []
    made = Masked()
    made._larger_steps = SimpleNamespace(  # type: ignore[assignment]
        pays=lambda *load: asked.append(load), experts=lambda x, *_: asked.append((len(x),))
    )
    assert made.pays(8, 1, 1000) and not asked and not made.pays(9, 2, 3) and asked == [(9, 2, 3)]
    made.experts(torch.empty(9, HIDDEN), *[torch.empty(0)] * 7, torch.float32)
    assert asked == [(9, 2, 3), (9,)] and not masked.usual


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tokens", "used"), [(1, 5), (9, 5), (40, 3)])
def test_packed_rows(cutlass: SglKernel, tokens: int, used: int, dtype: torch.dtype) -> None:
    made = grouped("cutlass")
    assert isinstance(made, CutlassExperts) and made.pays(tokens, WIDTH, EXPERTS)
    against_a_loop(made, tokens, used, dtype)
    assert cutlass.dtypes == [torch.float16 if dtype == torch.float16 else torch.bfloat16] * 2


@pytest.mark.parametrize(
    ("made", "module", "function"),
    [
        (Masked, "deep_gemm", "m_grouped_fp8_gemm_nt_masked"),
        (CutlassExperts, "sgl_kernel", "fp8_blockwise_scaled_grouped_mm"),
    ],
)
def test_a_library_that_cannot_be_used(
    made: Callable[[], Any], module: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(GlowplugError, match=f"{module}.*; leave it out, or install the library"):
        made()
    monkeypatch.setitem(sys.modules, module, SimpleNamespace())
    with pytest.raises(GlowplugError, match=f"{module}: this build has no {function}"):
        made()


@pytest.mark.parametrize("wanted", ["auto", "triton"])
def test_a_provider_runs_only_if_named(wanted: str) -> None:
    made = grouped(wanted)
    assert isinstance(made, Grouped) and not made.pays(1, 1, 256)


@pytest.mark.parametrize(
    ("dtype", "large"), [(torch.float32, False), (torch.bfloat16, True), (torch.float16, True)]
)
def test_providers_of_16_bits_are_not_chosen_for_float32(
    dtype: torch.dtype, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        sys.modules, "deep_gemm", SimpleNamespace(m_grouped_fp8_gemm_nt_contiguous=max)
    )
    worker: Any = SimpleNamespace(dtype=dtype, device=DEVICE)
    assert BlockFp8Cuda(BlockFp8Options(), bare_plan(), worker)._grouped.pays(8192, 8, 256) is large
