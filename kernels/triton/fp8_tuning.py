"""Measures configurations of the FP8 products and writes the tables that they read.

Each is timed inside a graph over several weights or routings in turn, so that weights come from memory as they do in a
model. Kernels are compiled ahead in processes of their own, because that takes longer than measuring them.
"""
from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from glowplug.kernels.triton import fp8_gemm, fp8_quant, moe_gemm_fp8
from glowplug.kernels.triton.fp8_gemm import BLOCK
from glowplug.kernels.triton.moe_tuning import microseconds
from glowplug.kernels.triton.tuned import Config

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
SHARED_MEMORY = 225_000  #: bytes a program may use on Hopper
COLD = 400 << 20  #: bytes of weights to go through in turn
CORES = 132
Table = dict[int, Config]
Log = Callable[[str], None]


def _tiles(swap: bool, block_m: int, blocks_n: Sequence[int], warps: Sequence[int], stages: Sequence[int],
           weights: int = 1) -> Iterator[dict[str, Any]]:
    for block_n, warp, stage, tma in product(blocks_n, warps, stages, (True, False)):
        if stage * (weights * block_n + block_m) * BLOCK <= SHARED_MEMORY:
            yield {"BLOCK_N": block_n, "SWAP": swap, "TMA": tma, "num_warps": warp, "num_stages": stage}


# ---- linear layers --------------------------------------------------------------------------------------------------


def _gemm_tiles(rows: int) -> list[dict[str, Any]]:
    if rows <= 64:
        block = max(16, triton.next_power_of_2(rows))
        return [{"BLOCK_M": block, **tile} for tile in _tiles(True, block, (64, 128), (4, 8), (3, 4, 6))]
    return [{"BLOCK_M": block, **tile} for block in (64, 128) for swap in ((False, True) if rows <= 256 else (False,))
            for tile in _tiles(swap, block, (128,) if rows > 256 else (64, 128), (4, 8), (3, 4))]


