"""Measures configurations of the block-scaled FP8 product and writes the tables that ``fp8_gemm`` reads.

Calls run inside a graph over several copies of the weight in turn, so that it comes from memory as it does in a model.
"""
from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
import triton
from torch import Tensor

from glowplug.kernels.triton import fp8_gemm, fp8_quant, tuned
from glowplug.kernels.triton.fp8_gemm import BLOCK
from glowplug.kernels.triton.moe_tuning import SHARED_MEMORY, microseconds
from glowplug.kernels.triton.tuned import Config

ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
BEYOND_CACHE = 128 << 20  #: bytes of weights that are read in turn
SPLITS = (1, 2, 4, 8)
Timing = Callable[[Sequence[Callable[[], object]]], float]


def table_path(columns: int, depth: int) -> Path:
    return tuned.FOLDER / tuned.file_name(f"N={columns},K={depth}", fp8_gemm.DTYPE, (BLOCK, BLOCK))


def candidates(rows: int, columns: int, depth: int) -> list[Config]:
    """The rule's choice first: it is measured whatever the time."""
    found = [fp8_gemm.rule(rows, columns, depth), *(_few(rows, columns, depth) if rows <= 64 else _many(rows))]
    different = {json.dumps(config, sort_keys=True): config for config in found}
    return [config for config in different.values() if _fits(config)]


def _few(rows: int, columns: int, depth: int) -> Iterator[Config]:
    """The weight fills the wide side; as many programs as cores, by splitting the depth."""
    block_m = max(16, triton.next_power_of_2(rows))
    for block_n in (64, 128):
        programs = triton.cdiv(columns, block_n)
        for split in SPLITS:
            if split > 1 and (programs * split > 4 * 132 or depth // BLOCK // split < 3):
                continue
            for tma, stages in ((True, 4), (True, 6), (False, 4), (False, 6)):
                yield _config(block_m, block_n, split, True, tma, 4, stages)


def _many(rows: int) -> Iterator[Config]:
    """Tensor cores are what takes time."""
    for block_m, block_n, warps in ((64, 128, 4), (128, 64, 4), (128, 128, 8), (64, 64, 4), (64, 256, 8)):
        if block_m > 64 and rows <= 64:
            continue
        for swap in (False, True):
            for tma in (True, False):
                for stages in (3, 4):
                    yield _config(block_m, block_n, 1, swap, tma, warps, stages)


def _config(block_m: int, block_n: int, split: int, swap: bool, tma: bool, warps: int, stages: int) -> Config:
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "SPLIT_K": split, "SWAP": swap, "TMA": tma, "num_warps": warps,
            "num_stages": stages}


def _fits(config: Config) -> bool:
    tiles: int = config["num_stages"] * (config["BLOCK_M"] + config["BLOCK_N"]) * BLOCK
    return tiles <= SHARED_MEMORY and config["BLOCK_N"] <= 128  # a block of scales is as wide as a program's columns


@dataclass
class Bench:
    """Operands of one product: x, and copies of the weight. ``padded`` weights have whole blocks of rows."""

    x: Tensor
    x_scales: Tensor
    padded: list[Tensor]
    columns: int
    w_scales: Tensor

    @staticmethod
    def make(rows: int, columns: int, depth: int, device: str = "cuda", copies: int | None = None) -> Bench:
        generator = torch.Generator(device).manual_seed(rows)
        x = torch.randn(rows, depth, device=device, generator=generator).bfloat16()
        if copies is None:
            copies = min(32, max(1, -(-BEYOND_CACHE // (columns * depth))))
        whole = -(-columns // BLOCK) * BLOCK
        weights = [torch.randn(whole, depth, device=device, generator=generator).to(torch.float8_e4m3fn)
                   for _ in range(copies)]
        scales = torch.full((whole // BLOCK, -(-depth // BLOCK)), 0.01, device=device)
        return Bench(*fp8_quant.quantize(x), weights, columns, scales)

    def calls(self, config: Config) -> list[Callable[[], object]]:
        """The product by our own kernel, once for each copy of the weight, four at least."""
        weights = [weight[: self.columns] for weight in self.padded]
        return [lambda w=weight: fp8_gemm.gemm(self.x, self.x_scales, w, self.w_scales,  # type: ignore[misc]
                                               torch.bfloat16, config)
                for weight in (weights * 4)[: max(4, len(weights))]]


def _compile(wanted: Sequence[tuple[int, Config]]) -> list[str]:
    """Run each configuration once on a small weight, so that its kernel is in the cache on disk; what failed."""
    failed = []
    for rows, config in wanted:
        bench = Bench.make(rows, 256, 2048, copies=1)
        try:
            bench.calls(config)[0]()
            torch.cuda.synchronize()
        except Exception as error:  # a compiler's refusal has no type of its own
            if "CUDA error" in str(error):
                raise
            failed.append(json.dumps(config, sort_keys=True))
    return failed


def compile_ahead(wanted: Sequence[tuple[int, Config]], workers: int) -> set[str]:
    """Compile every (rows, configuration), ``workers`` at a time. Returns those that do not compile."""
    different = list({(min(rows, 16), json.dumps(config, sort_keys=True)): (rows, config)
                      for rows, config in wanted}.values())
    shares = [different[number::workers] for number in range(workers)]
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        done = [pool.submit(_compile, share) for share in shares if share]
        return {name for share in done for name in share.result()}


def fastest(bench: Bench, configs: Sequence[Config], deadline: float, timing: Timing = microseconds) -> tuple[
        float, Config]:
    """(microseconds, configuration) of the best of those measured before ``deadline``; one is measured in any case."""
    best: tuple[float, Config] | None = None
    for config in configs:
        if best is not None and time.monotonic() > deadline:
            break
        spent = timing(bench.calls(config))
        if best is None or spent < best[0]:
            best = spent, config
    assert best is not None, "a product without a configuration"
    return best


def write_row(path: Path, rows: int, config: Config) -> None:
    """Add one measurement to a table."""
    table = {int(key): value for key, value in json.loads(path.read_text()).items()} if path.is_file() else {}
    table[rows] = config
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict(sorted(table.items())), indent=1) + "\n")
