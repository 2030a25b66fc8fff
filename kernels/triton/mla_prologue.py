"""Latent attention's prologue in one launch: norm, both rotations, the cache write, and W_UK's product; and W_UV's.

References are in ``kernels.mla``.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS = 16  #: query heads a program rotates
GATHERED = 8  #: cache entries a program of ``gather`` copies
FEW = 16  #: tokens up to which a product by heads is quicker here than as a batched one of cuBLAS
UK_COLUMNS, UV_COLUMNS = 64, 16  #: of one head's product that a program makes
DEPTH = 128  #: of a product, at a time


@triton.jit
def _put(target, value, FP8: tl.constexpr, inside):
    """Store float32 ``value`` in target's dtype; FP8 saturates, as the hardware's conversion alone might not."""
    if FP8:
        value = tl.clamp(value, -448.0, 448.0)
    tl.store(target, value.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _product(x, w, out, head, column, rows, x_row, x_head, w_head, w_depth, w_column, out_row, out_head,
             SIZE: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """out[:, head, column to column + BLOCK] = x[:, head] w[head]: x [rows, H, SIZE], w [H, SIZE, COLUMNS]."""
    row, at = tl.arange(0, ROWS), column + tl.arange(0, BLOCK)
    x_rows = x + head * x_head + row[:, None] * x_row
    w_columns = w + head * w_head + at[None, :] * w_column
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for begin in tl.range(0, SIZE, STEP):
        depth = begin + tl.arange(0, STEP)
        a = tl.load(x_rows + depth[None, :], mask=(row < rows)[:, None] & (depth < SIZE)[None, :], other=0.0)
        b = tl.load(w_columns + depth[:, None] * w_depth, mask=(depth < SIZE)[:, None] & (at < COLUMNS)[None, :],
                    other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    target = out + head * out_head + row[:, None] * out_row + at[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (at < COLUMNS)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _by_heads(x, w, out, rows, x_row, x_head, w_head, w_depth, w_column, out_row, out_head,
              SIZE: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    _product(x, w, out, head, tl.program_id(1) * BLOCK, rows, x_row, x_head, w_head, w_depth, w_column, out_row,
             out_head, SIZE, COLUMNS, ROWS, BLOCK, STEP)


@triton.jit(do_not_specialize=["tokens", "decode", "heads"])
def _prologue(query, compressed, weight, cos_sin, cache, slots, absorbed, own, w_uk, tokens, decode, eps, query_token,
              query_head, compressed_token, cos_token, cache_slot, absorbed_token, absorbed_head, own_token, uk_head,
              uk_depth, uk_column, heads, NOPE: tl.constexpr, LORA: tl.constexpr, HALF: tl.constexpr,
              LORA_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr, PARTS: tl.constexpr,
              INTERLEAVED: tl.constexpr, FP8: tl.constexpr, UK_BLOCKS: tl.constexpr, UK_BLOCK: tl.constexpr,
              ROWS: tl.constexpr, STEP: tl.constexpr):
    """Programs 0 to tokens * PARTS - 1: a token's key, or some of its query heads; those behind: W_UK's product."""
    program = tl.program_id(0)
    if program < tokens * PARTS:
        _token(query, compressed, weight, cos_sin, cache, slots, absorbed, own, (program // PARTS).to(tl.int64),
               program % PARTS, decode, eps, query_token, query_head, compressed_token, cos_token, cache_slot,
               absorbed_token, absorbed_head, own_token, heads, NOPE, LORA, HALF, LORA_BLOCK, HALF_BLOCK, HEAD_BLOCK,
               INTERLEAVED, FP8)
    elif UK_BLOCKS > 0:
        program -= tokens * PARTS
        _product(query, w_uk, absorbed, (program // UK_BLOCKS).to(tl.int64), program % UK_BLOCKS * UK_BLOCK, decode,
                 query_token, query_head, uk_head, uk_depth, uk_column, absorbed_token, absorbed_head, NOPE, LORA, ROWS,
                 UK_BLOCK, STEP)


@triton.jit
def _angles(cos_sin, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Of a token: which elements make pairs, their cosines and sines, and which of BLOCK pairs there are."""
    pair = tl.arange(0, BLOCK)
    inside = pair < HALF
    cos = tl.load(cos_sin + pair, mask=inside, other=0.0)
    sin = tl.load(cos_sin + HALF + pair, mask=inside, other=0.0)
    left = pair * 2 if INTERLEAVED else pair
    right = left + 1 if INTERLEAVED else left + HALF
    return left, right, cos, sin, inside


@triton.jit
def _key(source, gain, cos_sin, target, own, own_token, behind, eps, LORA: tl.constexpr, HALF: tl.constexpr,
         LORA_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr, FP8: tl.constexpr):
    """One token's latent, normed, and rotary part, rotated, into ``target``, and into row ``behind`` of ``own``."""
    left, right, cos, sin, inside = _angles(cos_sin, HALF, HALF_BLOCK, INTERLEAVED)
    column = tl.arange(0, LORA_BLOCK)
    held = column < LORA
    a = tl.load(source + LORA + left, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + LORA + right, mask=inside, other=0.0).to(tl.float32)
    latent = tl.load(source + column, mask=held, other=0.0).to(tl.float32)
    weight = tl.load(gain + column, mask=held, other=0.0).to(tl.float32)
    latent = latent * tl.rsqrt(tl.sum(latent * latent) / LORA + eps) * weight
    turned_a, turned_b = a * cos - b * sin, b * cos + a * sin
    _put(target + column, latent, FP8, held)
    _put(target + LORA + left, turned_a, FP8, inside)
    _put(target + LORA + right, turned_b, FP8, inside)
    if behind >= 0:
        mine = own + behind * own_token
        _put(mine + column, latent, False, held)
        _put(mine + LORA + left, turned_a, False, inside)
        _put(mine + LORA + right, turned_b, False, inside)


