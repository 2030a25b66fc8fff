"""Launch configurations of latent attention's decode kernels, by rules measured on an H200."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from glowplug.kernels.launch.cuda_arch import (
    FEW_HEADS_MAX,
    MULTIPROCESSORS,
    SHORT_KEYS_MAX,
    merge_in_values_rows,
)
from glowplug.kernels.launch.integers import cdiv, next_power_of_2
from glowplug.kernels.paged import page_table as paged

#: most splits that the last program of a row merges itself (only with tiles of 16 pairs: tiles of
#: 32 pairs were never measured)
LAST_PROGRAM_SPLITS_MAX = 8
#: most splits that W_UV's GEMM merges instead, in steps of ``merge_in_values_rows``
VALUE_GEMM_SPLITS_MAX = 9
#: (most blocks, pairs per block) of steps of few short rows with many heads; chosen for about one
#: program per multiprocessor
NARROW_BLOCKS = ((33, 16), (64, 32))
#: row counts of steps with many heads in which W_UV's GEMM merges the splits; measured with 128
#: heads on an H200
MANY_HEADS_MERGE_ROWS = range(1, 9)


@dataclass(frozen=True)
class MlaTiling:
    """Launch configuration of a decode step: kernel constants that a captured graph fixes.

    Attributes:
        block_m: (query token, head) pairs per program
        block_n: keys per tile
        splits: KV splits per row
        latent_tiles: column tiles of the latent
        warps: warps per program
        stages: pipeline stages
        pipeline: use the Hopper kernel, which keeps ``stages`` tiles of 64 keys in shared memory
        merge_in_values: W_UV's GEMM merges the KV splits
    """

    block_m: int
    block_n: int
    splits: int
    latent_tiles: int
    warps: int
    stages: int
    pipeline: bool = False
    merge_in_values: bool = False


@lru_cache(maxsize=4096)
def mla_tiling(
    rows: int,
    width: int,
    heads: int,
    context: int,
    dtype: torch.dtype,
    kv: torch.dtype,
    pipeline: bool = False,
    merge_in_values: bool = False,
) -> MlaTiling:
    """Choose the tiling for ``rows`` (padded) rows of at most ``context`` keys.

    Few rows of more than ``FEW_HEADS_MAX`` heads use narrow blocks of heads, which read the keys
    again, but from L2.

    Args:
        rows: decode rows of the step, padding included
        width: query tokens per row
        heads: query heads
        context: upper bound of the rows' lengths
        dtype: dtype of the queries
        kv: dtype of the cache
        pipeline: the Hopper kernel may be used
        merge_in_values: W_UV's GEMM may merge the splits, and does so where that was measured to be
            faster. On an H200 at 1024 keys the time from the prologue to W_UV falls from 17.3 to
            15.6 us with 8 rows, from 19.9 to 18.3 with 16, and from 24.7 to 23.6 with 32
    """
    is_short = pipeline and context <= SHORT_KEYS_MAX
    many_heads = is_short and width == 1 and heads > FEW_HEADS_MAX
    block_m = _pairs_per_block(rows, width, heads, dtype, many_heads)
    program = _program_shape(block_m, dtype, kv, pipeline)
    block_n = _keys_per_tile(block_m, dtype, kv, pipeline)
    blocks = max(1, rows * cdiv(width * heads, block_m))
    splits = paged.best_splits(blocks, cdiv(context, block_n), MULTIPROCESSORS)
    joins = merge_in_values and splits > 1 and width == 1
    is_fused, splits = _merge_of(rows, heads, block_m, blocks, splits, is_short, joins)
    return MlaTiling(block_m, block_n, splits, *program, pipeline, is_fused)


def _merge_of(
    rows: int, heads: int, block_m: int, blocks: int, splits: int, is_short: bool, joins: bool
) -> tuple[bool, int]:
    """Return whether W_UV's GEMM merges the splits, and the number of splits.

    Avoiding the merge kernel gains more than giving every multiprocessor a split: 8 rows of 1024
    keys on an H200 take 17.1 us if the last program merges, 20.8 us with 16 splits and the merge
    kernel.

    Args:
        rows: decode rows of the step, padding included
        heads: query heads
        block_m: (query token, head) pairs per program
        blocks: blocks of pairs of all rows
        splits: KV splits per row that give every multiprocessor work
        is_short: the Hopper kernel decodes rows of at most ``SHORT_KEYS_MAX`` keys
        joins: W_UV's GEMM may merge the splits, and rows have one token
    """
    if heads > FEW_HEADS_MAX:
        return joins and is_short and block_m < 64 and rows in MANY_HEADS_MERGE_ROWS, splits
    if not is_short or block_m != 16:
        return False, splits
    if joins and rows in merge_in_values_rows(heads):
        return True, min(splits, VALUE_GEMM_SPLITS_MAX)
    if blocks >= LAST_PROGRAM_SPLITS_MAX:
        splits = min(splits, LAST_PROGRAM_SPLITS_MAX)
    return False, splits


def _program_shape(
    block_m: int, dtype: torch.dtype, kv: torch.dtype, pipeline: bool
) -> tuple[int, int, int]:
    """Return the numbers of column tiles of the latent, warps and pipeline stages of a program.

    Arguments as in :func:`_keys_per_tile`.
    """
    is_wide = block_m == 64
    if pipeline:
        return (1, 8, 2) if is_wide else (1, 4, 3 if kv.itemsize == 1 else 2)
    if dtype.itemsize > 2:
        return 4, 4, 3
    return (1, 8, 2) if is_wide else (4, 4, 5)


def _pairs_per_block(
    rows: int, width: int, heads: int, dtype: torch.dtype, many_heads: bool
) -> int:
    """Return the number of (query token, head) pairs that a program computes, a power of two."""
    widest = 64 if dtype.itemsize <= 2 else 32
    block_m = min(widest, max(16, next_power_of_2(width * heads)))
    if many_heads:
        for most_blocks, narrow in NARROW_BLOCKS:
            if rows * cdiv(heads, narrow) <= most_blocks:
                return narrow
    return block_m


def _keys_per_tile(block_m: int, dtype: torch.dtype, kv: torch.dtype, pipeline: bool) -> int:
    """Return the number of keys that a program reads as one tile.

    Args:
        block_m: (query token, head) pairs per program
        dtype: dtype of the queries
        kv: dtype of the cache
        pipeline: the Hopper kernel is used
    """
    if pipeline or block_m == 64:
        return 64
    if dtype.itemsize > 2:
        return 16
    return 32 if kv.itemsize == 1 or block_m > 16 else 64


def pipeline_fits(
    query: torch.dtype, kv: torch.dtype, page_size: int, lora: int, rope: int, device: torch.device
) -> bool:
    """Return whether the Hopper kernel can be used.

    The kernel copies whole tiles of 64 keys and multiplies 16-bit numbers.

    Args:
        query: dtype of the queries
        kv: dtype of the cache
        page_size: slots per page
        lora: C
        rope: R
        device: device of the cache
    """
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device)[0] == 9
        and query.itemsize == 2
        and kv in (query, torch.float8_e4m3fn)
        and page_size % 64 == 0
        and lora in (256, 512)
        and rope == 64
    )
