"""Block FP8 against torch's own casts and float64 products; ragged shapes, ties, subnormals,
zeros.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from glowplug.kernels.elementwise import cpu_small as few
from glowplug.kernels.formats import fp8

SHAPES = [(1, 128), (1, 256), (3, 192), (5, 72), (40, 576), (2, 1)]


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.exp(
        torch.randn(shape[0], 1, generator=generator) * 3
    )


def test_rounding_is_the_cast_s_for_every_code_and_every_tie() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[torch.isfinite(codes)].unique()
    ties = (codes[1:] + codes[:-1]) / 2
    beside = torch.cat([torch.nextafter(ties, torch.tensor(sign * torch.inf)) for sign in (1, -1)])
    tiny = torch.tensor([0.0, -0.0, 2.0**-10, 2.0**-11, 1e-30, 3 * 2.0**-10])
    drawn = (torch.rand(4000, generator=torch.Generator().manual_seed(0)) - 0.5) * 896
    values = torch.cat([codes, ties, beside, tiny, drawn])
    assert torch.equal(fp8.round_e4m3(values), values.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens(shape: tuple[int, int]) -> None:
    for seed in (0, 1):
        x = draw(shape, seed)
        stored, scales = fp8.quantize_tokens(x)
        assert stored.dtype == torch.float8_e4m3fn and stored.shape == x.shape
        assert scales.shape == (shape[0], -(-shape[1] // 128))
        wide = scales.repeat_interleave(128, 1)[:, : shape[1]]
        values = stored.float() * wide
        assert torch.equal(fp8.fake_quantize_tokens(x), values)
        assert (
            (values - x).abs() <= torch.maximum(x.abs() / 15.9, wide * 2.0**-10)
        ).all()  # half a step
        assert torch.isfinite(values).all()


def test_a_token_of_zeros_stays_zero() -> None:
    x = torch.zeros(2, 200)
    x[1, 5] = 3.0
    assert torch.equal(fp8.fake_quantize_tokens(x), x)
    assert fp8.fake_quantize_tokens(x.bfloat16()).dtype == torch.bfloat16


def test_few_and_many_tokens_round_alike() -> None:
    x = draw((128, 256), 5)
    x[3] = 0.0
    assert x.numel() > few.FEW_ELEMENTS_MAX
    whole = fp8.fake_quantize_tokens(x)
    assert torch.equal(whole, torch.cat([fp8.fake_quantize_tokens(row) for row in x.split(1)]))
    strided = torch.cat([x, x], dim=1)[:5, 128:384]
    assert torch.equal(
        fp8.fake_quantize_tokens(strided), fp8.fake_quantize_tokens(strided.contiguous())
    )


@pytest.mark.parametrize("shape", [(128, 128), (576, 192), (1, 1), (300, 72), (129, 257)])
def test_weights_round_trip(shape: tuple[int, int]) -> None:
    weight = draw(shape, 2)
    stored, scales = fp8.quantize_weight(weight)
    assert scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    values = fp8.dequantize_weight(stored, scales, torch.float32)
    for row in range(0, shape[0], 50):
        for column in range(0, shape[1], 50):
            scale = scales[row // 128, column // 128]
            assert values[row, column] == stored[row, column].float() * scale
            error = abs(float(values[row, column] - weight[row, column]))
            assert error <= max(abs(float(weight[row, column])) / 15.9, float(scale) * 2.0**-10)


def test_dequantize_a_slice_that_begins_inside_a_block() -> None:
    stored, scales = fp8.quantize_weight(draw((576, 512), 3))
    whole = fp8.dequantize_weight(stored, scales, torch.float32)
    part = fp8.dequantize_weight(
        stored[200:500, 130:140], scales[1:4, 1:2], torch.float32, 200 - 128, 2
    )
    assert torch.equal(part, whole[200:500, 130:140])


def test_dequantize_experts_at_once() -> None:
    pairs = [fp8.quantize_weight(draw((192, 130), seed)) for seed in range(3)]
    batch = fp8.dequantize_weight(
        torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs]), torch.float32
    )
    for index, (stored, scales) in enumerate(pairs):
        assert torch.equal(batch[index], fp8.dequantize_weight(stored, scales, torch.float32))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [128, 576, 7])
def test_block_scaled_product(shape: tuple[int, int], rows: int) -> None:
    """The reference GEMM, the product of dequantised matrices, and float64 agree."""
    x, weight = draw(shape, 6), draw((rows, shape[1]), 7)
    stored, scales = fp8.quantize_tokens(x)
    held, blocks = fp8.quantize_weight(weight)
    got = fp8.block_scaled_mm(stored, scales, held, blocks)
    values = fp8.fake_quantize_tokens(x)
    dense = fp8.dequantize_weight(held, blocks, torch.float32)
    exact = values.double() @ dense.double().t()
    limit = float((values.double().abs() @ dense.double().abs().t()).max()) * 1e-6
    torch.testing.assert_close(got.double(), exact, atol=limit, rtol=0)
    torch.testing.assert_close((values @ dense.t()).double(), exact, atol=limit, rtol=0)
