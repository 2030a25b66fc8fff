"""W_UV's GEMM fused with the merge of the KV splits of ``mla_decode``.

Compared with ``merge_splits.merge`` followed by ``prologue.project`` it saves a launch. Compared
with a merge by the last program of a row it saves a pass over memory and a wait. The reference is
``merge_splits.merge`` followed by ``kernels.mla.reference.project``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.cuda_arch import HALF_BLOCK_HEADS_MAX
from glowplug.kernels.launch.integers import cdiv, next_power_of_2

PROGRAM_COLUMNS = 32  #: columns of one head's GEMM per program
PROGRAM_ROWS = 8  #: rows (tokens) per program
#: the next two constants are those of small steps: at most PROGRAM_ROWS rows and
#: HALF_BLOCK_HEADS_MAX heads. On an H200, 8 rows of 1024 keys with 8 heads take 10.4 us with them,
#: the decode kernel included, and 11.9 us with 32 columns and 9 splits at once
SMALL_STEP_COLUMNS = 64  #: columns of one head's GEMM per program
SMALL_STEP_SPLITS_PER_LOAD = 5  #: splits loaded at a time
ONE_LOAD_SPLITS_MAX = 9  #: splits up to which all are loaded at once
SPLITS_PER_LOAD = 8  #: splits loaded at a time if there are more
#: parts of the GEMM's depth that warps sum in parallel; measured with 16 heads on an H200
DEPTH_SHARES = 4
#: rows up to which a program has 4 warps, with more 8; measured with 16 heads on an H200
FOUR_WARPS_ROWS_MAX = 16


@triton.jit(do_not_specialize=["rows", "heads"])
def _joined(
    partial,
    lse,
    lens,
    w,
    out,
    rows,
    heads,
    w_head,
    w_depth,
    w_column,
    out_row,
    out_head,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SHARES: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Merge the splits of ROWS rows and compute BLOCK columns of one head's GEMM.

    The number of filled splits of a row, at most SPLITS, follows from its length as in the
    preceding kernel. Weights and lengths are older than the step's first kernel, so they are loaded
    before the wait.
    """
    dependent_launch.begin(DEPENDENT)
    head = tl.program_id(0).to(tl.int64)
    row, s = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_S)
    depth = tl.arange(0, SHARES)[:, None, None] * DEPTH + tl.arange(0, DEPTH)[None, None, :]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    weights = tl.load(w + head * w_head + column[None, :, None] * w_column + depth * w_depth)
    real = row < rows
    tiles = tl.cdiv(tl.load(lens + row, mask=real, other=0), TILE)
    count = tl.cdiv(tiles, tl.maximum(tl.cdiv(tiles, SPLITS), 1))
    line = (row.to(tl.int64) * heads + head) * SPLITS
    dependent_launch.wait(DEPENDENT)
    state = tl.load(
        lse + line[:, None] + s[None, :],
        mask=real[:, None] & (s[None, :] < count[:, None]),
        other=float("-inf"),
    )
    top = tl.max(state, 1)
    share = tl.exp2(state - tl.where(top == float("-inf"), 0.0, top)[:, None])
    total = tl.sum(share, 1)
    share = share / tl.where(total == 0.0, 1.0, total)[:, None]
    latent = tl.zeros((SHARES, ROWS, DEPTH), tl.float32)
    most = tl.max(count)
    for first in tl.static_range(0, SPLITS, CHUNK):
        if first == 0 or first < most:
            for split in tl.static_range(first, min(first + CHUNK, SPLITS)):
                value = tl.load(
                    partial + (line + split)[None, :, None] * (SHARES * DEPTH) + depth,
                    mask=(real & (split < count))[None, :, None],
                    other=0.0,
                )
                mine = tl.sum(tl.where(s[None, :] == split, share, 0.0), 1)
                latent += value.to(tl.float32) * mine[None, :, None]
    product = tl.dot(weights, tl.trans(latent.to(weights.dtype), 0, 2, 1), input_precision="ieee")
    target = out + row[None, :].to(tl.int64) * out_row + head * out_head + column[:, None]
    tl.store(target, tl.sum(product, 0).to(out.dtype.element_ty), mask=real[None, :])


def sizes_fit(lora: int, value: int) -> bool:
    """Return whether programs divide ``lora`` and ``value`` columns without a remainder."""
    return lora >= 16 * DEPTH_SHARES and lora & (lora - 1) == 0 and value % PROGRAM_COLUMNS == 0


def merge_and_project(
    partial: Tensor, lse: Tensor, kv_lens: Tensor, w_uv: Tensor, out: Tensor, block_n: int
) -> None:
    """Merge the splits that ``decode_splits`` returns and multiply the result by W_UV.

    Every row has one query token. Rows without any key become zeros. The preceding kernel must wait
    as ``dependent_launch`` requires.

    Args:
        partial: [B, H, S, C]
        lse: float32 [B, H, S], base 2
        kv_lens: int32 [B]
        w_uv: [H, C, V]
        out: [B, H, V], written; each row contiguous
        block_n: keys per tile of the preceding kernel
    """
    rows, heads, splits, lora = partial.shape
    assert (
        len(kv_lens) == rows
        and partial.is_contiguous()
        and lse.is_contiguous()
        and out.stride(2) == 1
    )
    assert sizes_fit(lora, w_uv.shape[2]) and lse.dtype is torch.float32
    if not rows:
        return
    columns, chunk = _program(rows, heads, splits, w_uv.shape[2])
    _joined[(heads, w_uv.shape[2] // columns, cdiv(rows, PROGRAM_ROWS))](
        partial,
        lse,
        kv_lens,
        w_uv,
        out,
        rows,
        heads,
        *w_uv.stride(),
        out.stride(0),
        out.stride(1),
        SPLITS=splits,
        CHUNK=chunk,
        BLOCK_S=next_power_of_2(splits),
        SHARES=DEPTH_SHARES,
        DEPTH=lora // DEPTH_SHARES,
        ROWS=PROGRAM_ROWS,
        BLOCK=columns,
        TILE=block_n,
        num_warps=8 if rows > FOUR_WARPS_ROWS_MAX else 4,
        **dependent_launch.options(),
    )


def _program(rows: int, heads: int, splits: int, value: int) -> tuple[int, int]:
    """Return a program's columns of a head's ``value`` columns, and the splits of each load."""
    if rows <= PROGRAM_ROWS and heads <= HALF_BLOCK_HEADS_MAX and value % SMALL_STEP_COLUMNS == 0:
        return SMALL_STEP_COLUMNS, min(splits, SMALL_STEP_SPLITS_PER_LOAD)
    return PROGRAM_COLUMNS, splits if splits <= ONE_LOAD_SPLITS_MAX else SPLITS_PER_LOAD
