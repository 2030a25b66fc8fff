"""Routed experts of one or two tokens in block FP8: matrix-vector products that stream each pair's weights once.

A program holds a few rows of one expert in registers; programs are small and many, so that they come out even on the
multiprocessors. Neither tensor cores nor an alignment; the second product begins while the first one drains, and asks
for its weights at once: the first lets it begin only when the ids are there. References are as ``moe_gemm_fp8``'s.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.triton import dependent, fp8_quant
from glowplug.kernels.triton.tuned import Config

GROUP = 128


@triton.jit
def _hold(w, first, depth, ROWS: tl.constexpr, CHUNKS: tl.constexpr):
    """ROWS rows of a weight from row ``first`` on, in E4M3: [ROWS, CHUNKS, 16], zeros behind the depth."""
    row, at = first + tl.arange(0, ROWS), tl.arange(0, CHUNKS)[:, None] * 16 + tl.arange(0, 16)[None, :]
    inside = (at < depth)[None, :, :] & (row >= 0)[:, None, None]
    return tl.load(w + row.to(tl.int64)[:, None, None] * depth + at[None, :, :], mask=inside, other=0.0,
                   eviction_policy="evict_first")


@triton.jit
def _dot(held, value, scale):
    """float32 [ROWS]: held rows times value [CHUNKS, 16], whose chunks have a scale each. A chunk is a thread's."""
    return tl.sum(tl.sum(held.to(tl.float32) * value.to(tl.float32)[None, :, :], 2) * scale[None, :], 1)


