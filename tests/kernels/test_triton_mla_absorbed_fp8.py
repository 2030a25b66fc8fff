"""Absorbed GEMMs with weights that stay in block FP8: in the interpreter, or on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from glowplug.kernels.formats import fp8
from glowplug.kernels.formats.fp8 import Blocks
from glowplug.kernels.mla import absorbed_fp8 as kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def stored(heads: int, nope: int, value: int, lora: int, seed: int) -> tuple[Blocks, Blocks]:
    """Return W_UK [H, N, C] and W_UV [H, C, V] as views of a checkpoint's tensors, with scales that
    differ much.
    """
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(heads * (nope + value), lora, generator=generator) * lora**-0.5
    values, scales = fp8.quantize_weight(weight)
    scales *= torch.rand(scales.shape, generator=generator) * 4 + 0.1
    values = values.to(DEVICE).view(heads, nope + value, lora)
    scales = scales.to(DEVICE).view(heads, (nope + value) // 128, lora // 128)
    blocks = nope // 128
    return (
        Blocks(values[:, :nope], scales[:, :blocks]),
        Blocks(values[:, nope:].transpose(1, 2), scales[:, blocks:].transpose(1, 2)),
    )


def product(x: Tensor, weight: Blocks) -> Tensor:
    """Multiply in float64."""
    dense = fp8.dequantize_weight(weight.values, weight.scales, torch.float64)
    return torch.einsum("thk,hkn->thn", x.double(), dense)


def check(
    tokens: int,
    heads: int,
    nope: int,
    value: int,
    lora: int,
    width: int,
    dtype: torch.dtype,
    error: float,
) -> None:
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)
        for weight in stored(heads, nope, value, lora, seed):
            size, columns = weight.values.shape[1:]
            wide = torch.randn(tokens, heads, size + 7, generator=generator).to(DEVICE, dtype)
            x, out = wide[..., :size], wide.new_full((tokens, heads, columns + 3), float("nan"))
            kernel.multiply(x, weight, out[..., :columns], width)
            want = product(x, weight)
            torch.testing.assert_close(
                out[..., :columns].double(),
                want,
                rtol=error,
                atol=error * float(want.abs().max() if tokens else 1),
            )
            assert out[..., columns:].isnan().all(), "nothing after the result is written"


@pytest.mark.parametrize("tokens,heads", [(1, 1), (2, 3), (17, 2), (0, 2)])
def test_products(tokens: int, heads: int) -> None:
    check(tokens, heads, 128, 128, 256, 64, torch.float32, 1e-5)


def test_other_sizes() -> None:
    check(3, 1, 256, 128, 128, 128, torch.float32, 1e-5)
    check(5, 2, 128, 256, 384, 32, torch.float32, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 7, 16, 33, 64])
@pytest.mark.parametrize("heads,width", [(3, 32), (16, 64), (128, 128)])
def test_bfloat16_at_published_sizes(tokens: int, heads: int, width: int) -> None:
    check(tokens, heads, 128, 128, 512, width, torch.bfloat16, 1e-2)
