"""Latent attention's prologue in one launch: norm, both rotations, the cache write. References in ``kernels.mla``."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS = 16  #: query heads a program rotates
GATHERED = 8  #: cache entries a program of ``gather`` copies


@triton.jit
def _put(target, value, FP8: tl.constexpr, inside):
    """Store float32 ``value`` in target's dtype; FP8 saturates, as the hardware's conversion alone might not."""
    if FP8:
        value = tl.clamp(value, -448.0, 448.0)
    tl.store(target, value.to(target.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["decode", "heads"])
def _prologue(query, compressed, weight, cos_sin, cache, slots, absorbed, own, decode, eps, query_token, query_head,
              compressed_token, cos_token, cache_slot, absorbed_token, absorbed_head, own_token, heads,
              NOPE: tl.constexpr, LORA: tl.constexpr, HALF: tl.constexpr, LORA_BLOCK: tl.constexpr,
              HALF_BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr, FP8: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    pair = tl.arange(0, HALF_BLOCK)
    inside = pair < HALF
    cos = tl.load(cos_sin + token * cos_token + pair, mask=inside, other=0.0)
    sin = tl.load(cos_sin + token * cos_token + HALF + pair, mask=inside, other=0.0)
    if INTERLEAVED:
        left, right = pair * 2, pair * 2 + 1
    else:
        left, right = pair, pair + HALF
    if part == 0:
        column = tl.arange(0, LORA_BLOCK)
        held = column < LORA
        source = compressed + token * compressed_token
        a = tl.load(source + LORA + left, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(source + LORA + right, mask=inside, other=0.0).to(tl.float32)
        latent = tl.load(source + column, mask=held, other=0.0).to(tl.float32)
        gain = tl.load(weight + column, mask=held, other=0.0).to(tl.float32)
        latent = latent * tl.rsqrt(tl.sum(latent * latent) / LORA + eps) * gain
        turned_a, turned_b = a * cos - b * sin, b * cos + a * sin
        target = cache + tl.load(slots + token) * cache_slot
        _put(target + column, latent, FP8, held)
        _put(target + LORA + left, turned_a, FP8, inside)
        _put(target + LORA + right, turned_b, FP8, inside)
        if token >= decode:
            mine = own + (token - decode) * own_token
            _put(mine + column, latent, False, held)
            _put(mine + LORA + left, turned_a, False, inside)
            _put(mine + LORA + right, turned_b, False, inside)
    else:
        head = (part - 1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
        both = (head < heads)[:, None] & inside[None, :]
        source = query + token * query_token + head[:, None] * query_head + NOPE
        a = tl.load(source + left[None, :], mask=both, other=0.0).to(tl.float32)
        b = tl.load(source + right[None, :], mask=both, other=0.0).to(tl.float32)
        turned_a, turned_b = a * cos[None, :] - b * sin[None, :], b * cos[None, :] + a * sin[None, :]
        if token < decode:
            target = absorbed + token * absorbed_token + head[:, None] * absorbed_head + LORA
            _put(target + left[None, :], turned_a, False, both)
            _put(target + right[None, :], turned_b, False, both)
        else:
            _put(source + left[None, :], turned_a, False, both)
            _put(source + right[None, :], turned_b, False, both)


@triton.jit
def _store(latent, k_rope, cache, slots, latent_token, rope_token, cache_slot, LORA: tl.constexpr, ROPE: tl.constexpr,
           BLOCK: tl.constexpr, FP8: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    first = column < LORA
    value = tl.load(latent + token * latent_token + column, mask=first, other=0.0).to(tl.float32)
    second = (column >= LORA) & (column < LORA + ROPE)
    value += tl.load(k_rope + token * rope_token + column - LORA, mask=second, other=0.0).to(tl.float32)
    _put(cache + tl.load(slots + token) * cache_slot + column, value, FP8, column < LORA + ROPE)


@triton.jit(do_not_specialize=["count"])
def _gather(cache, slots, out, count, cache_slot, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < count)[:, None] & (column < SIZE)[None, :]
    slot = tl.load(slots + row, mask=row < count, other=0).to(tl.int64)
    value = tl.load(cache + (slot * cache_slot)[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    target = out + (row.to(tl.int64) * SIZE)[:, None] + column[None, :]
    tl.store(target, value.to(out.dtype.element_ty), mask=inside)


def prologue(query: Tensor, compressed: Tensor, norm_weight: Tensor, eps: float, cos_sin: Tensor, interleaved: bool,
             cache: Tensor, slots: Tensor, absorbed: Tensor, own: Tensor) -> None:
    """As ``kernels.mla.prologue``. Tokens may be strided; within a token the last dimension is contiguous."""
    tokens, heads, size = query.shape
    lora = norm_weight.shape[0]
    rope = compressed.shape[1] - lora
    if not tokens:
        return
    block = min(HEADS, triton.next_power_of_2(heads))
    _prologue[(tokens, 1 + triton.cdiv(heads, block))](
        query, compressed, norm_weight, cos_sin, cache, slots, absorbed, own, absorbed.shape[0], eps,
        query.stride(0), query.stride(1), compressed.stride(0), cos_sin.stride(0), cache.stride(0), absorbed.stride(0),
        absorbed.stride(1), own.stride(0), heads, NOPE=size - rope, LORA=lora, HALF=rope // 2,
        LORA_BLOCK=triton.next_power_of_2(lora), HALF_BLOCK=triton.next_power_of_2(rope // 2), HEAD_BLOCK=block,
        INTERLEAVED=interleaved, FP8=cache.dtype is torch.float8_e4m3fn, num_warps=2)


def store(latent: Tensor, k_rope: Tensor, cache: Tensor, slots: Tensor) -> None:
    """As ``kernels.mla.store``."""
    tokens, lora = latent.shape
    rope = k_rope.shape[1]
    if not tokens:
        return
    _store[(tokens,)](latent, k_rope, cache, slots, latent.stride(0), k_rope.stride(0), cache.stride(0), LORA=lora,
                      ROPE=rope, BLOCK=triton.next_power_of_2(lora + rope), FP8=cache.dtype is torch.float8_e4m3fn)


def gather(cache: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """As ``kernels.mla.gather``."""
    count, size = slots.shape[0], cache.shape[1]
    out = torch.empty(count, size, dtype=dtype, device=cache.device)
    if count:
        _gather[(triton.cdiv(count, GATHERED),)](cache, slots, out, count, cache.stride(0), SIZE=size,
                                                 BLOCK=triton.next_power_of_2(size), ROWS=GATHERED)
    return out
