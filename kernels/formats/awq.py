"""Int4 weights in AWQ's published layout (Lin et al., 2023; AutoAWQ "gemm"), and the layout that
kernels here read.

Published: ``qweight`` int32 [K, N / 8], eight neighbouring columns a word, column 8 c + ORDER[i] in
bits 4 i; ``qzeros`` int32 [K / g, N / 8] packed alike; ``scales`` [K / g, N]. value = (q - z) *
scale, one z and one scale for g inputs.

Ours: ``packed`` int16 [ceil(K / 128), N, 32]: input 128 b + 32 i + j of output n in bits 4 i of
word [b, n, j], so that a tile of outputs is one run of bytes, and each shift yields 32 neighbouring
inputs. ``factors`` int32 [G, N]: a group's scale as float16 in the lower half, and in the upper
half OFFSET + z in the compute dtype (float32: z as a whole number), which is what a number z
becomes whose bits are put into the mantissa of OFFSET.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  #: column of a word in bits 4 i
PACK = 8  #: numbers an int32 holds
BLOCK = 128  #: inputs of a packed block
PLANE = 32  #: neighbouring inputs that one shift yields
PLANES = 4
#: added to zeros; numbers below 16 lie on the grid of the dtype from there on
OFFSET: Mapping[torch.dtype, float] = {
    torch.float32: 0.0,
    torch.bfloat16: 128.0,
    torch.float16: 1024.0,
}


def unpack(words: Tensor) -> Tensor:
    """int32 [R, N / 8] in AWQ's order -> uint8 [R, N], 0 to 15."""
    out = torch.empty(*words.shape, PACK, dtype=torch.uint8, device=words.device)
    for nibble, column in enumerate(ORDER):
        out[..., column] = (words >> 4 * nibble).bitwise_and_(15)
    return out.flatten(-2)


def pack_blocks(numbers: Tensor) -> Tensor:
    """uint8 [N, K], 0 to 15 -> packed int16 [ceil(K / 128), N, 32]; what lies behind K is 0."""
    padded = (
        F.pad(numbers, (0, -numbers.shape[1] % BLOCK)).int().view(len(numbers), -1, PLANES, PLANE)
    )
    words = padded[:, :, 0]
    for plane in range(1, PLANES):
        words = words | padded[:, :, plane] << 4 * plane
    return (
        torch.where(words > 0x7FFF, words - 0x10000, words)
        .to(torch.int16)
        .transpose(0, 1)
        .contiguous()
    )


def unpack_blocks(packed: Tensor, depth: int) -> Tensor:
    """packed int16 [B, N, 32] -> uint8 [N, depth]."""
    planes = [(packed.int() >> 4 * plane).bitwise_and_(15) for plane in range(PLANES)]
    return torch.stack(planes, 2).transpose(0, 1).flatten(1)[:, :depth].to(torch.uint8)


def dequantize_published(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, group: int, first: int = 0
) -> Tensor:
    """float32 [N, K] of words in the published layout, whose first input is number ``first`` of the
    first group.
    """
    groups = (torch.arange(qweight.shape[0], device=qweight.device) + first) // group
    centred = unpack(qweight).float().sub_(unpack(qzeros).float().index_select(0, groups))
    return centred.mul_(scales.float().index_select(0, groups)).t()


def pack_factors(scales: Tensor, zeros: Tensor, dtype: torch.dtype) -> Tensor:
    """scales and zeros (0 to 15) [G, N] -> factors int32 [G, N] for products in ``dtype``."""
    if dtype is torch.float32:
        upper = zeros.to(torch.int32)
    else:
        upper = (zeros.to(dtype) + OFFSET[dtype]).view(torch.int16).int()
    return (scales.half().view(torch.int16).int() & 0xFFFF) | upper << 16


def unpack_factors(factors: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """float32 scales and zeros [G, N] of ``pack_factors``."""
    scales = (factors & 0xFFFF).short().view(torch.float16)
    upper = factors >> 16
    zeros = upper if dtype is torch.float32 else upper.short().view(dtype) - OFFSET[dtype]
    return scales.float(), zeros.float()


def dequantize(
    packed: Tensor,
    factors: Tensor,
    depth: int,
    group: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """[N, depth] in ``out_dtype`` (or ``dtype``) of our layout for products in ``dtype``."""
    groups = torch.arange(depth, device=packed.device) // group
    scales, zeros = unpack_factors(factors, dtype)
    centred = unpack_blocks(packed, depth).float().t() - zeros.index_select(0, groups)
    return centred.mul_(scales.index_select(0, groups)).t().to(out_dtype or dtype)
