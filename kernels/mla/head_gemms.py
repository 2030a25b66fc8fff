"""MLA's absorbed GEMMs, one for each head: W_UK's on queries and W_UV's on results.

For few tokens the GEMMs are kernels of this module, or of ``absorbed_fp8`` for weights kept in FP8;
for more tokens they are cuBLAS's. The references are in ``kernels.mla.reference``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.formats.fp8 import Blocks
from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.integers import cdiv, next_power_of_2
from glowplug.kernels.mla import absorbed_fp8

#: decoding tokens up to which W_UK's GEMM is faster in the prologue than in cuBLAS; the limit
#: doubles for at most FEW_PAIRS_MAX (token, head) pairs. W_UV's GEMM is a kernel only within both
#: limits
FEW_TOKENS_MAX = 64
FEW_PAIRS_MAX = 2048  #: (token, head) pairs up to which the batch counts as small
UV_FP8_COLUMNS = 64  #: columns of W_UV's GEMM per program with stored FP8 weights
UV_COLUMNS = 32  #: columns of one head's W_UV GEMM per program
UV_ROWS = 32  #: tokens of W_UV's GEMM per program


@triton.jit
def product_tile(
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
    dependent_launch.wait(DEPENDENT)
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
    """Compute ROWS rows and BLOCK columns of one head with :func:`product_tile`."""
    dependent_launch.begin(DEPENDENT)
    head = tl.program_id(0).to(tl.int64)
    product_tile(
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


def few_for_prologue(tokens: int, heads: int) -> bool:
    """Return whether W_UK's GEMM is faster in the prologue than in cuBLAS.

    Args:
        tokens: number of decoding tokens
        heads: number of query heads
    """
    few_pairs = tokens * heads <= FEW_PAIRS_MAX
    return 0 < tokens <= (2 * FEW_TOKENS_MAX if few_pairs else FEW_TOKENS_MAX)


def absorb(q_nope: Tensor, w_uk: Tensor, absorbed: Tensor) -> None:
    """Multiply q_nope [T, H, N] by w_uk [H, N, C] into absorbed[..., :C].

    ``absorbed`` is [T, H, C + P].

    The reference is ``kernels.mla.reference.absorb``.
    """
    bmm(q_nope, w_uk, absorbed[..., : w_uk.shape[2]])


def project(
    latent: Tensor, w_uv: Tensor, out: Tensor, follows: bool = False, stored: Blocks | None = None
) -> None:
    """Multiply latent [T, H, C] by w_uv [H, C, V] into out [T, H, V].

    The reference is ``kernels.mla.reference.project``. ``latent`` and ``out`` must be contiguous in
    their last dimension.

    Args:
        latent: [T, H, C]
        w_uv: [H, C, V]
        out: [T, H, V], written
        follows: the preceding kernel waits for its predecessors as ``dependent_launch`` requires,
            so this one may start early
        stored: FP8 blocks to multiply by instead of ``w_uv``; only for few tokens
    """
    tokens, heads, _ = latent.shape
    if stored is not None:
        absorbed_fp8.multiply(latent, stored, out, UV_FP8_COLUMNS, follows=follows)
    elif tokens > FEW_TOKENS_MAX or tokens * heads > FEW_PAIRS_MAX:
        bmm(latent, w_uv, out)
    elif tokens:
        by_heads(latent, w_uv, out, min(UV_COLUMNS, next_power_of_2(w_uv.shape[2])), follows)


def by_heads(x: Tensor, w: Tensor, out: Tensor, block: int, follows: bool) -> None:
    """Multiply x [T, H, K] by w [H, K, N] into out [T, H, N] for few tokens.

    ``block`` is the number of columns per program; ``follows`` as in :func:`project`.
    """
    (tokens, heads, size) = x.shape
    columns = w.shape[2]
    tile = min(UV_ROWS, tile_size(tokens))
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
        DEPTH=tile_size(size),
        num_warps=4,
        **(dependent_launch.options() if follows else {"DEPENDENT": False}),
    )


def bmm(x: Tensor, w: Tensor, out: Tensor) -> None:
    """Multiply x [T, H, K] by w [H, K, N] into out [T, H, N] without copying any of them."""
    torch.bmm(x.transpose(0, 1), w, out=out.transpose(0, 1))


def tile_size(size: int) -> int:
    """Return the smallest power of two that holds ``size``, at least the tensor core minimum."""
    return max(16, next_power_of_2(size))
