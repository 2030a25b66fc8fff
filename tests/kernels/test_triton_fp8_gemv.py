"""The product of a single token against the torch reference; ragged sizes, few and many rows a program."""
from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from glowplug.kernels import fp8  # noqa: E402
from glowplug.kernels.triton import fp8_gemm  # noqa: E402
from glowplug.kernels.triton.fp8_gemv import gemv  # noqa: E402

DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
TOLERANCE = 4e-3 if DEVICE == "cuda" else 1e-5


@pytest.mark.parametrize("columns, depth", [(128, 128), (72, 200), (300, 1024), (64, 640)])
@pytest.mark.parametrize("block_n, block_k", [(8, 256), (32, 512)])
def test_gemv(columns: int, depth: int, block_n: int, block_k: int) -> None:
    generator = torch.Generator().manual_seed(columns + depth)
    weight = torch.randn(columns, depth, generator=generator) * torch.randn(1, depth, generator=generator).exp()
    held = [t.to(DEVICE) for t in fp8.quantize_weight(weight)]
    for _ in range(2):
        x, scales = (t.to(DEVICE) for t in fp8.quantize_tokens(torch.randn(1, depth, generator=generator)))
        wanted = fp8.block_scaled_mm(x, scales, *held)
        config = {"BLOCK_N": block_n, "BLOCK_K": block_k, "num_warps": 4}
        found = gemv(x, scales, *held, DTYPE, config)
        assert (found.float() - wanted).abs().max() <= TOLERANCE * wanted.abs().max()
        again = fp8_gemm.gemm(x, scales, *held, DTYPE, {"WAY": "gemv", **config})
        assert torch.equal(again, found)
