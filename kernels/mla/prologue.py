"""MLA's prologue in one launch: norm, both rotations, the cache write and W_UK's GEMM; also W_UV's.

The references are in ``kernels.mla.reference``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.formats.fp8 import Blocks
from glowplug.kernels.launch import dependent_launch as dependent
from glowplug.kernels.launch.integers import cdiv, next_power_of_2
from glowplug.kernels.mla import absorbed_fp8 as mla_absorbed_fp8
from glowplug.kernels.mla.absorbed_fp8 import scaled_product

ROTATED_HEADS = 16  #: query heads that one program rotates
GATHER_ROWS = 8  #: cache entries that one program of ``gather`` copies
E4M3_LINE = 64  #: numbers per line in ``in_e4m3``; the size of a query is a multiple
E4M3_LINES = 32  #: lines that one program of ``in_e4m3`` rounds
#: decoding tokens up to which W_UK's GEMM is faster in the prologue than in cuBLAS; the limit
#: doubles for at most FEW_PAIRS_MAX (token, head) pairs. W_UV's GEMM needs both limits
FEW_TOKENS_MAX = 64
FEW_PAIRS_MAX = 2048  #: (token, head) pairs up to which the batch counts as small
UV_FP8_COLUMNS = 64  #: columns of W_UV's GEMM per program with stored FP8 weights
UK_COLUMNS = 64  #: columns of one head's W_UK GEMM per program
UV_COLUMNS = 32  #: columns of one head's W_UV GEMM per program
UV_ROWS = 32  #: tokens of W_UV's GEMM per program


@triton.jit
def _put(target, value, FP8: tl.constexpr, inside):
    """Store float32 ``value`` in target's dtype.

    FP8 is clamped first, because the hardware conversion alone might not saturate.
    """
    if FP8:
        value = tl.clamp(value, -448.0, 448.0)
    tl.store(target, value.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _product(
    x,
    w,
    out,
    head,
    first,
    column,
    rows,
    x_row,
    x_head,
    w_head,
    w_depth,
    w_column,
    out_row,
    out_head,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute one tile of out[rows, head, columns] = x[rows, head] w[head].

    The tile has ROWS rows from ``first`` and BLOCK columns from ``column``; x is [rows, H, SIZE], w
    is [H, SIZE, COLUMNS]. The weights are loaded before the wait for the kernel that makes x.
    """
    row, at, depth = first + tl.arange(0, ROWS), column + tl.arange(0, BLOCK), tl.arange(0, DEPTH)
    b = tl.load(
        w + head * w_head + at[None, :] * w_column + depth[:, None] * w_depth,
        mask=(depth < SIZE)[:, None] & (at < COLUMNS)[None, :],
        other=0.0,
    )
    dependent.wait(DEPENDENT)
    a = tl.load(
        x + head * x_head + row[:, None] * x_row + depth[None, :],
        mask=(row < rows)[:, None] & (depth < SIZE)[None, :],
        other=0.0,
    )
    target = out + head * out_head + row[:, None] * out_row + at[None, :]
    tl.store(
        target,
        tl.dot(a, b, input_precision="ieee").to(out.dtype.element_ty),
        mask=(row < rows)[:, None] & (at < COLUMNS)[None, :],
    )


