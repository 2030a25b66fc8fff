"""Block FP8 as published with DeepSeek-V3 (DeepSeek-AI, 2024, section 3.3).

Weights are E4M3 with one float32 scale per 128x128 block; activations are quantised on the fly with
one scale per token and 128 channels. The last block of a dimension may be ragged (576 rows are four
and a half blocks). ``scale`` always multiplies: value = stored * scale.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from glowplug.kernels.elementwise import cpu_small
from glowplug.kernels.elementwise.activation_reference import silu_and_mul
from glowplug.kernels.elementwise.cpu_small import TINY
from glowplug.kernels.elementwise.norm_reference import rms_norm
from glowplug.kernels.formats.fp8_block import FP8_BLOCK

E4M3_MAX = 448.0
E4M3_SMALLEST_EXPONENT = 2.0**-6  #: smallest normal number; subnormals are 2^-9 apart
EXPONENT_BITS = 0x7F800000  #: exponent mask of a float32
#: factor on a number's power of two; adding and subtracting the result keeps 3 of the 23 mantissa
#: bits of a float32
ROUNDING = 1.5 * 2.0**20


def round_e4m3(x: Tensor) -> Tensor:
    """Round float32 x, |x| <= 448, as a cast to float8_e4m3fn and back: to nearest, ties to even.

    NOTE: torch's CPU casts to and from float8 process one element at a time. Adding and subtracting
    1.5 * 2^20 times a number's power of two keeps exactly its three mantissa bits, in vector
    instructions.
    """
    if x.device.type != "cpu":
        return x.to(torch.float8_e4m3fn).to(torch.float32)
    magic = (x.view(torch.int32) & EXPONENT_BITS).view(torch.float32)
    magic = magic.clamp_(min=E4M3_SMALLEST_EXPONENT).mul_(ROUNDING)
    return (x + magic).sub_(magic)


def _groups(x: Tensor) -> Tensor:
    """Return x [T, K] as float32 [T, ceil(K / 128), 128], zero-padded."""
    ragged = -x.shape[-1] % FP8_BLOCK
    x = F.pad(x.float(), (0, ragged)) if ragged else x.float()
    return x.reshape(x.shape[0], x.shape[1] // FP8_BLOCK, FP8_BLOCK)


def _scales(groups: Tensor) -> Tensor:
    """Return float32 scales [T, G, 1] that map each group's maximum to 448, up to rounding."""
    return groups.abs().amax(-1, keepdim=True).clamp_(min=TINY).div_(E4M3_MAX)


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise x [T, K] to E4M3 [T, K] and float32 scales [T, ceil(K / 128)]."""
    groups = _groups(x)
    scales = _scales(groups)
    stored = (groups / scales).to(torch.float8_e4m3fn)
    return stored.flatten(-2)[..., : x.shape[-1]].contiguous(), scales.squeeze(-1)


def fake_quantize_tokens(x: Tensor) -> Tensor:
    """Return the values that :func:`quantize_tokens` stores for x [T, K], in x's dtype."""
    if cpu_small.is_few(x) and x.shape[1] % FP8_BLOCK == 0:
        return torch.from_numpy(cpu_small.round_into_e4m3(x.numpy().copy()))
    groups = _groups(x)
    scales = _scales(groups)
    values = round_e4m3(groups / scales).mul_(scales).flatten(-2)
    return (values if values.shape[1] == x.shape[1] else values[:, : x.shape[1]]).to(x.dtype)


def rms_norm_rounded(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``fake_quantize_tokens(rms_norm(x, weight, eps))``."""
    if cpu_small.is_few(x) and x.shape[1] % FP8_BLOCK == 0:
        return torch.from_numpy(
            cpu_small.round_into_e4m3(cpu_small.rms_norm(x.numpy(), weight.numpy(), eps))
        )
    return fake_quantize_tokens(rms_norm(x, weight, eps))


def silu_and_mul_rounded(x: Tensor) -> Tensor:
    """Return ``fake_quantize_tokens(silu_and_mul(x))``."""
    if cpu_small.is_few(x) and x.shape[1] % (2 * FP8_BLOCK) == 0:
        return torch.from_numpy(cpu_small.round_into_e4m3(cpu_small.silu_and_mul(x.numpy())))
    return fake_quantize_tokens(silu_and_mul(x))


def _block_index(size: int, offset: int, device: torch.device) -> Tensor:
    """Return the block index of each of the ``size`` positions from ``offset`` on."""
    return (torch.arange(size, device=device) + offset) // FP8_BLOCK


class Blocks(NamedTuple):
    """A block FP8 weight as it is stored. Both tensors may be views, also transposed.

    Attributes:
        values: E4M3 [..., N, K]
        scales: float32 [..., ceil(N / 128), ceil(K / 128)], one per block
    """

    values: Tensor
    scales: Tensor


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise weight [N, K] to E4M3 [N, K] and float32 scales [ceil(N / 128), ceil(K / 128)]."""
    rows, columns = weight.shape
    padded = F.pad(weight.float(), (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    blocks = padded.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))
    scales = blocks.abs().amax((1, 3)).clamp_(min=1e-12).div_(E4M3_MAX)
    stored = (
        (blocks / scales[:, None, :, None]).clamp_(-E4M3_MAX, E4M3_MAX).flatten(2).flatten(0, 1)
    )
    return stored[:rows, :columns].to(torch.float8_e4m3fn), scales


def dequantize_weight(
    stored: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    row_offset: int = 0,
    column_offset: int = 0,
) -> Tensor:
    """Dequantise E4M3 weights to ``dtype``; leading dimensions are batches.

    The tensor may begin inside a block.

    Args:
        stored: E4M3 [..., N, K]
        scales: [..., B, C]
        dtype: dtype of the result
        row_offset: number of rows of the first block that precede the tensor's first row
        column_offset: number of columns of the first block that precede the first column

    Returns:
        [..., N, K]
    """
    rows = _block_index(stored.shape[-2], row_offset, stored.device)
    columns = _block_index(stored.shape[-1], column_offset, stored.device)
    grid = scales.float().index_select(-2, rows)
    return stored.float().mul_(grid.index_select(-1, columns)).to(dtype)


def block_scaled_mm(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """Compute x weight^T of block FP8 operands in plain torch, float32 [T, N].

    Each 128-deep partial sum is scaled and accumulated in float32, as on FP8 tensor cores with
    promotion.

    Args:
        x: E4M3 [T, K]
        x_scales: [T, ceil(K / 128)]
        weight: E4M3 [N, K]
        weight_scales: [ceil(N / 128), ceil(K / 128)], scales of the weight's blocks
    """
    rows = _block_index(weight.shape[0], 0, weight.device)
    total = torch.zeros(x.shape[0], weight.shape[0], device=x.device)
    for block in range(x_scales.shape[1]):
        span = slice(block * FP8_BLOCK, (block + 1) * FP8_BLOCK)
        partial = x[:, span].float() @ weight[:, span].float().t()
        total += partial * x_scales[:, block : block + 1] * weight_scales[rows, block]
    return total
