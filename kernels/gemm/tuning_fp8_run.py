"""What the tuners of FP8 products share: tiles that fit, a table filled within a time, kernels
compiled ahead.
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

from glowplug.kernels.gemm.fp8 import BLOCK
from glowplug.kernels.launch import tuned_tables as tuned
from glowplug.kernels.launch.tuned_tables import Config

SHARED_MEMORY = 225_000  #: bytes a program may use on Hopper
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
    for block_n, warp, stage, tma in product(blocks_n, warps, stages, (True, False)):
        if stage * (weights * block_n + block_m) * BLOCK <= SHARED_MEMORY:
            yield {
                "BLOCK_N": block_n,
                "SWAP": swap,
                "TMA": tma,
                "num_warps": warp,
                "num_stages": stage,
            }


def key(what: object) -> str:
    return json.dumps(what, sort_keys=True)


def without(config: Config, name: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != name}


def check_refusal(error: Exception) -> None:
    """A compiler's refusal is expected; a broken device is not."""
    if "CUDA error" in str(error):
        raise error


class TuningRun:
    """One table being filled: what it holds, how much time is left, what does not compile."""

    def __init__(self, path: Path, seconds: float, workers: int, log: Log) -> None:
        self.path = path
        self._workers = workers
        self._log = log
        self._end = time.monotonic() + seconds
        self.table: Table = (
            {int(k): v for k, v in json.loads(path.read_text()).items()} if path.is_file() else {}
        )
        self.failed: set[str] = set()

    def compiled(
        self,
        rows: Sequence[int],
        candidates: Callable[[int], Any],
        compile_: Callable[..., list[str]],
        *more: object,
    ) -> Iterator[int]:
        """Numbers of rows still to be measured, once every candidate is compiled, until time is up."""
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
                f"{self.path.name}: {len(wanted)} compiled, {len(self.failed)} of them refused"
            )
        for position, number in enumerate(left):
            if time.monotonic() > self._end:
                self._log(f"out of time; not measured: {left[position:]}")
                return
            yield number

    def within_time(
        self, measured: Iterator[tuple[float, Config]]
    ) -> Iterator[tuple[float, Config]]:
        """At least one measurement, and no more once time is up."""
        for item in measured:
            yield item
            if time.monotonic() > self._end:
                return

    def keep(self, rows: int, config: Config, line: str) -> None:
        self.table[rows] = dict(config)
        tuned.keep(self.path, self.table)
        self._log(line)
