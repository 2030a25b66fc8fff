"""Int4 weights in two layouts: AWQ's published one and the one that the int4 kernels read.

Published (Lin et al., 2023; AutoAWQ "gemm"): ``qweight`` int32 [K, N / 8] holds eight neighbouring
columns per word: bits 4 i to 4 i + 3 of word c hold column 8 c + ORDER[i]. ``qzeros`` int32
[K / g, N / 8] is packed in the same way; ``scales`` is [K / g, N]. value = (q - z) * scale, with
one z and one scale for g inputs.

Ours: ``packed`` int16 [ceil(K / 128), N, 32] holds input 128 b + 32 i + j of output n in bits 4 i
of word [b, n, j], so that a tile of outputs is one contiguous run of bytes, and each shift yields
32 neighbouring inputs. ``factors`` int32 [G, N] holds the scale of a group as float16 in the lower
half and OFFSET + z in the compute dtype in the upper half (float32: z as an integer). If the bits
of a number q are put into the mantissa of OFFSET, they read OFFSET + q, so the subtraction of the
upper half yields q - z.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  #: by i: the column that bits 4 i to 4 i + 3 of a word hold
PACK = 8  #: numbers per int32
PACKED_INPUTS = 128  #: inputs per packed block
PLANE = 32  #: neighbouring inputs that one shift yields: a plane
PLANES = 4  #: planes per packed block
#: number added to zeros; the dtype represents OFFSET + q exactly for q below 16
OFFSET: Mapping[torch.dtype, float] = {
    torch.float32: 0.0,
    torch.bfloat16: 128.0,
    torch.float16: 1024.0,
}


def unpack(words: Tensor) -> Tensor:
    """Unpack int32 [R, N / 8] in AWQ's order to uint8 [R, N] with values 0 to 15."""
    out = torch.empty(*words.shape, PACK, dtype=torch.uint8, device=words.device)
    for nibble, column in enumerate(ORDER):
        out[..., column] = (words >> 4 * nibble).bitwise_and_(15)
    return out.flatten(-2)


def pack_blocks(numbers: Tensor) -> Tensor:
    """Pack uint8 [N, K] with values 0 to 15 to int16 [ceil(K / 128), N, 32], zero-padded."""
    padded = (
        F.pad(numbers, (0, -numbers.shape[1] % PACKED_INPUTS))
        .int()
        .view(len(numbers), -1, PLANES, PLANE)
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
    """Unpack int16 [ceil(depth / 128), N, 32] to uint8 [N, depth] with values 0 to 15."""
    planes = [(packed.int() >> 4 * plane).bitwise_and_(15) for plane in range(PLANES)]
    return torch.stack(planes, 2).transpose(0, 1).flatten(1)[:, :depth].to(torch.uint8)


def dequantize_published(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, group: int, first: int = 0
) -> Tensor:
    """Dequantise a weight in AWQ's published layout to float32 [N, K].

    Args:
        qweight: int32 [K, N / 8]
        qzeros: int32 [groups, N / 8]
        scales: [groups, N]
        group: inputs that share a scale
        first: index of the first input (row of ``qweight``) within the first group
    """
    groups = (torch.arange(qweight.shape[0], device=qweight.device) + first) // group
    centred = unpack(qweight).float().sub_(unpack(qzeros).float().index_select(0, groups))
    return centred.mul_(scales.float().index_select(0, groups)).t()


def pack_factors(scales: Tensor, zeros: Tensor, dtype: torch.dtype) -> Tensor:
    """Pack scales and zeros (integers 0 to 15) [G, N] to int32 [G, N] for GEMMs in ``dtype``."""
    if dtype is torch.float32:
        upper = zeros.to(torch.int32)
    else:
        upper = (zeros.to(dtype) + OFFSET[dtype]).view(torch.int16).int()
    return (scales.half().view(torch.int16).int() & 0xFFFF) | upper << 16


def unpack_factors(factors: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the float32 scales and zeros [G, N] that ``pack_factors`` packed."""
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
    """Dequantise our layout to [N, depth] in ``out_dtype``, by default in ``dtype``.

    Args:
        packed: int16 [ceil(depth / 128), N, 32]
        factors: int32 [groups, N], made for GEMMs in ``dtype``
        depth: K
        group: inputs that share a scale
        dtype: compute dtype of the factors
        out_dtype: dtype of the result; None: ``dtype``
    """
    groups = torch.arange(depth, device=packed.device) // group
    scales, zeros = unpack_factors(factors, dtype)
    centred = unpack_blocks(packed, depth).float().t() - zeros.index_select(0, groups)
    return centred.mul_(scales.index_select(0, groups)).t().to(out_dtype or dtype)
