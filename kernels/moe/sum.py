"""Sum of the rows of a token's experts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.integers import cdiv, next_power_of_2


@triton.jit(do_not_specialize=["ids_stride"])
def _sum(
    rows,
    ids,
    out,
    ids_stride,
    size,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Sum ``BLOCK`` channels of a token's rows."""
    dependent_launch.begin(DEPENDENT)
    dependent_launch.wait(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(WIDTH):
        end = tl.where(tl.load(ids + token * ids_stride + k) >= 0, size, 0)
        total += tl.load(
            rows + (token * WIDTH + k) * size + column, mask=column < end, other=0.0
        ).to(tl.float32)
    tl.store(out + token * size + column, total, mask=column < size)


def moe_sum(rows: Tensor, ids: Tensor) -> Tensor:
    """Sum each token's rows, in float32 in the order of K.

    Args:
        rows: [T * K, H].
        ids: [T, K]; rows may be strided. The rows of ids of -1 are not read.

    Returns:
        [T, H].
    """
    tokens, width = ids.shape
    size = rows.shape[1]
    out = torch.empty(tokens, size, dtype=rows.dtype, device=rows.device)
    if tokens:
        block = min(1024, next_power_of_2(size))
        _sum[(tokens, cdiv(size, block))](
            rows,
            ids,
            out,
            ids.stride(0),
            size,
            WIDTH=width,
            BLOCK=block,
            **dependent_launch.options(),
        )
    return out
