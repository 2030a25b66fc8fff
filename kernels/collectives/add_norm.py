"""All-reduce, residual addition and RMS norm in one kernel, one program per token.

The input may be rows of experts that have still to be summed (``Parts``). The result is stored
unquantised, quantised to E4M3, or both, as in ``kernels.elementwise.norm``. It equals that of an
all-reduce followed by this norm, bit by bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.collectives.all_reduce import ALL_STAGES
from glowplug.kernels.collectives.push import (
    PeerBuffers,
    bits_of,
    buffers_of,
    clear,
    next_turn,
    push,
    sum_of_ranks,
)
from glowplug.kernels.elementwise.norm import add_rows
from glowplug.kernels.formats.fp8_block import FP8_BLOCK
from glowplug.kernels.formats.fp8_triton import store_quantized
from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.integers import cdiv, next_power_of_2
from glowplug.kernels.launch.rows import rows_of


@triton.jit(do_not_specialize=["ids_stride", "scale_stride"])
def _add_norm(
    x,
    ids,
    residual,
    weight,
    total,
    plain,
    values,
    scales,
    peers,
    turns,
    fault,
    x_stride,
    ids_stride,
    size,
    scale_stride,
    capacity,
    eps,
    GROUPS: tl.constexpr,
    SUMMED_ROWS: tl.constexpr,
    PLAIN: tl.constexpr,
    QUANTIZED: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    LIMIT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Sum a token over the ranks, add the residual, and store the norm of the sum.

    ``SUMMED_ROWS``: number of rows of x to sum for the token; 0: x has one row per token.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < size
    dependent_launch.begin(DEPENDENT)
    own = buffers_of(peers, RANK, total)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    dependent_launch.wait(DEPENDENT)
    turn = tl.load(turns + row)
    if SUMMED_ROWS > 0:
        term = add_rows(x, ids, row, ids_stride, column, inside, size, SUMMED_ROWS)
    else:
        term = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    mine = term.to(total.dtype.element_ty)
    at = row * TILE + column
    if STAGES & 1:
        push(bits_of(mine), at, inside, peers, turn, capacity, total, RANK, RANKS)
    if STAGES & 2:
        clear(at, None, own, turn, capacity, RANKS)
        before = tl.load(residual + row * size + column, mask=inside, other=0.0)
        value = sum_of_ranks(mine, at, inside, own, turn, capacity, fault, RANK, RANKS, LIMIT)
        # the sum is rounded as an all-reduce rounds it
        value = value.to(mine.dtype).to(tl.float32) + before.to(tl.float32)
        rounded = value.to(mine.dtype)
        tl.store(total + row * size + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
        normed = value * tl.rsqrt(tl.sum(value * value) / size + eps) * gain
        if PLAIN:
            tl.store(plain + row * size + column, normed.to(mine.dtype), mask=inside)
        if QUANTIZED:
            store_quantized(normed, values, scales, row, group, column, size, scale_stride)
        next_turn(turns, row, turn)


def warps_for(block: int) -> int:
    """Return the number of warps of a program that normalises ``block`` numbers."""
    return 4 if block <= 1024 else 8 if block <= 2048 else 16 if block <= 4096 else 32


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    buffers: PeerBuffers,
    *,
    ids: Tensor | None = None,
    plain: Tensor | None = None,
    quantized: tuple[Tensor, Tensor | None] | None = None,
    stages: int = ALL_STAGES,
) -> Tensor:
    """Sum x over the ranks, add the residual, and write the norm of the sum.

    Args:
        x: [T, N], or with ``ids`` rows of experts [T * K, N]; rows may be strided.
        residual: [T, N], equal on all ranks.
        weight: [N].
        eps: epsilon of the norm.
        buffers: the group's buffers, with a tile for each row: N, padded to a power of two.
        ids: int [T, K]; rows of x with negative ids do not count.
        plain: receives the norm, [T, N].
        quantized: receives the norm as E4M3 values [T, N] and float32 scales.
        stages: stages to run (SEND, SUM, RECEIVE); fewer than all only in tests.

    Returns:
        The sum with the residual, [T, N].
    """
    x = rows_of(x)
    residual = residual.contiguous()
    rows, size = residual.shape
    topk = 0 if ids is None else ids.shape[1]
    total = torch.empty_like(residual)
    groups = next_power_of_2(cdiv(size, FP8_BLOCK))
    if rows:
        _add_norm[(rows,)](
            x,
            ids,
            residual,
            weight,
            total,
            plain,
            *(quantized or (None, None)),
            buffers.peers,
            buffers.turns,
            buffers.fault,
            x.stride(0),
            _stride(ids, 0),
            size,
            _stride(quantized and quantized[1], 1),
            buffers.capacity,
            eps,
            GROUPS=groups,
            SUMMED_ROWS=topk,
            PLAIN=plain is not None,
            QUANTIZED=quantized is not None,
            TILE=buffers.tile,
            num_warps=warps_for(buffers.tile),
            **buffers.constants(stages),
        )
    return total


def _stride(x: Tensor | None, dim: int) -> int:
    """Return the stride of x in a dimension; 0 for None."""
    return 0 if x is None else x.stride(dim)