@triton.jit
def _gated(gates, ups, x, x_scales, scales, out, token, inter, depth, x_stride, xs_stride, ws_stride,
           CHUNKS: tl.constexpr):
    """out[rows] = silu(x G^T) * (x U^T) of one token and held rows, whose scales lie at ``scales``; not quantised."""
    chunk = tl.arange(0, CHUNKS)
    real, at = chunk * 16 < depth, chunk[:, None] * 16 + tl.arange(0, 16)[None, :]
    scale = tl.load(x_scales + chunk // 8 * xs_stride + token, mask=real, other=0.0)
    gate_scale = tl.load(scales + chunk // 8, mask=real, other=0.0) * scale
    up_scale = tl.load(scales + inter // 128 * ws_stride + chunk // 8, mask=real, other=0.0) * scale
    value = tl.load(x + token.to(tl.int64) * x_stride + at, mask=at < depth, other=0.0)
    gate, up = _dot(gates, value, gate_scale), _dot(ups, value, up_scale)
    tl.store(out + tl.arange(0, gates.shape[0]), gate / (1.0 + tl.exp(-gate)) * up)


@triton.jit(do_not_specialize=["xs_stride", "ws_stride", "ws_expert", "experts"])
def _up(x, x_scales, w, w_scales, out, ids, experts, inter, depth, x_stride, xs_stride, ws_expert, ws_stride,
        PER_TOKEN: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr,
        DEPENDENT: tl.constexpr):
    """A program: ROWS columns of a pair. Those of everybody's experts come first, and do not wait for the ids: their
    weights are on their way while the gate still chooses. Where the ids say otherwise, they begin again.

    NOTE: a branch for each, since numbers of a byte take a register each where branches meet.
    """
    n, pair = tl.program_id(0) * ROWS, tl.num_programs(1) - 1 - tl.program_id(1)
    slot, token = pair % PER_TOKEN, pair // PER_TOKEN
    guess = experts - PER_TOKEN + slot
    early = slot >= PER_TOKEN - SHARED
    target, block = out + pair.to(tl.int64) * inter + n, n // 128 * ws_stride
    if early:
        first = guess.to(tl.int64) * 2 * inter + n
        gates, ups = _hold(w, first, depth, ROWS, CHUNKS), _hold(w, first + inter, depth, ROWS, CHUNKS)
        dependent.wait(DEPENDENT)
        _gated(gates, ups, x, x_scales, w_scales + guess.to(tl.int64) * ws_expert + block, target, token, inter, depth,
               x_stride, xs_stride, ws_stride, CHUNKS)
    dependent.wait(DEPENDENT)
    dependent.begin(DEPENDENT)  # behind the wait: what begins now may read the ids
    expert = tl.load(ids + pair).to(tl.int64)
    if (expert >= 0) & ((expert != guess) | (early == 0)):
        first = expert * 2 * inter + n
        gates, ups = _hold(w, first, depth, ROWS, CHUNKS), _hold(w, first + inter, depth, ROWS, CHUNKS)
        _gated(gates, ups, x, x_scales, w_scales + expert * ws_expert + block, target, token, inter, depth, x_stride,
               xs_stride, ws_stride, CHUNKS)


@triton.jit(do_not_specialize=["ws_stride", "ws_expert"])
def _down(h, w, w_scales, out, ids, weights, columns, depth, ws_expert, ws_stride, ROWS: tl.constexpr,
          CHUNKS: tl.constexpr, DEPENDENT: tl.constexpr):
    """out[pair, ROWS columns] = h[pair], quantised, times the expert's weight and the pair's."""
    dependent.begin(DEPENDENT)
    n, pair = tl.program_id(0) * ROWS, tl.program_id(1)
    expert = tl.load(ids + pair).to(tl.int64)
    if expert < 0:
        dependent.wait(DEPENDENT)
        return
    held = _hold(w, expert * columns + n, depth, ROWS, CHUNKS)
    group, chunk = tl.arange(0, CHUNKS // 8), tl.arange(0, CHUNKS)
    w_scale = tl.load(w_scales + expert * ws_expert + n // 128 * ws_stride + chunk // 8, mask=chunk * 16 < depth,
                      other=0.0)
    within = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    dependent.wait(DEPENDENT)
    inner = tl.load(h + pair.to(tl.int64) * depth + within, mask=within < depth, other=0.0)
    stored, scale = fp8_quant.quantize_rows(inner)
    scale = tl.reshape(tl.broadcast_to(scale[:, None], (CHUNKS // 8, 8)), (CHUNKS,))
    total = _dot(held, tl.reshape(stored, (CHUNKS, 16)), scale * w_scale) * tl.load(weights + pair)
    tl.store(out + pair.to(tl.int64) * columns + n + tl.arange(0, ROWS), total.to(out.dtype.element_ty))


def products(x: Tensor, x_scales: Tensor, w13: Tensor, scales13: Tensor, w2: Tensor, scales2: Tensor, ids: Tensor,
             weights: Tensor, dtype: torch.dtype, config: Config, shared: int) -> Tensor:
    """As ``moe_gemm_fp8.products``. config: for the ``first`` and the ``second`` product rows of a weight that a
    program holds (``HELD``, a divisor of 128; of gates and of ups each) and ``num_warps``."""
    (_, per_token), pairs = ids.shape, ids.numel()
    inter, (_, columns, _), depth = w13.shape[1] // 2, w2.shape, w13.shape[2]
    first, second = config["first"], config["second"]
    assert inter % GROUP == 0 and columns % second["HELD"] == 0 and GROUP % first["HELD"] == GROUP % second["HELD"] == 0
    hidden = torch.empty(pairs, inter, dtype=torch.float32, device=x.device)
    out = torch.empty(pairs, columns, dtype=dtype, device=x.device)
    _up[(inter // first["HELD"], pairs)](
        x, x_scales, w13, scales13, hidden, ids, len(w13), inter, depth, x.stride(0), x_scales.stride(1),
        scales13.stride(0), scales13.stride(1), PER_TOKEN=per_token, SHARED=shared, ROWS=first["HELD"],
        CHUNKS=_chunks(depth), num_warps=first["num_warps"], **dependent.options())
    _down[(columns // second["HELD"], pairs)](
        hidden, w2, scales2, out, ids, weights, columns, inter, scales2.stride(0), scales2.stride(1),
        ROWS=second["HELD"], CHUNKS=_chunks(inter), num_warps=second["num_warps"], **dependent.options())
    return out


def _chunks(depth: int) -> int:
    """Sixteen numbers each, of whole groups."""
    return triton.next_power_of_2(triton.cdiv(depth, GROUP)) * (GROUP // 16)