@triton.jit
def _heads(source, cos_sin, target, first, heads, source_head, target_head, HALF: tl.constexpr,
           HALF_BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rotary parts of HEAD_BLOCK query heads of one token, rotated, into ``target``, which may be ``source``."""
    left, right, cos, sin, inside = _angles(cos_sin, HALF, HALF_BLOCK, INTERLEAVED)
    head = first + tl.arange(0, HEAD_BLOCK)[:, None]
    both = (head < heads) & inside[None, :]
    a = tl.load(source + head * source_head + left[None, :], mask=both, other=0.0).to(tl.float32)
    b = tl.load(source + head * source_head + right[None, :], mask=both, other=0.0).to(tl.float32)
    cos, sin = cos[None, :], sin[None, :]
    _put(target + head * target_head + left[None, :], a * cos - b * sin, False, both)
    _put(target + head * target_head + right[None, :], b * cos + a * sin, False, both)


@triton.jit
def _token(query, compressed, weight, cos_sin, cache, slots, absorbed, own, token, part, decode, eps, query_token,
           query_head, compressed_token, cos_token, cache_slot, absorbed_token, absorbed_head, own_token, heads,
           NOPE: tl.constexpr, LORA: tl.constexpr, HALF: tl.constexpr, LORA_BLOCK: tl.constexpr,
           HALF_BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr, FP8: tl.constexpr):
    """The key of a token (part 0), or HEAD_BLOCK of its query heads."""
    angles = cos_sin + token * cos_token
    if part == 0:
        _key(compressed + token * compressed_token, weight, angles, cache + tl.load(slots + token) * cache_slot,
             own, own_token, token - decode, eps, LORA, HALF, LORA_BLOCK, HALF_BLOCK, INTERLEAVED, FP8)
    else:
        rotary, first = query + token * query_token + NOPE, (part - 1) * HEAD_BLOCK
        if token < decode:
            _heads(rotary, angles, absorbed + token * absorbed_token + LORA, first, heads, query_head, absorbed_head,
                   HALF, HALF_BLOCK, HEAD_BLOCK, INTERLEAVED)
        else:
            _heads(rotary, angles, rotary, first, heads, query_head, query_head, HALF, HALF_BLOCK, HEAD_BLOCK,
                   INTERLEAVED)


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
             cache: Tensor, slots: Tensor, absorbed: Tensor, own: Tensor, w_uk: Tensor) -> None:
    """As ``kernels.mla.prologue``. Tokens may be strided; within a token the last dimension is contiguous."""
    tokens, heads, size = query.shape
    lora, decode = norm_weight.shape[0], absorbed.shape[0]
    rope = compressed.shape[1] - lora
    if not tokens:
        return
    block = min(HEADS, triton.next_power_of_2(heads))
    parts, few = 1 + triton.cdiv(heads, block), 0 < decode <= FEW
    uk_block = min(UK_COLUMNS, triton.next_power_of_2(lora))
    uk_blocks = triton.cdiv(lora, uk_block) if few else 0
    _prologue[(tokens * parts + heads * uk_blocks,)](
        query, compressed, norm_weight, cos_sin, cache, slots, absorbed, own, w_uk, tokens, decode, eps,
        query.stride(0), query.stride(1), compressed.stride(0), cos_sin.stride(0), cache.stride(0), absorbed.stride(0),
        absorbed.stride(1), own.stride(0), *w_uk.stride(), heads, NOPE=size - rope, LORA=lora, HALF=rope // 2,
        LORA_BLOCK=triton.next_power_of_2(lora), HALF_BLOCK=triton.next_power_of_2(rope // 2), HEAD_BLOCK=block,
        PARTS=parts, INTERLEAVED=interleaved, FP8=cache.dtype is torch.float8_e4m3fn, UK_BLOCKS=uk_blocks,
        UK_BLOCK=uk_block, ROWS=_rows(decode) if few else 16, STEP=_step(size - rope), num_warps=4)
    if decode and not few:
        absorb(query[:decode, :, : size - rope], w_uk, absorbed)


def _rows(tokens: int) -> int:
    """Rows of a tile that holds so many tokens: what tensor cores take at least, or more."""
    return max(16, triton.next_power_of_2(tokens))


def _step(size: int) -> int:
    return max(16, min(DEPTH, triton.next_power_of_2(size)))


def absorb(q_nope: Tensor, w_uk: Tensor, absorbed: Tensor) -> None:
    """As ``kernels.mla.absorb``."""
    _product_by_heads(q_nope, w_uk, absorbed[..., : w_uk.shape[2]], UK_COLUMNS)


def project(latent: Tensor, w_uv: Tensor, out: Tensor) -> None:
    """As ``kernels.mla.project``."""
    _product_by_heads(latent, w_uv, out, UV_COLUMNS)


def _product_by_heads(x: Tensor, w: Tensor, out: Tensor, columns: int) -> None:
    """x [T, H, K], w [H, K, N] -> out [T, H, N]; x and out contiguous in their last dimension."""
    tokens, heads, size = x.shape
    if tokens > FEW:
        torch.bmm(x.transpose(0, 1), w, out=out.transpose(0, 1))
    elif tokens:
        block = min(columns, triton.next_power_of_2(w.shape[2]))
        _by_heads[(heads, triton.cdiv(w.shape[2], block))](
            x, w, out, tokens, x.stride(0), x.stride(1), *w.stride(), out.stride(0), out.stride(1), SIZE=size,
            COLUMNS=w.shape[2], ROWS=_rows(tokens), BLOCK=block, STEP=_step(size))


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
