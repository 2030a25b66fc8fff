"""Block FP8 as DeepSeek-V3 publishes it: E4M3 weights with one float32 scale per 128x128 block.

`quantize_blocks` makes what the checkpoint stores; the `fake_*` functions give the same rounding
inside a differentiable forward pass (straight-through gradients).
"""

import torch
from torch import Tensor

from glowplug.models.embedded.training.shape import BLOCK

LARGEST = 448.0  # of float8_e4m3fn
SMALLEST_SCALE = 1e-12


def _block_scales(weight: Tensor) -> Tensor:
    """Scales [..., rows / 128, cols / 128] of a weight [..., rows, cols] whose sides are multiples
    of 128.
    """
    rows, cols = weight.shape[-2:]
    if rows % BLOCK or cols % BLOCK:
        raise ValueError(f"weight of {rows}x{cols} is not made of whole {BLOCK}x{BLOCK} blocks")
    blocks = weight.unflatten(-2, (rows // BLOCK, BLOCK)).unflatten(-1, (cols // BLOCK, BLOCK))
    return blocks.abs().amax(dim=(-3, -1)).float().clamp_min(SMALLEST_SCALE) / LARGEST


def _spread(scales: Tensor) -> Tensor:
    """One scale per element from one per block."""
    return scales.repeat_interleave(BLOCK, dim=-2).repeat_interleave(BLOCK, dim=-1)


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(E4M3 weight, float32 `weight_scale_inv`): the weight is their product, block by block."""
    scales = _block_scales(weight)
    return (weight.float() / _spread(scales)).to(torch.float8_e4m3fn), scales


def dequantize_blocks(weight: Tensor, scales: Tensor) -> Tensor:
    """The float32 weight a pair from `quantize_blocks` stands for."""
    return weight.float() * _spread(scales)


def fake_weight(weight: Tensor) -> Tensor:
    """`weight` rounded to block FP8; gradients pass as if it were not."""
    rounded = dequantize_blocks(*quantize_blocks(weight.detach())).to(weight.dtype)
    return weight + (rounded - weight).detach()


def fake_activation(x: Tensor) -> Tensor:
    """`x` rounded to E4M3 per token and group of 128 channels; gradients pass as if it were not."""
    groups = x.detach().float().unflatten(-1, (x.shape[-1] // BLOCK, BLOCK))
    scale = groups.abs().amax(dim=-1, keepdim=True).clamp_min(SMALLEST_SCALE) / LARGEST
    rounded = ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2).to(x.dtype)
    return x + (rounded - x).detach()
