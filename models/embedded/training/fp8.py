"""Block FP8 as DeepSeek-V3 publishes it: E4M3 weights with one float32 scale per 128x128 block.

`quantize_blocks` returns the stored form. The `fake_*` functions apply the same rounding within a
differentiable forward pass (straight-through gradients).
"""

import torch
from torch import Tensor

from glowplug.models.embedded.training.shape import BLOCK

E4M3_MAX = 448.0  # largest float8_e4m3fn
SCALE_MIN = 1e-12


def _block_scales(weight: Tensor) -> Tensor:
    """Return the scales [..., rows / 128, cols / 128] of a weight [..., rows, cols].

    Raises:
        ValueError: a side is not a multiple of 128.
    """
    rows, cols = weight.shape[-2:]
    if rows % BLOCK or cols % BLOCK:
        raise ValueError(f"weight of {rows}x{cols} cannot be divided into {BLOCK}x{BLOCK} blocks")
    blocks = weight.unflatten(-2, (rows // BLOCK, BLOCK)).unflatten(-1, (cols // BLOCK, BLOCK))
    return blocks.abs().amax(dim=(-3, -1)).float().clamp_min(SCALE_MIN) / E4M3_MAX


def _spread(scales: Tensor) -> Tensor:
    """Repeat each block's scale for every element of the block."""
    return scales.repeat_interleave(BLOCK, dim=-2).repeat_interleave(BLOCK, dim=-1)


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return (E4M3 weight, float32 `weight_scale_inv`); their product is the weight."""
    scales = _block_scales(weight)
    return (weight.float() / _spread(scales)).to(torch.float8_e4m3fn), scales


def dequantize_blocks(weight: Tensor, scales: Tensor) -> Tensor:
    """Return the float32 weight of a pair from `quantize_blocks`."""
    return weight.float() * _spread(scales)


def fake_weight(weight: Tensor) -> Tensor:
    """Round `weight` to block FP8; the gradient is the identity's."""
    rounded = dequantize_blocks(*quantize_blocks(weight.detach())).to(weight.dtype)
    return weight + (rounded - weight).detach()


def fake_activation(x: Tensor) -> Tensor:
    """Round `x` to E4M3, one scale per token and 128 channels; the gradient is the identity's."""
    groups = x.detach().float().unflatten(-1, (x.shape[-1] // BLOCK, BLOCK))
    scale = groups.abs().amax(dim=-1, keepdim=True).clamp_min(SCALE_MIN) / E4M3_MAX
    rounded = ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2).to(x.dtype)
    return x + (rounded - x).detach()
