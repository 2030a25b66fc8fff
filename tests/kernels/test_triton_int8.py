"""Int8 kernels against integer and float32 references: odd sizes, poisoned outputs, changed inputs,
absent experts.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from glowplug.core.layers.linear import both_formats  # noqa: E402
from glowplug.core.protocols import Parts  # noqa: E402
from glowplug.kernels.elementwise.activation_reference import silu_and_mul  # noqa: E402
from glowplug.kernels.elementwise.norm_reference import rms_norm_reference  # noqa: E402
from glowplug.kernels.formats import int8, int8_triton as int8_quant  # noqa: E402
from glowplug.kernels.gemm import int8 as int8_gemm  # noqa: E402
from glowplug.kernels.moe.narrow import int8 as moe_gemm_int8  # noqa: E402
from glowplug.plugins.ops.triton_int8 import INT8, PRODUCERS  # noqa: E402

DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
EXACT = 4e-3 if DEVICE == "cuda" else 1e-6  #: error of rounding the result to DTYPE


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def near(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert torch.isfinite(found.float()).all()
    assert (found.float() - wanted).norm() <= tolerance * wanted.norm() + 1e-12


def codes(found: tuple[Tensor, Tensor], wanted: Tensor) -> None:
    """Check that ``found`` are the codes of float32 ``wanted``; a value beside a boundary may round
    either way.
    """
    values, scales = found
    stored, factors = int8.quantize_tokens(wanted)
    torch.testing.assert_close(scales, factors, rtol=1e-5, atol=0)
    apart = (values.int() - stored.int()).abs()
    assert int(apart.max()) <= 1 and int((apart > 0).sum()) <= 2 + 2e-3 * apart.numel()


@pytest.mark.parametrize(("tokens", "size"), [(1, 1), (3, 72), (5, 576), (2, 2048), (1, 7168)])
def test_activations_are_quantised(tokens: int, size: int) -> None:
    x = (randn(tokens, size, seed=size) * 3).to(DTYPE)
    codes(int8_quant.quantize(x), x.float())
    strided = (randn(tokens, 2 * size + 3, seed=size + 1)).to(DTYPE)[:, 1 : size + 1]
    codes(int8_quant.quantize(strided), strided.float())
    both = randn(tokens, 2 * size, seed=size + 2).to(DTYPE)
    codes(int8_quant.silu_and_mul(both), silu_and_mul(both.float()))
    gain, residual = (
        randn(size, seed=size + 3).to(DTYPE),
        randn(tokens, size, seed=size + 4).to(DTYPE),
    )
    wanted = rms_norm_reference(x.float(), gain.float(), 1e-6)
    plain = torch.full_like(x, float("nan"))
    codes(int8_quant.rms_norm(x, gain, 1e-6, plain), wanted)
    near(plain, wanted, EXACT)
    found, total = int8_quant.add_rms_norm(x, residual, gain, 1e-6, plain)
    assert torch.equal(total, x + residual)
    codes(found, rms_norm_reference(total.float(), gain.float(), 1e-6))


@pytest.mark.parametrize("both", [False, True])
def test_a_sum_of_float32_parts_leaves_the_residual_its_dtype(both: bool) -> None:
    """Parts of a dense GEMM, whose ids are one row, come before layers in int8."""
    rows, residual = randn(5 * 4, 72, seed=1), randn(5, 72, seed=2).half()
    parts = Parts(rows, torch.zeros(1, 4, dtype=torch.int32, device=DEVICE).expand(5, 4))
    producer = PRODUCERS["add_rms_norm", both_formats(INT8) if both else INT8]
    found, total = producer(parts, residual, torch.ones(72, device=DEVICE).half(), 1e-6)
    assert total.dtype is residual.dtype
    near(total, rows.view(5, 4, 72).sum(1) + residual, 1e-3)
    cast = found.cast if both else found
    codes(
        (cast.values, cast.scales),
        rms_norm_reference(total.float(), torch.ones(72, device=DEVICE), 1e-6),
    )
    assert not both or found.plain.dtype is residual.dtype


def test_zeros_and_no_tokens() -> None:
    values, scales = int8_quant.quantize(torch.zeros(2, 96, dtype=DTYPE, device=DEVICE))
    assert not values.any() and torch.isfinite(scales).all()
    assert int8_quant.quantize(torch.zeros(0, 96, dtype=DTYPE, device=DEVICE))[0].shape == (0, 96)
    empty = torch.empty(0, 64, dtype=torch.int8, device=DEVICE)
    weight = torch.ones(32, 64, dtype=torch.int8, device=DEVICE)
    assert int8_gemm.gemm(
        empty, scales[:0], weight, torch.ones(32, device=DEVICE), DTYPE
    ).shape == (0, 32)


WIDE = {
    "BLOCK_M": 32,
    "BLOCK_N": 64,
    "BLOCK_K": 64,
    "SPLIT_K": 1,
    "SWAP": False,
    "num_warps": 4,
    "num_stages": 2,
}
PARTS = {**WIDE, "BLOCK_M": 16, "SPLIT_K": 3, "SWAP": True}
SHAPES = [(1, 128, 256), (5, 576, 192), (17, 130, 72), (33, 64, 64)]


@pytest.mark.parametrize("config", [None, WIDE, PARTS], ids=["rule", "wide", "parts"])
@pytest.mark.parametrize(("tokens", "columns", "depth"), SHAPES)
def test_product(tokens: int, columns: int, depth: int, config: Any) -> None:
    for seed in (1, 2):
        x, x_scales = int8.quantize_tokens(randn(tokens, depth, seed=seed))
        weight, scales = int8.quantize_weight(randn(columns, depth, seed=seed + 10))
        bias = randn(columns, seed=seed + 20).to(DTYPE) if columns != 130 else None
        wanted = int8.scaled_mm(x, x_scales, weight, scales) + (0 if bias is None else bias.float())
        found = int8_gemm.gemm(x, x_scales, weight, scales, DTYPE, bias, config)
        assert found.dtype == DTYPE and found.shape == (tokens, columns)
        near(found, wanted, EXACT)


class Case:
    """Random experts in int8 and their inputs; some ids are of experts elsewhere."""

    def __init__(
        self, tokens: int, per_token: int, experts: int, hidden: int, inter: int, absent: bool
    ) -> None:
        generator = torch.Generator().manual_seed(tokens + experts)
        self.ids = torch.stack(
            [torch.randperm(experts, generator=generator)[:per_token] for _ in range(tokens)]
        )
        if absent:
            self.ids[:, 0] = -1
            self.ids[0] = -1
        self.ids = self.ids.to(torch.int32).to(DEVICE)
        self.weights = torch.rand(tokens, per_token, generator=generator).to(DEVICE)
        self.x = torch.randn(tokens, hidden, generator=generator).to(DEVICE, DTYPE)
        w13 = torch.randn(experts, 2 * inter, hidden, generator=generator) / hidden**0.5
        w2 = torch.randn(experts, hidden, inter, generator=generator) / inter**0.5
        (self.w13, self.scales13), (self.w2, self.scales2) = self._stored(w13), self._stored(w2)

    @staticmethod
    def _stored(weight: Tensor) -> tuple[Tensor, Tensor]:
        stored, scales = int8.quantize_weight(weight.flatten(0, 1).to(DEVICE))
        return stored.view(weight.shape), scales.view(weight.shape[:2])

    def wanted(self) -> Tensor:
        rounded = int8.fake_quantize_tokens(self.x.float())
        out = torch.zeros(rounded.shape, device=DEVICE)
        for expert in range(len(self.w13)):
            token, slot = (self.ids == expert).nonzero(as_tuple=True)
            w13 = int8.dequantize(self.w13[expert], self.scales13[expert], torch.float32)
            w2 = int8.dequantize(self.w2[expert], self.scales2[expert], torch.float32)
            inner = silu_and_mul(rounded[token] @ w13.t()).to(DTYPE).float()
            out.index_add_(
                0,
                token,
                int8.fake_quantize_tokens(inner) @ w2.t() * self.weights[token, slot, None],
            )
        return out

    def run(self, config: Any) -> Tensor:
        return moe_gemm_int8.experts(
            *int8_quant.quantize(self.x),
            self.w13,
            self.scales13,
            self.w2,
            self.scales2,
            self.ids,
            self.weights,
            DTYPE,
            config,
        )


TILE = {"dense": 0, "block_m": 16, "block_n": 32, "block_k": 64, "warps": 4, "stages": 2, "swap": 1}
WAYS = {
    "rule": None,
    "sorted": {"up": TILE, "down": {**TILE, "swap": 0}},
    "dense": {"up": {**TILE, "dense": 1}, "down": {**TILE, "dense": 1}},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("tokens", "absent"), [(1, False), (7, True), (16, False), (19, True)])
def test_experts(tokens: int, absent: bool, way: str) -> None:
    case = Case(tokens, 3, 5, 96, 40, absent)
    wanted = case.wanted()
    near(case.run(WAYS[way]), wanted, 1.5e-2)
    if absent:
        assert not case.run(WAYS[way])[0].any()
    again = Case(tokens, 3, 6, 96, 40, not absent)
    near(again.run(WAYS[way]), again.wanted(), 1.5e-2)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
@pytest.mark.parametrize("tokens", [1, 4, 32, 300, 1024])
def test_large(tokens: int) -> None:
    """V2-Lite's shapes are captured and replayed with other inputs."""
    for columns, depth in ((2048, 2048), (10944, 2048), (2048, 10944), (576, 2048), (3648, 2048)):
        x = randn(tokens, depth, seed=1).to(DTYPE)
        weight, scales = int8.quantize_weight(randn(columns, depth, seed=2) / depth**0.5)

        def step(x: Tensor = x, weight: Tensor = weight, scales: Tensor = scales) -> Tensor:
            return int8_gemm.gemm(*int8_quant.quantize(x), weight, scales, DTYPE)

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        for seed in (3, 4):
            x.copy_(randn(tokens, depth, seed=seed))
            out.fill_(float("nan"))
            graph.replay()
            near(out, int8.scaled_mm(*int8.quantize_tokens(x), weight, scales), EXACT)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
@pytest.mark.parametrize("tokens", [1, 8, 33, 200, 2000])
def test_large_experts(tokens: int) -> None:
    case = Case(tokens, 6, 64, 2048, 1408, False)
    near(case.run(None), case.wanted(), 1.5e-2)
