"""The block-scaled GEMM against the torch reference; ragged sizes, both orders, split depth, scales
a row.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from glowplug.kernels.formats import fp8  # noqa: E402
from glowplug.kernels.gemm import fp8 as fp8_gemm  # noqa: E402
from glowplug.kernels.launch import tuned_tables as tuned  # noqa: E402

SMALL = {
    "BLOCK_M": 16,
    "BLOCK_N": 64,
    "SPLIT_K": 1,
    "SWAP": True,
    "TMA": False,
    "num_warps": 4,
    "num_stages": 3,
}
CONFIGS = [
    SMALL,
    {**SMALL, "SWAP": False},
    {**SMALL, "SPLIT_K": 2},
    {**SMALL, "SPLIT_K": 3, "SWAP": False},
    {**SMALL, "TMA": True, "BLOCK_N": 128},
]
#: rows, columns, depth
SHAPES = [(1, 128, 128), (3, 192, 384), (17, 72, 200), (16, 130, 256)]
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
TOLERANCE = 8e-3 if DEVICE == "cuda" else 1e-5


def operands(
    rows: int, columns: int, depth: int, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, depth, generator=generator)
    x *= torch.exp(torch.randn(rows, 1, generator=generator))
    weight = torch.randn(columns, depth, generator=generator)
    weight *= torch.exp(torch.randn(columns, depth, generator=generator))
    stored, x_scales = fp8.quantize_tokens(x)
    x_scales = torch.nn.functional.pad(x_scales.t(), (0, -rows % 4)).contiguous().t()[:rows]
    return tuple(
        t.to(DEVICE) if t.is_contiguous() else t.t().to(DEVICE).t()  # type: ignore[return-value]
        for t in (stored, x_scales, *fp8.quantize_weight(weight))
    )


def close(found: Tensor, wanted: Tensor) -> None:
    assert torch.isfinite(found).all()
    assert (found.float() - wanted).abs().max() <= TOLERANCE * wanted.abs().max()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_products(shape: tuple[int, int, int], config: dict[str, object]) -> None:
    if config["TMA"] and DEVICE == "cpu" and shape[2] % 128:
        pytest.skip("the interpreter has no ragged descriptors")
    x, x_scales, weight, w_scales = operands(*shape, seed=sum(shape))
    wanted = fp8.block_scaled_mm(x, x_scales, weight, w_scales)
    close(fp8_gemm.gemm(x, x_scales, weight, w_scales, DTYPE, config), wanted)
    by_row = w_scales.repeat_interleave(128, 0)[: shape[1]].contiguous()
    close(fp8_gemm.gemm(x, x_scales, weight, by_row, DTYPE, config), wanted)


def test_nearest_rows() -> None:
    table = {1: {"a": 1}, 8: {"a": 8}, 64: {"a": 64}}
    assert [tuned.nearest(table, rows)["a"] for rows in (1, 4, 5, 36, 37, 900)] == [
        1,
        1,
        8,
        64,
        64,
        64,
    ]


def test_few_measured_rows_decide_for_twice_as_many_at_most() -> None:
    table = {1: "few", 32: "more"}
    assert [tuned.near(table, rows) for rows in (1, 16, 17, 64, 65)] == [
        "few",
        "few",
        "more",
        "more",
        None,
    ]
    assert tuned.near({}, 1) is None


def test_the_rule_covers_every_shape() -> None:
    for rows in (1, 7, 16, 33, 64, 65, 5000):
        for columns, depth in ((64, 128), (2112, 7168), (36864, 7168), (7168, 16384)):
            rule = fp8_gemm.fp8_gemm_rule(rows, columns, depth)
            assert rule["BLOCK_N"] <= 128 and rule["SPLIT_K"] <= depth // 128
            assert rule["BLOCK_M"] >= 16


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 16, 33, 64, 65, 300])
@pytest.mark.parametrize("columns, depth", [(2112, 7168), (576, 512), (128, 16384), (1000, 1000)])
def test_the_rule_multiplies(rows: int, columns: int, depth: int) -> None:
    for seed in (0, 1):
        x, x_scales, weight, w_scales = operands(rows, columns, depth, seed)
        wanted = fp8.block_scaled_mm(x, x_scales, weight, w_scales)
        close(fp8_gemm.gemm(x, x_scales, weight, w_scales, torch.bfloat16), wanted)
