"""Tuner for the block-scaled FP8 GEMM: measure tiles and write the tables that ``gemm.fp8`` reads.

Each configuration is timed in a CUDA graph over several weights in turn, so that weights are read
from device memory as in a model. Worker processes compile the kernels ahead of time, because
compiling takes longer than measuring.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glowplug.kernels.formats import fp8_triton
from glowplug.kernels.formats.fp8_block import FP8_BLOCK
from glowplug.kernels.gemm import few_rows_fp8, fp8
from glowplug.kernels.gemm.tuning_fp8_run import (
    Log,
    Table,
    TuningRun,
    check_refusal,
    fitting_tiles,
    key,
    random_fp8,
    without,
)
from glowplug.kernels.launch.cuda_arch import MULTIPROCESSORS
from glowplug.kernels.launch.integers import cdiv, next_power_of_2
from glowplug.kernels.launch.timing import microseconds
from glowplug.kernels.launch.tuned_tables import Config

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
HELD_ROWS = (4, 8, 16)  #: weight rows per program that are tried with ``gemm.few_rows_fp8``
DEPTH_SPLITS = (1, 2, 3, 4, 6, 8, 9)  #: depth splits that are tried with ``gemm.few_rows_fp8``
COLD_BYTES = 400 << 20  #: bytes of weights used in turn, so that L2 does not hold them


def _gemm_tiles(rows: int) -> list[dict[str, Any]]:
    """Return the tiles of ``gemm.fp8`` to measure for ``rows`` rows of x, without splits."""
    if rows <= 64:
        block = max(16, next_power_of_2(rows))
        return [
            {"BLOCK_M": block, **tile}
            for tile in fitting_tiles(True, block, (64, 128), (4, 8), (3, 4, 6))
        ]
    return [
        {"BLOCK_M": block, **tile}
        for block in (64, 128)
        for swap in ((False, True) if rows <= 256 else (False,))
        for tile in fitting_tiles(swap, block, (128,) if rows > 256 else (64, 128), (4, 8), (3, 4))
    ]


def gemm_candidates(rows: int, columns: int, depth: int) -> list[Config]:
    """Return the configurations to measure for x [rows, depth] and W [columns, depth].

    Depth splits are tried where tiles alone do not keep every multiprocessor busy. One row also
    gets the candidates of ``gemm.few_rows_fp8``.
    """
    found: list[Config] = held_candidates(depth) if rows == 1 else []
    for tile in _gemm_tiles(rows):
        tiles = cdiv(rows, tile["BLOCK_M"]) * cdiv(columns, tile["BLOCK_N"])
        found += [
            {**tile, "SPLIT_K": split}
            for split in range(1, 9)
            if split == 1
            or (depth // FP8_BLOCK // split >= 4 and tiles * split <= 4 * MULTIPROCESSORS)
        ]
    return found


def held_candidates(depth: int) -> list[Config]:
    """Return the configurations of ``gemm.few_rows_fp8`` to measure.

    At most a quarter of the columns that their programs hold is padding.
    """
    found: list[Config] = []
    for rows, splits, warps in product(HELD_ROWS, DEPTH_SPLITS, (4, 8)):
        groups = few_rows_fp8.groups_of(depth, splits)
        split_groups = cdiv(depth, FP8_BLOCK) / splits
        held = rows * groups * FP8_BLOCK // (32 * warps)
        in_registers = few_rows_fp8.THREAD_BYTES_MIN <= held <= few_rows_fp8.THREAD_BYTES_MAX
        if in_registers and 4 * split_groups >= 3 * groups >= 12:
            found.append({"HELD": rows, "SPLIT_K": splits, "num_warps": warps})
    return found


def _kernel(config: Config, rows: int, depth: int) -> Config:
    """Return the values of a candidate that determine which kernel is compiled."""
    if "HELD" in config:
        return {**config, "GROUPS": few_rows_fp8.groups_of(depth, config["SPLIT_K"])}
    return {**without(config, "SPLIT_K"), "FETCH": fetch_of(rows, config["BLOCK_M"])}


def _operands(
    rows: int, columns: int, depth: int, copies: int
) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
    """Return random x, its scales, ``copies`` random weights, and the scales of a weight."""
    x = fp8_triton.quantize(torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16))
    weights = [random_fp8(columns, depth) for _ in range(copies)]
    return *x, weights, torch.rand(cdiv(columns, FP8_BLOCK), cdiv(depth, FP8_BLOCK), device="cuda")


def _compile_gemm(wanted: Sequence[Config]) -> list[str]:
    """Run each candidate once, so that its kernel is cached on disk.

    Returns:
        Keys of the candidates that fail.
    """
    failed = []
    for config in wanted:
        held = "HELD" in config
        depth = FP8_BLOCK * config["GROUPS"] * config["SPLIT_K"] if held else 1024
        x, scales, (weight,), w_scales = _operands(1 if held else 16, 256, depth, 1)
        try:
            for splits in (config["SPLIT_K"],) if held else (1, 2):
                fp8.gemm(
                    x,
                    scales,
                    weight,
                    w_scales,
                    torch.bfloat16,
                    {**without(config, "GROUPS"), "SPLIT_K": splits},
                )
            torch.cuda.synchronize()
        except Exception as error:  # compilers raise errors of many types
            check_refusal(error)
            failed.append(key(config))
    return failed


def tune_gemm(
    columns: int,
    depth: int,
    path: Path,
    *,
    rows: Sequence[int] = ROWS,
    seconds: float = 60.0,
    workers: int = 8,
    log: Log = print,
) -> Table:
    """Find the fastest configuration for each row count that the table lacks; store each at once.

    Args:
        columns: N.
        depth: K.
        path: File of the table.
        rows: Row counts of the table.
        seconds: Time limit.
        workers: Processes that compile kernels.
        log: Receives progress lines.

    Returns:
        The table.
    """

    def candidates(number: int) -> list[Config]:
        return gemm_candidates(number, columns, depth)

    def kernels(number: int) -> list[Config]:
        return list(
            {
                key(made): made for made in (_kernel(c, number, depth) for c in candidates(number))
            }.values()
        )

    def measure(number: int, configs: Sequence[Config]) -> Iterator[tuple[float, Config]]:
        x, scales, weights, w_scales = _operands(
            number, columns, depth, max(2, min(16, COLD_BYTES // (columns * depth)))
        )
        for config in configs:
            calls = [
                partial(fp8.gemm, x, scales, weight, w_scales, torch.bfloat16, config)
                for weight in weights
            ]
            yield microseconds(calls, 2), config

    run = TuningRun(path, seconds, workers, log)
    for number in run.compiled(rows, kernels, _compile_gemm):
        usable = [c for c in candidates(number) if key(_kernel(c, number, depth)) not in run.failed]
        best = min(run.within_time(measure(number, usable)), key=lambda item: item[0])
        run.keep(number, best[1], f"{columns}x{depth}, {number} rows: {best[0]:.1f} us {best[1]}")
    return run.table


def fetch_of(rows: int, block_m: int) -> int:
    """Return the number of depth groups of W that a program of ``gemm.fp8`` prefetches.

    Args:
        rows: rows of x
        block_m: rows of a tile
    """
    return fp8.PREFETCH_GROUPS if rows <= block_m <= 32 else 0
