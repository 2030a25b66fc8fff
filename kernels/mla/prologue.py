"""MLA's prologue in one launch: norm, both rotations, the cache write and W_UK's GEMM.

The module also exports the GEMMs and cache functions that run without the prologue, so that it can
replace ``kernels.mla.reference``, which holds the reference of each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.formats.fp8 import Blocks
from glowplug.kernels.formats.fp8_block import FP8_BLOCK
from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.integers import cdiv, next_power_of_2
from glowplug.kernels.mla import head_gemms
from glowplug.kernels.mla.absorbed_fp8 import scaled_product
from glowplug.kernels.mla.cache_entries import gather, in_e4m3, put, store
from glowplug.kernels.mla.head_gemms import absorb, bmm, product_tile, project, tile_size

__all__ = ["absorb", "gather", "in_e4m3", "project", "prologue", "store"]

ROTATED_HEADS = 16  #: query heads that one program rotates
UK_COLUMNS = 64  #: columns of one head's W_UK GEMM per program


@triton.jit(
    do_not_specialize=["tokens", "decode", "heads"],
    do_not_specialize_on_alignment=["kv_slots"],
)
def _prologue(
    query,
    compressed,
    weight,
    cos_sin,
    cache,
    kv_slots,
    absorbed,
    own,
    w_uk,
    scales,
    tokens,
    decode,
    eps,
    query_token,
    query_head,
    compressed_token,
    cos_token,
    cache_slot,
    absorbed_token,
    absorbed_head,
    own_token,
    uk_head,
    uk_depth,
    uk_column,
    scale_head,
    scale_depth,
    scale_column,
    heads,
    NOPE: tl.constexpr,
    LORA: tl.constexpr,
    HALF: tl.constexpr,
    LORA_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FP8: tl.constexpr,
    UK_BLOCKS: tl.constexpr,
    UK_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    STORED: tl.constexpr,
    DEPENDENT: tl.constexpr,
    LEADS: tl.constexpr,
):
    """Norm, rotate and store in the first tokens * PARTS programs; run W_UK's GEMM in the others.

    Each of the first programs handles the key or HEAD_BLOCK query heads of one token. If STORED,
    W_UK consists of E4M3 codes and block scales.
    """
    dependent_launch.begin(LEADS)
    program = tl.program_id(0)
    if program < tokens * PARTS:
        dependent_launch.wait(DEPENDENT)
        _token(
            query,
            compressed,
            weight,
            cos_sin,
            cache,
            kv_slots,
            absorbed,
            own,
            (program // PARTS).to(tl.int64),
            program % PARTS,
            decode,
            eps,
            query_token,
            query_head,
            compressed_token,
            cos_token,
            cache_slot,
            absorbed_token,
            absorbed_head,
            own_token,
            heads,
            NOPE,
            LORA,
            HALF,
            LORA_BLOCK,
            HALF_BLOCK,
            HEAD_BLOCK,
            INTERLEAVED,
            FP8,
        )
    elif UK_BLOCKS > 0:
        program -= tokens * PARTS
        head, column = (program // UK_BLOCKS).to(tl.int64), program % UK_BLOCKS * UK_BLOCK
        if STORED:
            scaled_product(
                query,
                w_uk,
                scales,
                absorbed,
                head,
                column,
                decode,
                query_token,
                query_head,
                uk_head,
                uk_depth,
                uk_column,
                scale_head,
                scale_depth,
                scale_column,
                absorbed_token,
                absorbed_head,
                NOPE,
                LORA,
                ROWS,
                UK_BLOCK,
                DEPENDENT,
            )
        else:
            product_tile(
                query,
                w_uk,
                absorbed,
                head,
                0,
                column,
                decode,
                query_token,
                query_head,
                uk_head,
                uk_depth,
                uk_column,
                absorbed_token,
                absorbed_head,
                NOPE,
                LORA,
                ROWS,
                UK_BLOCK,
                DEPTH,
                DEPENDENT,
            )


@triton.jit
def _turn(
    source,
    target,
    own,
    keep,
    cos,
    sin,
    source_head,
    target_head,
    first,
    heads,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FP8: tl.constexpr,
):
    """Rotate HEAD_BLOCK rotary parts [2 * HALF] of one token into ``target``.

    ``target`` may be ``source``. If ``keep``, the result is also written to ``own``. Neighbouring
    elements are read and written contiguously.
    """
    head = first + tl.arange(0, HEAD_BLOCK)[:, None]
    if INTERLEAVED:
        at = tl.arange(0, 2 * HALF_BLOCK)[None, :]
        inside = (head < heads) & (at < 2 * HALF)
        pairs = tl.load(source + head * source_head + at, mask=inside, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(pairs, (HEAD_BLOCK, HALF_BLOCK, 2)))
        turned = tl.reshape(
            tl.join(a * cos - b * sin, b * cos + a * sin), (HEAD_BLOCK, 2 * HALF_BLOCK)
        )
        put(target + head * target_head + at, turned, FP8, inside)
        if keep:
            put(own + at, turned, False, inside)
    else:
        column = tl.arange(0, HALF_BLOCK)[None, :]
        both = (head < heads) & (column < HALF)
        left = tl.load(source + head * source_head + column, mask=both, other=0.0).to(tl.float32)
        right = tl.load(source + head * source_head + HALF + column, mask=both, other=0.0).to(
            tl.float32
        )
        put(target + head * target_head + column, left * cos - right * sin, FP8, both)
        put(target + head * target_head + HALF + column, right * cos + left * sin, FP8, both)
        if keep:
            put(own + column, left * cos - right * sin, False, both)
            put(own + HALF + column, right * cos + left * sin, False, both)


@triton.jit
def _token(
    query,
    compressed,
    weight,
    cos_sin,
    cache,
    kv_slots,
    absorbed,
    own,
    token,
    part,
    decode,
    eps,
    query_token,
    query_head,
    compressed_token,
    cos_token,
    cache_slot,
    absorbed_token,
    absorbed_head,
    own_token,
    heads,
    NOPE: tl.constexpr,
    LORA: tl.constexpr,
    HALF: tl.constexpr,
    LORA_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FP8: tl.constexpr,
):
    """Norm, rotate and store a token's key (part 0), or rotate HEAD_BLOCK of its query heads."""
    pair = tl.arange(0, HALF_BLOCK)
    cos = tl.load(cos_sin + token * cos_token + pair, mask=pair < HALF, other=0.0)[None, :]
    sin = tl.load(cos_sin + token * cos_token + HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    if part == 0:
        source = compressed + token * compressed_token
        target = cache + tl.load(kv_slots + token) * cache_slot
        mine, behind = own + (token - decode) * own_token, token >= decode
        column = tl.arange(0, LORA_BLOCK)
        held = column < LORA
        latent = tl.load(source + column, mask=held, other=0.0).to(tl.float32)
        gain = tl.load(weight + column, mask=held, other=0.0).to(tl.float32)
        latent = latent * tl.rsqrt(tl.sum(latent * latent) / LORA + eps) * gain
        put(target + column, latent, FP8, held)
        if behind:
            put(mine + column, latent, False, held)
        _turn(
            source + LORA,
            target + LORA,
            mine + LORA,
            behind,
            cos,
            sin,
            0,
            0,
            0,
            1,
            HALF,
            HALF_BLOCK,
            1,
            INTERLEAVED,
            FP8,
        )
    else:
        rotary, first = query + token * query_token + NOPE, (part - 1) * HEAD_BLOCK
        if token < decode:
            _turn(
                rotary,
                absorbed + token * absorbed_token + LORA,
                rotary,
                False,
                cos,
                sin,
                query_head,
                absorbed_head,
                first,
                heads,
                HALF,
                HALF_BLOCK,
                HEAD_BLOCK,
                INTERLEAVED,
                False,
            )
        else:
            _turn(
                rotary,
                rotary,
                rotary,
                False,
                cos,
                sin,
                query_head,
                query_head,
                first,
                heads,
                HALF,
                HALF_BLOCK,
                HEAD_BLOCK,
                INTERLEAVED,
                False,
            )


def prologue(
    query: Tensor,
    compressed: Tensor,
    norm_weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    interleaved: bool,
    cache: Tensor,
    kv_slots: Tensor,
    absorbed: Tensor,
    own: Tensor,
    w_uk: Tensor,
    leads: bool = False,
    stored: Blocks | None = None,
) -> None:
    """Turn the projections of a step into the inputs of attention, in one launch.

    ``kernels.mla.reference.prologue`` describes the shapes and all other arguments. Tokens may be
    strided; within a token the last dimension must be contiguous.

    Args:
        leads: the next kernel waits as ``dependent_launch`` requires, so it may start early
        stored: FP8 blocks of W_UK, used only for few decoding tokens
    """
    tokens, heads, size = query.shape
    lora = norm_weight.shape[0]
    decode = absorbed.shape[0]
    rope = compressed.shape[1] - lora
    if not tokens:
        return
    block = min(ROTATED_HEADS, next_power_of_2(heads))
    parts = 1 + cdiv(heads, block)
    few = head_gemms.few_for_prologue(decode, heads)
    stored = stored if few else None
    weight, scales = (w_uk, norm_weight.expand(1, 1, -1)) if stored is None else stored
    uk_block = min(UK_COLUMNS, next_power_of_2(lora)) if stored is None else FP8_BLOCK
    uk_blocks = cdiv(lora, uk_block) if few else 0
    _prologue[(tokens * parts + heads * uk_blocks,)](
        query,
        compressed,
        norm_weight,
        cos_sin,
        cache,
        kv_slots,
        absorbed,
        own,
        weight,
        scales,
        tokens,
        decode,
        eps,
        query.stride(0),
        query.stride(1),
        compressed.stride(0),
        cos_sin.stride(0),
        cache.stride(0),
        absorbed.stride(0),
        absorbed.stride(1),
        own.stride(0),
        *weight.stride(),
        *scales.stride(),
        heads,
        NOPE=size - rope,
        LORA=lora,
        HALF=rope // 2,
        LORA_BLOCK=next_power_of_2(lora),
        HALF_BLOCK=next_power_of_2(rope // 2),
        HEAD_BLOCK=block,
        PARTS=parts,
        INTERLEAVED=interleaved,
        FP8=cache.dtype is torch.float8_e4m3fn,
        UK_BLOCKS=uk_blocks,
        UK_BLOCK=uk_block,
        ROWS=tile_size(decode) if few else 16,
        DEPTH=tile_size(size - rope),
        STORED=stored is not None,
        num_warps=8 if few and decode > head_gemms.FEW_TOKENS_MAX else 4,
        **(options := dependent_launch.options()),
        LEADS=options["DEPENDENT"] and leads and few,
    )
    if decode and not few:
        bmm(query[:decode, :, : size - rope], w_uk, absorbed[..., :lora])
