"""Entries of MLA's paged cache: writes, reads, and queries converted to the dtype of an FP8 cache.

The references are in ``kernels.mla.reference``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch.integers import cdiv, next_power_of_2

GATHER_ROWS = 8  #: cache entries that one program of ``gather`` copies
E4M3_LINE = 64  #: numbers per line in ``in_e4m3``; the size of a query is a multiple
E4M3_LINES = 32  #: lines that one program of ``in_e4m3`` rounds


@triton.jit
def put(target, value, FP8: tl.constexpr, inside):
    """Store float32 ``value`` at the pointers ``target``, in their dtype.

    With ``FP8`` it is clamped first, because the hardware conversion alone might not saturate.
    """
    if FP8:
        value = tl.clamp(value, -448.0, 448.0)
    tl.store(target, value.to(target.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["kv_slots"])
def _store(
    latent,
    k_rope,
    cache,
    kv_slots,
    latent_token,
    rope_token,
    cache_slot,
    LORA: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK: tl.constexpr,
    FP8: tl.constexpr,
):
    """Write the latent and the rotary part of one token to its slot."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    first = column < LORA
    value = tl.load(latent + token * latent_token + column, mask=first, other=0.0).to(tl.float32)
    second = (column >= LORA) & (column < LORA + ROPE)
    value += tl.load(k_rope + token * rope_token + column - LORA, mask=second, other=0.0).to(
        tl.float32
    )
    put(cache + tl.load(kv_slots + token) * cache_slot + column, value, FP8, column < LORA + ROPE)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["kv_slots"])
def _gather(
    cache,
    kv_slots,
    out,
    count,
    cache_slot,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Copy ROWS cache entries to ``out``, converted to its dtype."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < count)[:, None] & (column < SIZE)[None, :]
    slot = tl.load(kv_slots + row, mask=row < count, other=0).to(tl.int64)
    value = tl.load(
        cache + (slot * cache_slot)[:, None] + column[None, :], mask=inside, other=0.0
    ).to(tl.float32)
    target = out + (row.to(tl.int64) * SIZE)[:, None] + column[None, :]
    tl.store(target, value.to(out.dtype.element_ty), mask=inside)


def store(latent: Tensor, k_rope: Tensor, cache: Tensor, kv_slots: Tensor) -> None:
    """Write latent [T, C] and k_rope [T, P] to cache [slots, C + P] at kv_slots int64 [T].

    An FP8 cache saturates. The reference is ``kernels.mla.reference.store``.
    """
    tokens, lora = latent.shape
    rope = k_rope.shape[1]
    if not tokens:
        return
    _store[(tokens,)](
        latent,
        k_rope,
        cache,
        kv_slots,
        latent.stride(0),
        k_rope.stride(0),
        cache.stride(0),
        LORA=lora,
        ROPE=rope,
        BLOCK=next_power_of_2(lora + rope),
        FP8=cache.dtype is torch.float8_e4m3fn,
    )


def gather(cache: Tensor, kv_slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the entries kv_slots int32 [K] of cache [slots, C + P] as [K, C + P] in ``dtype``.

    The reference is ``kernels.mla.reference.gather``.
    """
    count = kv_slots.shape[0]
    size = cache.shape[1]
    out = torch.empty(count, size, dtype=dtype, device=cache.device)
    if count:
        _gather[(cdiv(count, GATHER_ROWS),)](
            cache,
            kv_slots,
            out,
            count,
            cache.stride(0),
            SIZE=size,
            BLOCK=next_power_of_2(size),
            ROWS=GATHER_ROWS,
        )
    return out


@triton.jit(do_not_specialize=["lines"])
def _in_e4m3(query, out, lines, LINE: tl.constexpr, LINES: tl.constexpr):
    """Convert LINES lines of LINE numbers to E4M3."""
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)[:, None]
    at, inside = line * LINE + tl.arange(0, LINE)[None, :], line < lines
    value = tl.load(query + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.clamp(value, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + at, value.to(tl.float8e4nv), mask=inside)


def in_e4m3(query: Tensor) -> Tensor:
    """Convert contiguous absorbed queries [T, H, C + P] to E4M3; values beyond 448 saturate.

    The size of a query must be a multiple of 64. The reference is
    ``kernels.mla.reference.in_e4m3``.
    """
    assert query.is_contiguous() and query.shape[-1] % E4M3_LINE == 0
    out = torch.empty_like(query, dtype=torch.float8_e4m3fn)
    lines = query.numel() // E4M3_LINE
    if lines:
        _in_e4m3[(cdiv(lines, E4M3_LINES),)](query, out, lines, LINE=E4M3_LINE, LINES=E4M3_LINES)
    return out
