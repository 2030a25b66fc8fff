"""Memory layout of activations in block FP8."""

from __future__ import annotations

import torch
from torch import Tensor

from glowplug.kernels.formats.fp8_block import FP8_BLOCK


def empty_quantized(rows: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Allocate values E4M3 [rows, size] and scales float32 [rows, ceil(size / 128)].

    Scales are stored group-major. The memory of both is a multiple of four rows, because some GEMMs
    read that many.
    """
    held = -(-rows // 4) * 4
    scales = torch.empty(-(-size // FP8_BLOCK), held, dtype=torch.float32, device=device)
    values = torch.empty(held, size, dtype=torch.float8_e4m3fn, device=device)
    return values[:rows], scales.t()[:rows]
