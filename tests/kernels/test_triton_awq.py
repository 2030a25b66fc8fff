"""Int4 kernels against float32 results with the dequantised weight: odd sizes, groups, poisoned
outputs, absent experts.

Both half dtypes on a GPU; without one the kernels are interpreted in float32, where only the
unpacking differs.
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

from glowplug.kernels.elementwise.activation_reference import silu_and_mul  # noqa: E402
from glowplug.kernels.formats import awq  # noqa: E402
from glowplug.kernels.gemm import int4_awq as awq_gemm  # noqa: E402
from glowplug.kernels.moe.narrow import int4_awq as moe_gemm_awq  # noqa: E402
from tests.support.slow_cases import some_slow_rows  # noqa: E402

DTYPES = [torch.bfloat16, torch.float16] if DEVICE == "cuda" else [torch.float32]
EXACT = 4e-3 if DEVICE == "cuda" else 1e-5  #: error of rounding the result to 16 bits


def near(found: Tensor, wanted: Tensor, tolerance: float = EXACT) -> None:
    assert torch.isfinite(found).all()
    assert (found.float() - wanted).norm() <= tolerance * wanted.norm() + 1e-12


class Weight:
    """A random weight of ``count`` experts in our layout, and its values, float32 [E, N, K]."""

    def __init__(
        self, count: int, columns: int, depth: int, group: int, dtype: torch.dtype, seed: int = 1
    ) -> None:
        generator = torch.Generator().manual_seed(seed + columns)
        groups = -(-depth // group)
        stored = torch.randint(
            0, 16, (count, columns, depth), generator=generator, dtype=torch.uint8
        )
        zeros = torch.randint(0, 16, (count, groups, columns), generator=generator).float()
        scales = (torch.rand(count, groups, columns, generator=generator) + 0.5) / (6 * depth**0.5)
        self.packed = torch.stack([awq.pack_blocks(each) for each in stored]).to(DEVICE)
        self.factors = awq.pack_factors(scales, zeros, dtype).to(DEVICE)
        self.group, self.depth = group, depth
        self.dense = torch.stack(
            [
                awq.dequantize(*each, depth, group, dtype, torch.float32)
                for each in zip(self.packed, self.factors)
            ]
        )

    @property
    def experts(self) -> moe_gemm_awq.Weights:
        return moe_gemm_awq.Weights(self.packed, self.factors, self.group, self.depth)

    def linear(self, x: Tensor, bias: Tensor | None = None, config: Any = None) -> Tensor:
        return awq_gemm.gemm(x, self.packed[0], self.factors[0], self.group, bias, config)


def randn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


TILE = {"BLOCK_M": 16, "BLOCK_N": 64, "SPLIT_K": 1, "num_warps": 4, "STAGES": 2}
CONFIGS = {
    "rule": None,
    "wide": {**TILE, "BLOCK_M": 32, "BLOCK_N": 128},
    "parts": {**TILE, "SPLIT_K": 3},
}
SHAPES = [
    (1, 128, 256, 128),
    (5, 72, 384, 128),
    (17, 136, 192, 64),
    (3, 64, 96, 32),
    (2, 64, 448, 448),
    (4, 8, 640, 640),
    (33, 64, 32, 32),
    (1, 64, 512, 256),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("tokens", "columns", "depth", "group"), SHAPES)
def test_product(
    tokens: int, columns: int, depth: int, group: int, config: str, dtype: torch.dtype
) -> None:
    for seed in (1, 2):
        weight = Weight(1, columns, depth, group, dtype, seed)
        x = randn(tokens, 2 * depth, seed=seed, dtype=dtype)[:, :depth]
        bias = randn(columns, seed=seed, dtype=dtype) if columns == 72 else None
        wanted = x.float() @ weight.dense[0].t() + (0 if bias is None else bias.float())
        found = weight.linear(x, bias, CONFIGS[config])
        assert found.dtype == dtype and found.shape == (tokens, columns)
        near(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("columns", "depth", "group"), [(72, 256, 128), (8, 96, 32), (136, 192, 64), (64, 200, 200)]
)
def test_dequantised(columns: int, depth: int, group: int, dtype: torch.dtype) -> None:
    weight = Weight(1, columns, depth, group, dtype)
    found = awq_gemm.dequantize(weight.packed[0], weight.factors[0], depth, group, dtype)
    assert torch.equal(found, weight.dense[0].to(dtype))


class Case:
    def __init__(
        self,
        tokens: int,
        experts: int,
        hidden: int,
        inter: int,
        group: int,
        absent: bool,
        dtype: torch.dtype,
        per_token: int = 3,
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
        self.x = torch.randn(tokens, hidden, generator=generator).to(DEVICE, dtype)
        self.w13 = Weight(experts, 2 * inter, hidden, min(group, hidden), dtype)
        self.w2 = Weight(experts, hidden, inter, min(group, inter), dtype)

    def wanted(self) -> Tensor:
        out = torch.zeros(self.x.shape, device=DEVICE)
        for expert in range(len(self.w13.packed)):
            token, slot = (self.ids == expert).nonzero(as_tuple=True)
            inner = (
                silu_and_mul(self.x[token].float() @ self.w13.dense[expert].t())
                .to(self.x.dtype)
                .float()
            )
            out.index_add_(
                0, token, inner @ self.w2.dense[expert].t() * self.weights[token, slot, None]
            )
        return out

    def run(self, config: Any = None) -> Tensor:
        return moe_gemm_awq.experts(
            self.x, self.w13.experts, self.w2.experts, self.ids, self.weights, config
        )


EACH = {"dense": 0, "block_m": 16, "block_n": 32, "warps": 4, "stages": 2}
WAYS = {
    "rule": None,
    "sorted": {"up": EACH, "down": {**EACH, "block_n": 64}},
    "dense": {"up": {**EACH, "dense": 1}, "down": {**EACH, "dense": 1}},
}


#: (way, tokens, absent, group)
CASES = [
    (way, *case)
    for way in WAYS
    for case in ((1, False, 128), (7, True, 32), (16, False, 64), (19, True, 192))
]
SLOW = [(way, 7, True, 32) for way in ("rule", "sorted")]  #: 7 to 12 s each in the interpreter
SLOW += [("dense", 19, True, 192), ("dense", 1, False, 128)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("way", "tokens", "absent", "group"), some_slow_rows(CASES, SLOW))
def test_experts(tokens: int, absent: bool, group: int, way: str, dtype: torch.dtype) -> None:
    case = Case(tokens, 5, 192, 64, group, absent, dtype)
    near(case.run(WAYS[way]), case.wanted(), 2 * EXACT)
    if absent:
        assert not case.run(WAYS[way])[0].any()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
@pytest.mark.parametrize("tokens", [1, 4, 32, 300])
def test_large(tokens: int) -> None:
    """V2-Lite's shapes are captured and replayed with other inputs."""
    for columns, depth, group in (
        (2048, 2048, 128),
        (10944, 2048, 128),
        (2048, 10944, 64),
        (576, 2048, 128),
    ):
        weight = Weight(1, columns, depth, group, torch.bfloat16)
        x = randn(tokens, depth, seed=1, dtype=torch.bfloat16)
        weight.linear(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = weight.linear(x)
        for seed in (3, 4):
            x.copy_(randn(tokens, depth, seed=seed, dtype=torch.bfloat16))
            out.fill_(float("nan"))
            graph.replay()
            near(out, x.float() @ weight.dense[0].t())


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
@pytest.mark.parametrize("tokens", [1, 8, 33, 200, 2000])
def test_large_experts(tokens: int) -> None:
    case = Case(tokens, 16, 2048, 1408, 128, False, torch.bfloat16, per_token=6)
    near(case.run(), case.wanted(), 2 * EXACT)
