"""Tokens as rows of bytes, which one collective sends together with expert ids and weights."""

from __future__ import annotations

import torch
from torch import Tensor

from glowplug.kernels.formats.fp8_layout import empty_quantized


def pack(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Pack tokens with their expert ids and weights as bytes, to send them in one collective.

    Args:
        x: [..., hidden].
        ids: int64 [..., K]; packed as int32.
        weights: float32 [..., K].

    Returns:
        uint8 [..., 8 K + bytes of a row of x].
    """
    parts = (ids.int(), weights, x)
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1)


def as_numbers(packed: Tensor) -> Tensor:
    """Return packed bytes as float32, which all collectives can send, if rows are whole numbers.

    Collectives through peers' memory may change only the number with the bits 0x80008000: the
    negative zeros of two activations, which become zeros. No id or weight has these bits.
    """
    return packed.view(torch.float32) if packed.shape[-1] % 4 == 0 else packed


def unpack(packed: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Unpack the tokens, expert ids and weights that :func:`pack` has packed.

    Args:
        packed: The bytes, uint8 [M, ...].
        width: K, the number of experts per token.
        dtype: Dtype of x.

    Returns:
        x [M, hidden], ids int64 [M, K] and weights float32 [M, K].
    """
    sizes = [4 * width, 4 * width, packed.shape[-1] - 8 * width]
    ids, weights, x = (part.contiguous() for part in torch.split(packed, sizes, dim=-1))
    return x.view(dtype), ids.view(torch.int32).long(), weights.view(torch.float32)


def row_bytes(values: Tensor, scales: Tensor) -> Tensor:
    """Return tokens in block FP8 as bytes, uint8 [T, hidden + 4 G].

    Args:
        values: E4M3 [T, hidden].
        scales: float32 [T, G].
    """
    return torch.cat([part.contiguous().view(torch.uint8) for part in (values, scales)], dim=-1)


def from_row_bytes(rows: Tensor, hidden: int) -> tuple[Tensor, Tensor]:
    """Return values and scales of the tokens of ``row_bytes``, in the layout of ``fp8_layout``."""
    values, scales = empty_quantized(len(rows), hidden, rows.device)
    values.view(torch.uint8).copy_(rows[:, :hidden])
    scales.copy_(rows[:, hidden:].contiguous().view(torch.float32))
    return values, scales
