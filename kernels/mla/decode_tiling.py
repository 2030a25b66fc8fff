"""Launch configurations of latent attention's decode kernels, chosen by rules measured on an H200."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from glowplug.kernels.launch.cuda_arch import (
    FEW_HEADS_MAX,
    MERGE_IN_VALUES_ROWS,
    MULTIPROCESSORS,
    SHORT_KEYS_MAX,
)
from glowplug.kernels.launch.integers import cdiv, next_power_of_2
from glowplug.kernels.paged import page_table as paged

#: splits up to which the last program of a row merges them (not for tiles of 32 pairs, which were
#: never measured)
LAST_PROGRAM_SPLITS_MAX = 8
#: splits up to which W_UV's GEMM merges them instead, in steps of APART_ROWS rows
VALUE_GEMM_SPLITS_MAX = 9
#: (most blocks, pairs per block) for few short rows of many heads: about one program per
#: multiprocessor
NARROW_BLOCKS = ((33, 16), (64, 32))
#: numbers of such rows for which W_UV's GEMM merges the splits; measured with 128 heads on an H200
MANY_HEADS_MERGE_ROWS = range(1, 9)


@dataclass(frozen=True)
class MlaTiling:
    """Launch configuration of a decode step: kernel constants that a captured graph fixes.

    Programs take ``block_m`` (query token, head) pairs and tiles of ``block_n`` keys, with the
    latent in ``latent_tiles`` column tiles. ``pipeline``: use the Hopper kernel, which keeps ``stages`` tiles
    of 64 keys in shared memory. ``merge_in_values``: W_UV's GEMM merges the KV splits.
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

    Rows have ``width`` query tokens of dtype ``dtype``; the cache has dtype ``kv``. ``pipeline``: the
    Hopper kernel may be used. ``merge_in_values``: W_UV's GEMM may merge the splits, where that was measured
    to be faster. On an H200 at 1024 keys, from the prologue to W_UV: 17.3 to 15.6 us with 8 rows (9
    splits), 19.9 to 18.3 with 16 (8), 24.7 to 23.6 with 32 (4). Few rows of more than
    ``FEW_HEADS_MAX`` heads use narrow blocks of heads, which read the keys again, but from L2.
    """
    block_m = min(64 if dtype.itemsize <= 2 else 32, max(16, next_power_of_2(width * heads)))
    many = pipeline and width == 1 and heads > FEW_HEADS_MAX and context <= SHORT_KEYS_MAX
    if many:
        block_m = next(
            (narrow for most, narrow in NARROW_BLOCKS if rows * cdiv(heads, narrow) <= most),
            block_m,
        )
    blocks = max(1, rows * cdiv(width * heads, block_m))
    wide = block_m == 64
    narrow = kv.itemsize == 1
    block_n = (
        64
        if pipeline or wide
        else 16
        if dtype.itemsize > 2
        else 32
        if narrow or block_m > 16
        else 64
    )
    splits = paged.best_splits(blocks, cdiv(context, block_n), MULTIPROCESSORS)
    spared = (
        pipeline
        and block_m == 16
        and blocks >= LAST_PROGRAM_SPLITS_MAX
        and context <= SHORT_KEYS_MAX
        and not many
    )
    merge_in_values = (
        merge_in_values
        and splits > 1
        and width == 1
        and (
            rows in MANY_HEADS_MERGE_ROWS and not wide
            if many
            else spared and rows in MERGE_IN_VALUES_ROWS
        )
    )
    # avoiding the merge kernel gains more than one split per multiprocessor: 8 rows of 1024 keys
    # on an H200 take 17.1 us merged by the last program, 20.8 us with 16 splits and that kernel
    if spared:
        splits = min(splits, VALUE_GEMM_SPLITS_MAX if merge_in_values else LAST_PROGRAM_SPLITS_MAX)
    if pipeline:
        return MlaTiling(
            block_m,
            block_n,
            splits,
            1,
            8 if wide else 4,
            3 if narrow and not wide else 2,
            True,
            merge_in_values,
        )
    if dtype.itemsize > 2:
        return MlaTiling(block_m, block_n, splits, 4, 4, 3)
    return (
        MlaTiling(block_m, block_n, splits, 1, 8, 2)
        if wide
        else MlaTiling(block_m, block_n, splits, 4, 4, 5)
    )


def pipeline_fits(
    query: torch.dtype, kv: torch.dtype, page_size: int, lora: int, rope: int, device: torch.device
) -> bool:
    """Return whether the Hopper kernel can be used.

    It copies whole tiles and multiplies 16-bit numbers.
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