def gemm_candidates(rows: int, columns: int, depth: int) -> list[Config]:
    """Splits of the depth where tiles alone do not keep every core busy."""
    found: list[Config] = []
    for tile in _gemm_tiles(rows):
        tiles = triton.cdiv(rows, tile["BLOCK_M"]) * triton.cdiv(columns, tile["BLOCK_N"])
        found += [{**tile, "SPLIT_K": split} for split in range(1, 9)
                  if split == 1 or (depth // BLOCK // split >= 4 and tiles * split <= 4 * CORES)]
    return found


def _operands(rows: int, columns: int, depth: int, copies: int) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
    x = fp8_quant.quantize(torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16))
    weights = [random_fp8(columns, depth) for _ in range(copies)]
    return *x, weights, torch.rand(triton.cdiv(columns, BLOCK), triton.cdiv(depth, BLOCK), device="cuda")


def random_fp8(*shape: int) -> Tensor:
    """Every finite positive E4M3 number, on the device."""
    return torch.randint(0, 127, shape, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)


def _compile_gemm(wanted: Sequence[Config]) -> list[str]:
    failed = []
    for config in wanted:
        x, scales, (weight,), w_scales = _operands(16, 256, 1024, 1)
        try:
            fp8_gemm.gemm(x, scales, weight, w_scales, torch.bfloat16, {**config, "SPLIT_K": 1})
            fp8_gemm.gemm(x, scales, weight, w_scales, torch.bfloat16, {**config, "SPLIT_K": 2})
            torch.cuda.synchronize()
        except Exception as error:  # a compiler's refusal has no type of its own
            _is_refusal(error)
            failed.append(_key(config))
    return failed


def tune_gemm(columns: int, depth: int, path: Path, *, rows: Sequence[int] = ROWS, seconds: float = 60.0,
              workers: int = 8, log: Log = print) -> Table:
    """Measure each number of rows that ``path`` does not hold yet, writing it after each; stop after ``seconds``."""
    def candidates(number: int) -> list[Config]:
        return gemm_candidates(number, columns, depth)

    def kernels(number: int) -> list[Config]:
        return [{**tile, "FETCH": fetch_of(number, tile["BLOCK_M"])} for tile in _gemm_tiles(number)]

    def measure(number: int, configs: Sequence[Config]) -> Iterator[tuple[float, Config]]:
        x, scales, weights, w_scales = _operands(number, columns, depth, max(2, min(16, COLD // (columns * depth))))
        for config in configs:
            yield microseconds([lambda w=weight, c=config: fp8_gemm.gemm(x, scales, w, w_scales, torch.bfloat16, c)
                                for weight in weights], 2), config

    run = _Run(path, seconds, workers, log)
    for number in run.compiled(rows, kernels, _compile_gemm):
        usable = [c for c in candidates(number) if _key({**_without(c, "SPLIT_K"), "FETCH": fetch_of(
            number, c["BLOCK_M"])}) not in run.failed]
        best = min(run.within_time(measure(number, usable)), key=lambda item: item[0])
        run.keep(number, best[1], f"{columns}x{depth}, {number} rows: {best[0]:.1f} us {best[1]}")
    return run.table


def fetch_of(rows: int, block_m: int) -> int:
    return fp8_gemm.FETCH if rows <= block_m <= 32 else 0


# ---- routed experts -------------------------------------------------------------------------------------------------


class Problem(NamedTuple):
    """``experts`` held, of which the last ``shared`` are everybody's and count among a token's ``topk``."""

    experts: int
    topk: int
    hidden: int
    inter: int
    shared: int = 0

    @property
    def table_name(self) -> str:
        return moe_gemm_fp8.table_name(self.experts, self.inter, self.hidden)


@dataclass
class _Experts:
    w13: Tensor
    scales13: Tensor
    w2: Tensor
    scales2: Tensor

    @staticmethod
    def make(problem: Problem, held: int) -> _Experts:
        hidden, inter = problem.hidden, problem.inter
        return _Experts(random_fp8(held, 2 * inter, hidden),
                        torch.rand(held, 2 * inter // BLOCK, hidden // BLOCK, device="cuda"),
                        random_fp8(held, hidden, inter),
                        torch.rand(held, hidden // BLOCK, inter // BLOCK, device="cuda"))

    def call(self, kind: str, config: Config, x: tuple[Tensor, Tensor], ids: Tensor, weights: Tensor,
             tiles: moe_gemm_fp8.Tiles) -> object:
        tile, pairs, per_token = config["BLOCK_M"], ids.numel(), ids.shape[1]
        own = _without(config, "BLOCK_M")
        if kind == "gated":
            return moe_gemm_fp8.gated_product(*x, self.w13, self.scales13, tiles, tile, pairs, per_token, own)
        if kind == "plain":
            return fp8_quant.silu_and_mul(moe_gemm_fp8.product(
                *x, self.w13, self.scales13, tiles, tile, pairs, per_token, torch.bfloat16, own))
        return moe_gemm_fp8.product(*x, self.w2, self.scales2, tiles, tile, pairs, 1, torch.bfloat16, own, weights,
                                    moe_gemm_fp8.fetch_of(tile))


def routing(problem: Problem, held: int, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """(ids, weights): the last ``shared`` experts for everybody, the others evenly."""
    generator = torch.Generator("cuda").manual_seed(seed)
    routed = held - problem.shared
    ids = torch.rand(tokens, routed, generator=generator, device="cuda")
    ids = ids.topk(min(routed, problem.topk - problem.shared), 1).indices.int()
    always = torch.arange(routed, held, dtype=torch.int32, device="cuda").expand(tokens, -1)
    ids = torch.cat([ids, always], 1)
    return ids, torch.rand(ids.shape, generator=generator, device="cuda")


def expert_candidates(tokens: int, problem: Problem) -> Iterator[tuple[str, Config]]:
    """(kind of product, configuration) by the rows that an expert gets."""
    load = tokens * problem.topk / problem.experts
    for block in (16, 32, 64, 128):
        if (block > 16 and load < block / 4) or load > 8 * block:
            continue
        few = block <= 64 and load <= 64
        warps, stages = ((4, 8), (3, 4, 6)) if few else ((8, 4), (3, 4))
        for tile in _tiles(few, block, (128,), warps, stages, 2):
            yield "gated", {"BLOCK_M": block, **tile}
        for tile in _tiles(few, block, (64, 128) if few else (128,), warps, stages):
            yield "second", {"BLOCK_M": block, **tile}
            if not few:
                yield "plain", {"BLOCK_M": block, **tile}


def _compile_experts(wanted: Sequence[tuple[str, Config]], problem: Problem) -> list[str]:
    held = problem.shared + 4
    bench = _Experts.make(problem, held)
    failed = []
    for kind, config in wanted:
        ids, weights = routing(problem._replace(topk=problem.shared + 4), held, 8, 0)
        try:
            bench.call(kind, config, _input(kind, 8, ids, problem), ids, weights,
                       moe_gemm_fp8.tiles_of(ids, held, config))
            torch.cuda.synchronize()
        except Exception as error:
            _is_refusal(error)
            failed.append(_key((kind, config)))
    return failed


def _input(kind: str, tokens: int, ids: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    rows, depth = (ids.numel(), problem.inter) if kind == "second" else (tokens, problem.hidden)
    return fp8_quant.quantize(torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16))


def tune_experts(problem: Problem, path: Path, *, tokens: Sequence[int] = ROWS, seconds: float = 300.0,
                 workers: int = 8, log: Log = print) -> Table:
    """As :func:`tune_gemm`, for the products of routed experts."""
    run = _Run(path, seconds, workers, log)
    bench: _Experts | None = None
    for number in run.compiled(tokens, lambda n: expert_candidates(n, problem), _compile_experts, problem):
        bench = bench or _Experts.make(problem, problem.experts)
        routes = [routing(problem, problem.experts, number, seed) for seed in range(8 if number <= 64 else 3)]
        best: dict[tuple[str, int], tuple[float, Config]] = {}
        for paired in ((False, True) if number <= 4 else (False,)):
            wanted = [(kind, c) for kind, c in expert_candidates(number, problem) if _key((kind, c)) not in run.failed]
            for kind, config in wanted:
                x = _input(kind, number, routes[0][0], problem)
                lists = [moe_gemm_fp8.tiles_of(ids, problem.experts, {**config, "PAIRED": paired}) for ids, _ in routes]
                spent = microseconds([lambda b=bench, r=r, t=t, k=kind, c=config, v=x: b.call(k, c, v, *r, t)
                                      for r, t in zip(routes, lists)], 2)
                slot = (kind, config["BLOCK_M"] + (1 if paired else 0))
                if slot not in best or spent < best[slot][0]:
                    best[slot] = spent, config
        spent, chosen = _cheapest(best)
        run.keep(number, chosen, f"{number} tokens: {spent:.1f} us {chosen}")
    return run.table


ALIGNING = 4.0  #: microseconds of an alignment of few tokens


def _cheapest(best: dict[tuple[str, int], tuple[float, Config]]) -> tuple[float, Config]:
    """The pair of products of one tile size that together take the least."""
    found = []
    for (kind, tile), first in best.items():
        if kind == "second" or ("second", tile) not in best:
            continue
        second = best["second", tile]
        paired = tile % 2 == 1
        found.append((first[0] + second[0] + (0.0 if paired else ALIGNING), {
            "BLOCK_M": tile - paired, "FUSE": kind == "gated", "PAIRED": paired,
            "first": _without(first[1], "BLOCK_M"), "second": _without(second[1], "BLOCK_M")}))
    return min(found, key=lambda item: item[0])


# ---- a run ----------------------------------------------------------------------------------------------------------


def _key(what: object) -> str:
    return json.dumps(what, sort_keys=True)


def _without(config: Config, name: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != name}


def _is_refusal(error: Exception) -> None:
    """A compiler's refusal is expected; a broken device is not."""
    if "CUDA error" in str(error):
        raise error


class _Run:
    """One table being filled: what it holds, how much time is left, what does not compile."""

    def __init__(self, path: Path, seconds: float, workers: int, log: Log) -> None:
        self.path, self._workers, self._log = path, workers, log
        self._end = time.monotonic() + seconds
        self.table: Table = {int(k): v for k, v in json.loads(path.read_text()).items()} if path.is_file() else {}
        self.failed: set[str] = set()

    def compiled(self, rows: Sequence[int], candidates: Callable[[int], Any], compile_: Callable[..., list[str]],
                 *more: object) -> Iterator[int]:
        """Numbers of rows still to be measured, once every candidate is compiled, until time is up."""
        left = [number for number in rows if number not in self.table]
        wanted = list({_key(c): c for number in left for c in candidates(number)}.values())
        shares = [share for number in range(self._workers) if (share := wanted[number :: self._workers])]
        if shares:
            with ProcessPoolExecutor(len(shares), get_context("spawn")) as pool:
                done = [pool.submit(compile_, share, *more) for share in shares]
                self.failed = {name for share in done for name in share.result()}
            self._log(f"{self.path.name}: {len(wanted)} compiled, {len(self.failed)} of them refused")
        for position, number in enumerate(left):
            if time.monotonic() > self._end:
                self._log(f"out of time; not measured: {left[position:]}")
                return
            yield number

    def within_time(self, measured: Iterator[tuple[float, Config]]) -> Iterator[tuple[float, Config]]:
        """At least one measurement, and no more once time is up."""
        for item in measured:
            yield item
            if time.monotonic() > self._end:
                return

    def keep(self, rows: int, config: Config, line: str) -> None:
        self.table[rows] = dict(config)
        self.path.write_text(json.dumps(dict(sorted(self.table.items())), indent=1) + "\n")
        self._log(line)