@triton.jit(do_not_specialize=["rows"])
def _by_heads(
    x,
    w,
    out,
    rows,
    x_row,
    x_head,
    w_head,
    w_depth,
    w_column,
    out_row,
    out_head,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    dependent.begin(DEPENDENT)
    head = tl.program_id(0).to(tl.int64)
    _product(
        x,
        w,
        out,
        head,
        tl.program_id(2) * ROWS,
        tl.program_id(1) * BLOCK,
        rows,
        x_row,
        x_head,
        w_head,
        w_depth,
        w_column,
        out_row,
        out_head,
        SIZE,
        COLUMNS,
        ROWS,
        BLOCK,
        DEPTH,
        DEPENDENT,
    )


@triton.jit(do_not_specialize=["tokens", "decode", "heads"])
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
    """Process tokens in the first tokens * PARTS programs, and W_UK's GEMM in the others.

    Each of the first programs handles the key or HEAD_BLOCK query heads of one token. If STORED,
    W_UK consists of E4M3 codes and block scales.
    """
    dependent.begin(LEADS)
    program = tl.program_id(0)
    if program < tokens * PARTS:
        dependent.wait(DEPENDENT)
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
            _product(
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
        _put(target + head * target_head + at, turned, FP8, inside)
        if keep:
            _put(own + at, turned, False, inside)
    else:
        column = tl.arange(0, HALF_BLOCK)[None, :]
        both = (head < heads) & (column < HALF)
        left = tl.load(source + head * source_head + column, mask=both, other=0.0).to(tl.float32)
        right = tl.load(source + head * source_head + HALF + column, mask=both, other=0.0).to(
            tl.float32
        )
        _put(target + head * target_head + column, left * cos - right * sin, FP8, both)
        _put(target + head * target_head + HALF + column, right * cos + left * sin, FP8, both)
        if keep:
            _put(own + column, left * cos - right * sin, False, both)
            _put(own + HALF + column, right * cos + left * sin, False, both)


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
    """Process the key of a token (part 0) or HEAD_BLOCK of its query heads."""
    pair = tl.arange(0, HALF_BLOCK)
    cos = tl.load(cos_sin + token * cos_token + pair, mask=pair < HALF, other=0.0)[None, :]
    sin = tl.load(cos_sin + token * cos_token + HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    if part == 0:
        source, target = (
            compressed + token * compressed_token,
            cache + tl.load(kv_slots + token) * cache_slot,
        )
        mine, behind = own + (token - decode) * own_token, token >= decode
        column = tl.arange(0, LORA_BLOCK)
        held = column < LORA
        latent = tl.load(source + column, mask=held, other=0.0).to(tl.float32)
        gain = tl.load(weight + column, mask=held, other=0.0).to(tl.float32)
        latent = latent * tl.rsqrt(tl.sum(latent * latent) / LORA + eps) * gain
        _put(target + column, latent, FP8, held)
        if behind:
            _put(mine + column, latent, False, held)
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


@triton.jit
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
    _put(cache + tl.load(kv_slots + token) * cache_slot + column, value, FP8, column < LORA + ROPE)


@triton.jit(do_not_specialize=["count"])
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
    """Run ``kernels.mla.reference.prologue`` in one launch.

    Tokens may be strided; within a token the last dimension must be contiguous.

    Args:
        leads: the next kernel waits for this one as ``dependent_launch`` requires, so it may start
            early
        stored: used only for few decoding tokens
    """
    tokens, heads, size = query.shape
    lora = norm_weight.shape[0]
    decode = absorbed.shape[0]
    rope = compressed.shape[1] - lora
    if not tokens:
        return
    block = min(ROTATED_HEADS, next_power_of_2(heads))
    parts = 1 + cdiv(heads, block)
    few = 0 < decode <= (2 * FEW_TOKENS_MAX if decode * heads <= FEW_PAIRS_MAX else FEW_TOKENS_MAX)
    stored = stored if few else None
    weight, scales = (w_uk, norm_weight.expand(1, 1, -1)) if stored is None else stored
    uk_block = min(UK_COLUMNS, next_power_of_2(lora)) if stored is None else mla_absorbed_fp8.BLOCK
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
        ROWS=_tile(decode) if few else 16,
        DEPTH=_tile(size - rope),
        STORED=stored is not None,
        num_warps=8 if few and decode > FEW_TOKENS_MAX else 4,
        **(options := dependent.options()),
        LEADS=options["DEPENDENT"] and leads and few,
    )
    if decode and not few:
        _bmm(query[:decode, :, : size - rope], w_uk, absorbed[..., :lora])


def absorb(q_nope: Tensor, w_uk: Tensor, absorbed: Tensor) -> None:
    """Run ``kernels.mla.reference.absorb``."""
    _bmm(q_nope, w_uk, absorbed[..., : w_uk.shape[2]])


def project(
    latent: Tensor, w_uv: Tensor, out: Tensor, follows: bool = False, stored: Blocks | None = None
) -> None:
    """Run ``kernels.mla.reference.project``.

    ``latent`` and ``out`` must be contiguous in their last dimension.

    Args:
        follows: the preceding kernel waits for its predecessors as ``dependent_launch`` requires,
            so this one may start early
        stored: only for few tokens
    """
    tokens, heads, _ = latent.shape
    if stored is not None:
        mla_absorbed_fp8.multiply(latent, stored, out, UV_FP8_COLUMNS, follows=follows)
    elif tokens > FEW_TOKENS_MAX or tokens * heads > FEW_PAIRS_MAX:
        _bmm(latent, w_uv, out)
    elif tokens:
        by_heads(latent, w_uv, out, min(UV_COLUMNS, next_power_of_2(w_uv.shape[2])), follows)


def by_heads(x: Tensor, w: Tensor, out: Tensor, block: int, follows: bool) -> None:
    """Multiply x [T, H, K] by w [H, K, N] into out [T, H, N] for few tokens.

    ``block`` is the number of columns per program.
    """
    (tokens, heads, size) = x.shape
    columns = w.shape[2]
    tile = min(UV_ROWS, _tile(tokens))
    _by_heads[(heads, cdiv(columns, block), cdiv(tokens, tile))](
        x,
        w,
        out,
        tokens,
        x.stride(0),
        x.stride(1),
        *w.stride(),
        out.stride(0),
        out.stride(1),
        SIZE=size,
        COLUMNS=columns,
        ROWS=tile,
        BLOCK=block,
        DEPTH=_tile(size),
        num_warps=4,
        **(dependent.options() if follows else {"DEPENDENT": False}),
    )


def _bmm(x: Tensor, w: Tensor, out: Tensor) -> None:
    """Multiply x [T, H, K] by w [H, K, N] into out [T, H, N] without copying any of them."""
    torch.bmm(x.transpose(0, 1), w, out=out.transpose(0, 1))


def _tile(size: int) -> int:
    """Return the smallest power of two that holds ``size``, at least the tensor core minimum."""
    return max(16, next_power_of_2(size))


def store(latent: Tensor, k_rope: Tensor, cache: Tensor, kv_slots: Tensor) -> None:
    """Run ``kernels.mla.reference.store``."""
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
    """Run ``kernels.mla.reference.gather``."""
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
    """Run ``kernels.mla.reference.in_e4m3`` on contiguous queries.

    The size of a query must be a multiple of 64.
    """
    assert query.is_contiguous() and query.shape[-1] % E4M3_LINE == 0
    out = torch.empty_like(query, dtype=torch.float8_e4m3fn)
    lines = query.numel() // E4M3_LINE
    if lines:
        _in_e4m3[(cdiv(lines, E4M3_LINES),)](query, out, lines, LINE=E4M3_LINE, LINES=E4M3_LINES)
    return out
