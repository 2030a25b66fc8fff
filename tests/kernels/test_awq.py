"""Int4 layouts: AutoAWQ's published one, written here once more from its code, and ours."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from glowplug.kernels.formats import awq


def published(numbers: Tensor) -> Tensor:
    """Pack uint8 [R, N] into int32 [R, N / 8] as AutoAWQ's WQLinear_GEMM.from_linear does, a column
    at a time.
    """
    words = torch.zeros(numbers.shape[0], numbers.shape[1] // 8, dtype=torch.int32)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    for column in range(numbers.shape[1] // 8):
        for i in range(8):
            words[:, column] |= numbers[:, column * 8 + order[i]].to(torch.int32) << (i * 4)
    return words


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randint(
        0, 16, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
    )


def test_published_words() -> None:
    wanted = numbers(5, 24, seed=1)
    assert torch.equal(awq.unpack(published(wanted)), wanted)
    # the word of columns 0 to 7 holding their own numbers: 7 5 3 1 6 4 2 0 from the top
    assert int(published(torch.arange(8, dtype=torch.uint8)[None])[0, 0]) == 0x75316420


@pytest.mark.parametrize(("outputs", "inputs"), [(8, 128), (24, 320), (16, 32), (8, 100)])
def test_our_blocks(outputs: int, inputs: int) -> None:
    wanted = numbers(outputs, inputs, seed=inputs)
    packed = awq.pack_blocks(wanted)
    assert packed.dtype == torch.int16 and packed.shape == (-(-inputs // 128), outputs, 32)
    assert torch.equal(awq.unpack_blocks(packed, inputs), wanted)
    assert int(packed[0, 3, 1]) & 15 == int(wanted[3, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [32, 64, 128, 320])
def test_both_layouts_hold_the_same_weight(group: int, dtype: torch.dtype) -> None:
    inputs, outputs = 320 if group == 320 else 384, 16
    stored, zeros = numbers(inputs, outputs, seed=1), numbers(inputs // group, outputs, seed=2)
    scales = torch.rand(inputs // group, outputs).half()
    wanted = torch.empty(outputs, inputs)
    for k in range(inputs):
        wanted[:, k] = (stored[k].float() - zeros[k // group].float()) * scales[k // group].float()
    assert torch.equal(
        awq.dequantize_published(published(stored), published(zeros), scales, group), wanted
    )
    factors = awq.pack_factors(scales, zeros, dtype)
    assert torch.equal(awq.unpack_factors(factors, dtype)[1], zeros.float())
    ours = awq.dequantize(awq.pack_blocks(stored.t()), factors, inputs, group, dtype, torch.float32)
    assert torch.equal(ours, wanted)
