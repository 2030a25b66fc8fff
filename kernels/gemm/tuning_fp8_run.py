"""Helpers of the FP8 tuners: candidate tiles, random numbers, and a time-limited run that fills a
table.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glowplug.kernels.formats.fp8_block import FP8_BLOCK
from glowplug.kernels.launch import tuned_tables
from glowplug.kernels.launch.tuned_tables import Config

SHARED_MEMORY = 225_000  #: bytes of shared memory that a CTA may use on Hopper
Table = dict[int, Config]
Log = Callable[[str], None]


def fitting_tiles(
    swap: bool,
    block_m: int,
    blocks_n: Sequence[int],
    warps: Sequence[int],
    stages: Sequence[int],
    weights: int = 1,
) -> Iterator[dict[str, Any]]:
    """Yield every combination of the given tile sizes that fits into shared memory.

    Args:
        swap: the weight is the left operand
        block_m: rows of a tile
        blocks_n: columns of a tile that are tried
        warps: numbers of warps that are tried
        stages: numbers of pipeline stages that are tried
        weights: number of weight tiles of a pipeline stage
    """
    for block_n, warp, stage, tma in product(blocks_n, warps, stages, (True, False)):
        if stage * (weights * block_n + block_m) * FP8_BLOCK <= SHARED_MEMORY:
            yield {
                "BLOCK_N": block_n,
                "SWAP": swap,
                "TMA": tma,
                "num_warps": warp,
                "num_stages": stage,
            }


def random_fp8(*shape: int, device: str = "cuda") -> Tensor:
    """Return a random tensor of finite non-negative E4M3 numbers."""
    return torch.randint(0, 127, shape, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)


def key(value: object) -> str:
    """Return the candidate ``value`` as a string that identifies it."""
    return json.dumps(value, sort_keys=True)


def without(config: Config, *names: str) -> dict[str, Any]:
    """Return a copy of a configuration without the keys ``names``."""
    return {key: value for key, value in config.items() if key not in names}


def check_refusal(error: Exception) -> None:
    """Raise ``error`` again if it is a CUDA error of the device.

    Errors of the compiler are expected for some candidates, and ignored.
    """
    if "CUDA error" in str(error):
        raise error


class TuningRun:
    """A time-limited run that fills one table.

    Attributes:
        path: File of the table.
        table: Row count -> configuration, as far as measured.
        failed: Keys of the candidates that do not compile.
    """

    def __init__(self, path: Path, seconds: float, workers: int, log: Log) -> None:
        self.path = path
        self._workers = workers
        self._log = log
        self._end = time.monotonic() + seconds
        self.table: Table = tuned_tables.begun(path)
        self.failed: set[str] = set()

    def compiled(
        self,
        rows: Sequence[int],
        candidates: Callable[[int], Any],
        compile_: Callable[..., list[str]],
        *more: object,
    ) -> Iterator[int]:
        """Compile the candidates of all row counts that the table lacks, then yield these counts.

        None is yielded after the time limit.

        Args:
            rows: Row counts of the table.
            candidates: Row count -> its candidates.
            compile_: Compiles candidates in a worker process; returns the keys that failed.
            *more: Further arguments of ``compile_``.
        """
        left = [number for number in rows if number not in self.table]
        wanted = list({key(c): c for number in left for c in candidates(number)}.values())
        shares = [
            share for number in range(self._workers) if (share := wanted[number :: self._workers])
        ]
        if shares:
            with ProcessPoolExecutor(len(shares), get_context("spawn")) as pool:
                done = [pool.submit(compile_, share, *more) for share in shares]
                self.failed = {name for share in done for name in share.result()}
            self._log(
                f"{self.path.name}: compiled {len(wanted)} candidates, {len(self.failed)} failed"
            )
        for position, number in enumerate(left):
            if time.monotonic() > self._end:
                self._log(f"time limit reached; not measured: {left[position:]} rows")
                return
            yield number

    def within_time(
        self, measured: Iterator[tuple[float, Config]]
    ) -> Iterator[tuple[float, Config]]:
        """Yield (microseconds, configuration) pairs until time is up, but at least one pair."""
        for item in measured:
            yield item
            if time.monotonic() > self._end:
                return

    def keep(self, rows: int, config: Config, line: str) -> None:
        """Add the configuration for ``rows`` rows to the table, write it, and log ``line``."""
        self.table[rows] = dict(config)
        tuned_tables.keep(self.path, self.table)
        self._log(line)
