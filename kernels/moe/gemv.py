"""Routed experts of one or a few tokens: GEMVs that read each pair's weights once.

They use neither tensor cores nor an alignment. The second GEMV sums a token's experts. It starts
while the first one drains (programmatic dependent launch). The first GEMV permits this start only
after the ids are available, so that the second can prefetch the weights that the ids select.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.integers import cdiv, next_power_of_2

FETCHED: tl.constexpr = tl.constexpr(2)  # experts of a token whose weights are prefetched


@triton.jit
def _up(
    x,
    w,
    out,
    ids,
    columns,
    depth,
    TOPK: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute ``BLOCK_N`` columns of silu(gate) * up of one (token, expert) pair."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dependent_launch.wait(DEPENDENT)
    dependent_launch.begin(DEPENDENT)
    pair = tl.program_id(1)
    expert = tl.load(ids + pair).to(tl.int64)
    if expert < 0:
        return
    k = tl.arange(0, BLOCK_K)
    gates = (
        w + expert * 2 * columns * depth + tl.where(n < columns, n, 0)[:, None] * depth + k[None, :]
    )
    ups = gates + columns.to(tl.int64) * depth
    x_at = x + (pair // TOPK).to(tl.int64) * depth + k
    gate = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in tl.static_range(0, DEPTH, BLOCK_K):
        inside = k < depth - start
        value = tl.load(x_at + start, mask=inside, other=0.0).to(tl.float32)[None, :]
        gate += tl.load(gates + start, mask=inside[None, :], other=0.0).to(tl.float32) * value
        up += tl.load(ups + start, mask=inside[None, :], other=0.0).to(tl.float32) * value
    total = tl.sum(gate, 1)
    total = total / (1.0 + tl.exp(-total)) * tl.sum(up, 1)
    tl.store(
        out + pair.to(tl.int64) * columns + n, total.to(out.dtype.element_ty), mask=n < columns
    )


@triton.jit
def _down(
    h,
    w,
    out,
    ids,
    weights,
    columns,
    depth,
    TOPK: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LINES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute ``BLOCK_N`` columns of the weighted sum of one token's experts."""
    dependent_launch.begin(DEPENDENT)
    token = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row = tl.where(n < columns, n, 0)[:, None] * depth + k[None, :]
    if DEPENDENT:
        line = (
            tl.where(n < columns, n, 0)[:, None] * depth
            + tl.minimum(tl.arange(0, LINES) * 64, depth - 1)[None, :]
        )
        for j in tl.static_range(min(TOPK, FETCHED)):
            dependent_launch.fetch(
                w
                + tl.maximum(tl.load(ids + token * TOPK + j).to(tl.int64), 0) * columns * depth
                + line
            )
        dependent_launch.wait(DEPENDENT)
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for j in tl.static_range(TOPK):
        expert = tl.load(ids + token * TOPK + j).to(tl.int64)
        weight = tl.load(weights + token * TOPK + j)
        end = tl.where(expert >= 0, depth, 0)
        weight = tl.where(expert >= 0, weight, 0.0)
        at = w + tl.maximum(expert, 0) * columns * depth + row
        for start in tl.static_range(0, DEPTH, BLOCK_K):
            inside = start + k < end
            value = (
                tl.load(h + (token * TOPK + j) * depth + start + k, mask=inside, other=0.0).to(
                    tl.float32
                )
                * weight
            )
            total += (
                tl.load(at + start, mask=inside[None, :], other=0.0).to(tl.float32) * value[None, :]
            )
    tl.store(out + token * columns + n, tl.sum(total, 1).to(out.dtype.element_ty), mask=n < columns)


def _lines(w: Tensor) -> int:
    """Return the number of 64-element cache lines of a weight row, rounded up to a power of two."""
    return next_power_of_2(cdiv(w.shape[-1], 64))


def up(x: Tensor, w13: Tensor, ids: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Compute silu(gate) * up of every (token, expert) pair.

    The result is that of ``moe.gemm.up`` with ``aligned`` None: one row per pair.

    Args:
        x: [T, H].
        w13: [E, 2I, H], gates before ups.
        ids: [T, K].
        config: block_n, block_k and warps.

    Returns:
        [T * K, I]. Rows of experts of other ranks are not written.
    """
    columns = w13.shape[1] // 2
    depth = w13.shape[2]
    out = torch.empty(ids.numel(), columns, dtype=x.dtype, device=x.device)
    _up[(cdiv(columns, config["block_n"]), ids.numel())](
        x,
        w13,
        out,
        ids,
        columns,
        depth,
        TOPK=ids.shape[1],
        DEPTH=depth,
        BLOCK_N=config["block_n"],
        BLOCK_K=config["block_k"],
        num_warps=config["warps"],
        **dependent_launch.options(),
    )
    return out


def down(h: Tensor, w2: Tensor, ids: Tensor, weights: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Compute the weighted sum of each token's experts.

    Args:
        h: [T * K, I], the result of ``up``.
        w2: [E, H, I].
        ids: [T, K].
        weights: float32 [T, K].
        config: block_n, block_k and warps.

    Returns:
        [T, H].
    """
    columns = w2.shape[1]
    depth = w2.shape[2]
    out = torch.empty(ids.shape[0], columns, dtype=h.dtype, device=h.device)
    _down[(cdiv(columns, config["block_n"]), ids.shape[0])](
        h,
        w2,
        out,
        ids,
        weights,
        columns,
        depth,
        TOPK=ids.shape[1],
        DEPTH=depth,
        BLOCK_N=config["block_n"],
        BLOCK_K=config["block_k"],
        LINES=_lines(w2),
        num_warps=config["warps"],
        **dependent_launch.options(),
    )
    return out
