"""Tuner for routed experts: measure tiles and write the table that ``moe.tiles`` reads.

The two GEMMs are timed separately, in a CUDA graph, over several routings in turn, so that weights
are read from device memory as in a model. Worker processes compile the kernels ahead of time,
because compiling takes longer than measuring.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

from glowplug.kernels.launch import tuned_tables as tuned
from glowplug.kernels.launch.integers import next_power_of_2
from glowplug.kernels.launch.tuned_tables import Config
from glowplug.kernels.moe import (
    fused_shared as moe_shared,
    gemm as moe_gemm,
    gemm_hopper as moe_gemm_hopper,
    gemv as moe_gemv,
)
from glowplug.kernels.moe.align import Alignment, align
from glowplug.kernels.moe.sum import moe_sum
from glowplug.kernels.moe.tiles import SHARED_TILE_TOKENS_MAX, ExpertsProblem, has_wide_tiles, tile

TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
SHARED_MEMORY = 225_000  #: bytes of shared memory that a CTA may use on Hopper
Measured = tuple[float, Config]  #: (microseconds, configuration)


def _fits(
    product: str, config: Config, problem: ExpertsProblem, tokens: int, width: int = 2
) -> bool:
    """Return whether the tiles, also those of fused shared experts, fit into shared memory.

    Tiles of more than 128 columns must also divide the columns evenly. ``width``: bytes a number.
    """
    columns, products = (problem.inter, 2) if product == "up" else (problem.hidden, 1)
    tiles = [(config["block_m"], config["block_n"], config["block_k"])]
    if has_wide_tiles(config, tokens):
        tiles.append(moe_gemm.wide_tile(tokens, product == "up", config))
    most = max((rows + products * each) * depth for rows, each, depth in tiles)
    divide = all(each <= 128 or columns % each == 0 for _, each, _ in tiles)
    return divide and config["stages"] * most * width <= SHARED_MEMORY


def _streaming() -> Iterator[Config]:
    """Yield configurations for low loads, which are limited by reading weights."""
    for way, block_m in (("dense", 16), ("dense", 32), ("sorted", 16), ("sorted", 32)):
        for block_n, block_k, warps, stages, swap, tma in (
            (64, 128, 4, 3, 0, 0),
            (64, 128, 4, 4, 0, 0),
            (64, 64, 4, 5, 0, 0),
            (128, 64, 4, 4, 0, 0),
            (128, 128, 4, 2, 0, 0),
            (32, 128, 4, 4, 0, 0),
            (32, 256, 4, 3, 0, 0),
            (64, 128, 4, 3, 0, 1),
            (64, 128, 4, 4, 0, 1),
            (32, 128, 4, 5, 0, 1),
            (64, 128, 4, 2, 1, 1),
            (64, 128, 4, 3, 1, 1),
            (64, 128, 4, 4, 1, 1),
            (64, 64, 4, 5, 1, 1),
            (64, 256, 4, 3, 1, 1),
            (128, 64, 4, 4, 1, 1),
            (128, 128, 4, 3, 1, 1),
            (128, 128, 8, 3, 1, 1),
            (128, 64, 4, 3, 1, 0),
        ):
            yield tile(
                way, block_m, block_n, block_k, warps, stages, swap=bool(swap), tma=bool(tma)
            )
    # an expert's column blocks side by side: for V2-Lite's first GEMM with 192 to 384 tokens
    for block_m in (32, 64):
        yield tile("sorted", block_m, 128, 64, 4, 5, group=4, swap=True, tma=True)
    yield tile("sorted", 32, 64, 128, 4, 3, group=8, swap=True)
    # activations loaded for more columns at once, above all for the fused shared experts
    for block_m in (16, 32):
        for block_n, block_k, warps, stages, tma, wide in (
            (128, 64, 4, 3, 0, 128),
            (128, 128, 8, 3, 1, 128),
            (256, 64, 8, 3, 0, 128),
            (256, 64, 8, 3, 1, 128),
            (256, 64, 8, 4, 0, 128),
            (256, 64, 4, 3, 0, 64),
            (256, 64, 8, 3, 0, 256),
        ):
            for group in (8, 64):
                yield tile(
                    "sorted",
                    block_m,
                    block_n,
                    block_k,
                    warps,
                    stages,
                    group=group,
                    swap=True,
                    tma=bool(tma),
                    wide=wide,
                )


def _computing() -> Iterator[Config]:
    """Yield configurations for high loads, which are limited by the tensor cores."""
    for block_m, block_n, block_k, warps, stages in (
        (64, 64, 64, 4, 4),
        (64, 64, 128, 4, 3),
        (64, 128, 64, 4, 3),
        (64, 128, 64, 4, 4),
        (64, 256, 64, 8, 3),
        (128, 64, 64, 4, 4),
        (128, 64, 64, 8, 4),
        (128, 128, 64, 8, 3),
        (128, 128, 64, 8, 4),
        (128, 256, 64, 8, 3),
        (128, 256, 64, 8, 4),
        (256, 64, 64, 8, 3),
        (256, 128, 64, 8, 3),
    ):
        for tma in (False, True):
            for group in (8, 32):
                yield tile("sorted", block_m, block_n, block_k, warps, stages, group=group, tma=tma)


def _hopper(problem: ExpertsProblem) -> Iterator[Config]:
    """Yield configurations of the Hopper kernel for high loads, if the sizes fit."""
    if (
        problem.dtype == "float32"
        or problem.hidden % moe_gemm_hopper.DEPTH
        or problem.inter % moe_gemm_hopper.DEPTH
    ):
        return
    for block_m, lead in ((128, 2), (192, 1)):
        for group in (4, 8):
            yield {"way": "hopper", "block_m": block_m, "group": group, "lead": lead, "apart": 1}


def _vectors() -> Iterator[Config]:
    """Yield "gemv" configurations."""
    for block_n, block_k, warps in (
        (2, 512, 2),
        (2, 512, 4),
        (4, 256, 2),
        (4, 512, 2),
        (4, 512, 4),
        (8, 256, 4),
        (8, 512, 4),
        (1, 1024, 2),
        (2, 1024, 2),
        (2, 1024, 4),
        (4, 1024, 4),
        (1, 2048, 4),
        (2, 2048, 4),
        (16, 256, 4),
    ):
        yield {"way": "gemv", "block_n": block_n, "block_k": block_k, "warps": warps}


def candidates(
    product: str, problem: ExpertsProblem, tokens: int, hopper: bool = False
) -> list[Config]:
    """Return the configurations to measure.

    Args:
        product: "up" or "down".
        problem: The experts.
        tokens: Tokens of a step.
        hopper: Include the Hopper kernel's configurations even without such a card.
    """
    load = tokens * problem.topk / problem.experts
    found: list[Config] = [*_vectors()] if tokens <= 4 else []
    if load <= 64:
        found += [
            c
            for c in _streaming()
            if (
                c["block_m"] == max(16, next_power_of_2(tokens))
                if c["way"] == "dense"
                else 8 < tokens and c["block_m"] <= 4 * load + 16
            )
        ]
    found = [c for c in found if "wide" not in c or has_wide_tiles(c, tokens)]
    if load >= 6:
        found += [c for c in _computing() if c["block_m"] <= max(64, 4 * load)]
    found = [c for c in found if c["way"] == "gemv" or _fits(product, c, problem, tokens)]
    return (
        [*found, *_hopper(problem)]
        if load >= 48 and (hopper or moe_gemm_hopper.supported())
        else found
    )


@dataclass
class Bench:
    """Weights of a problem, and methods that draw routings and run one GEMM.

    The last ``shared`` experts are fused shared experts.
    """

    problem: ExpertsProblem
    w13: Tensor
    w2: Tensor
    shared: int

    @staticmethod
    def make(problem: ExpertsProblem, shared: int, held: int = 0, device: str = "cuda") -> Bench:
        """Draw random weights of ``held`` experts (0: all of the problem's)."""
        count = held or problem.experts
        dtype = getattr(torch, problem.dtype)
        w13 = torch.empty(
            count, 2 * problem.inter, problem.hidden, dtype=dtype, device=device
        ).normal_(std=0.02)
        w2 = torch.empty(count, problem.hidden, problem.inter, dtype=dtype, device=device).normal_(
            std=0.02
        )
        return Bench(problem, w13, w2, shared)

    def routing(self, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
        """Draw (ids, weights): fused shared experts for every token, the others uniformly."""
        device = self.w13.device
        generator = torch.Generator(device).manual_seed(seed)
        routed = len(self.w13) - self.shared
        ids = torch.rand(tokens, routed, generator=generator, device=device)
        ids = ids.topk(min(routed, self.problem.topk - self.shared), 1).indices.int()
        always = torch.arange(
            routed, routed + self.shared, dtype=torch.int32, device=device
        ).expand(tokens, -1)
        ids = torch.cat([ids, always], 1)
        return ids, torch.rand(ids.shape, generator=generator, device=device)

    def wide(self, config: Config, tokens: int) -> int:
        """Return the number of fused shared experts that are computed outside the alignment."""
        return self.shared if has_wide_tiles(config, tokens) or config["way"] == "hopper" else 0

    def align(self, config: Config, ids: Tensor) -> Alignment | None:
        """Return the alignment that a configuration needs, or None."""
        wide = self.wide(config, len(ids))
        return align(ids, len(self.w13) - wide, config["block_m"], wide) if aligns(config) else None

    def rows(self, product: str, config: Config, tokens: int, aligned: Alignment | None) -> Tensor:
        """Draw the input of GEMM ``product`` for ``tokens`` tokens."""
        pairs = tokens * self.problem.topk
        if aligned is not None:
            wide = 0 if config["way"] == "hopper" else self.wide(config, tokens)
            pairs = len(aligned.sorted_pairs) + wide * tokens
        rows, depth = (
            (tokens, self.problem.hidden) if product == "up" else (pairs, self.problem.inter)
        )
        return torch.empty(rows, depth, dtype=self.w13.dtype, device=self.w13.device).normal_()

    def run(
        self,
        product: str,
        config: Config,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        aligned: Alignment | None,
    ) -> Tensor:
        """Run GEMM ``product``, "up" or "down"."""
        wide = self.wide(config, len(ids))
        if config["way"] == "hopper":
            return self._run_hopper(product, config, x, ids, weights, aligned)
        if product == "up":
            return (
                moe_gemv.up(x, self.w13, ids, config)
                if config["way"] == "gemv"
                else moe_gemm.up(x, self.w13, ids, aligned, config, wide)
            )
        return (
            moe_gemv.down(x, self.w2, ids, weights, config)
            if config["way"] == "gemv"
            else moe_gemm.down(x, self.w2, ids, weights, aligned, config, wide)
        )

    def _run_hopper(
        self,
        product: str,
        config: Config,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        aligned: Alignment | None,
    ) -> Tensor:
        """Run a GEMM by the Hopper kernel. "up" includes the fused shared experts' dense MLP."""
        assert aligned is not None
        kept = ids.shape[1] - max(self.shared - 1, 0)
        rows = torch.empty(len(ids), kept, self.problem.hidden, dtype=x.dtype, device=x.device)
        if product == "down":
            return moe_gemm_hopper.down(x, self.w2, weights, aligned, config, rows)
        if self.shared:
            moe_shared.mlp(x, self.w13[-self.shared :], self.w2[-self.shared :], rows[:, -1])
        return moe_gemm_hopper.up(x, self.w13, ids, aligned, config)


def aligns(config: Config) -> bool:
    """Return whether a configuration needs an alignment."""
    return config["way"] in ("sorted", "hopper")


def microseconds(calls: Sequence[Callable[[], object]], repeats: int = 3) -> float:
    """Return the mean time of one of ``calls`` in a CUDA graph, the best of ``repeats`` replays."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times: list[float] = []
    for _ in range(repeats):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return min(times)


def _compile(
    problem: ExpertsProblem, shared: int, wanted: Sequence[tuple[str, Config, int]]
) -> list[str]:
    """Run each (GEMM, configuration, tokens) once on a few experts to fill the disk cache.

    Returns:
        Keys of the configurations that failed.
    """
    bench = Bench.make(problem, shared, held=problem.topk)
    failed = []
    for product, config, tokens in wanted:
        ids, weights = bench.routing(tokens, 0)
        aligned = bench.align(config, ids)
        x = bench.rows(product, config, tokens, aligned)
        try:
            bench.run(product, config, x, ids, weights, aligned)
            torch.cuda.synchronize()
        except Exception as error:  # compilers raise errors of many types
            failed.append(json.dumps([product, config]))
            if "CUDA error" in str(error):
                raise
    return failed


def _equivalent_tokens(config: Config, tokens: int, shared: int) -> int:
    """Return a small token count for which the same kernel is compiled as for ``tokens``."""
    if shared and has_wide_tiles(config, tokens):
        return min(SHARED_TILE_TOKENS_MAX, next_power_of_2(tokens))
    return 16


def compile_ahead(
    problem: ExpertsProblem, shared: int, tokens: Sequence[int], workers: int
) -> set[str]:
    """Compile every candidate in ``workers`` processes. Return those that do not compile."""
    wanted = {
        json.dumps([product, config, equivalent]): (product, config, equivalent)
        for number in tokens
        for product in ("up", "down")
        for config in candidates(product, problem, number)
        for equivalent in (_equivalent_tokens(config, number, shared),)
    }
    shares = [list(wanted.values())[number::workers] for number in range(workers)]
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        done = [pool.submit(_compile, problem, shared, share) for share in shares if share]
        return {name for share in done for name in share.result()}


def measure(
    bench: Bench, tokens: int, failed: set[str], deadline: float
) -> dict[str, list[Measured]]:
    """Measure the candidates for ``tokens`` until ``deadline``, at least one of each GEMM.

    Args:
        bench: Weights and routings.
        tokens: Tokens of a step.
        failed: Keys of the configurations that do not compile.
        deadline: Value of ``time.monotonic()``.

    Returns:
        {"up", "down"}: measurements, fastest first.
    """
    routings = [bench.routing(tokens, seed) for seed in range(8 if tokens <= 64 else 3)]
    found: dict[str, list[Measured]] = {"up": [], "down": []}
    for product in ("up", "down"):
        for config in candidates(product, bench.problem, tokens):
            if json.dumps([product, config]) in failed or (
                found[product] and time.monotonic() > deadline
            ):
                continue
            lists = [bench.align(config, ids) for ids, _ in routings]
            x = bench.rows(product, config, tokens, lists[0])
            calls = [
                partial(bench.run, product, config, x, ids, weights, aligned)
                for (ids, weights), aligned in zip(routings, lists)
            ]
            found[product].append((microseconds(calls), config))
        found[product].sort(key=lambda item: item[0])
    return found


def overheads(bench: Bench, tokens: int) -> tuple[float, float]:
    """Return the microseconds of an alignment and of the final sum."""
    ids, _ = bench.routing(tokens, 0)
    parts = torch.empty(
        ids.numel(), bench.problem.hidden, dtype=bench.w13.dtype, device="cuda"
    ).normal_()
    return (
        microseconds([lambda: align(ids, len(bench.w13), 32)] * 4),
        microseconds([lambda: moe_sum(parts, ids)] * 4),
    )


def best_pair(
    found: dict[str, list[Measured]], aligning: float, summing: float
) -> tuple[float, dict[str, Config]]:
    """Return (microseconds, {"up", "down"}) of the fastest compatible pair of GEMMs.

    Args:
        found: Measurements of each GEMM.
        aligning: Microseconds of an alignment, added if the pair needs one.
        summing: Microseconds of the final sum, added if the pair needs it.
    """

    def order(config: Config) -> tuple[bool, int]:
        return config["way"] == "hopper", config["block_m"] if aligns(config) else 0

    def total(up: Measured, down: Measured) -> float:
        aligned = aligning if aligns(up[1]) else 0.0
        return up[0] + down[0] + aligned + (0.0 if down[1]["way"] == "gemv" else summing)

    time_, up, down = min(
        (
            (total(up, down), up, down)
            for up in found["up"]
            for down in found["down"]
            if order(up[1]) == order(down[1])
        ),
        key=lambda item: item[0],
    )
    return time_, {"up": up[1], "down": down[1]}


def tune_experts(
    problem: ExpertsProblem,
    shared: int,
    path: Path,
    *,
    tokens: Sequence[int] = TOKENS,
    seconds: float = 300.0,
    workers: int = 8,
    log: Callable[[str], None] = print,
) -> dict[int, dict[str, Config]]:
    """Measure every token count missing from the table, writing the table after each.

    Args:
        problem: The experts.
        shared: Number of fused shared experts, the last ones.
        path: The table, ``tuned.FOLDER / problem.table_name``.
        tokens: Token counts of the table.
        seconds: Time limit.
        workers: Processes that compile kernels.
        log: Receives progress lines.

    Returns:
        The table: token count -> {"up", "down"}.
    """
    begin = time.monotonic()
    table = {int(k): v for k, v in json.loads(path.read_text()).items()} if path.is_file() else {}
    open_ = [number for number in tokens if number not in table]
    if not open_:
        return table
    failed = compile_ahead(problem, shared, open_, workers)
    log(
        f"{asdict(problem)}: compiled in {time.monotonic() - begin:.0f} s; "
        f"{len(failed)} candidates do not compile"
    )
    bench = Bench.make(problem, shared)
    for position, number in enumerate(open_):
        left = begin + seconds - time.monotonic()
        if left <= 0:
            log(f"time limit reached; not measured: {open_[position:]} tokens")
            break
        found = measure(
            bench, number, failed, time.monotonic() + left / (len(open_) - position) * 2
        )
        aligning, summing = overheads(bench, number)
        spent, table[number] = best_pair(found, aligning, summing)
        tuned.keep(path, table)
        log(
            f"{number} tokens: {spent:.1f} us; align {aligning:.1f}, sum {summing:.1f}; "
            + "; ".join(
                f"{product} {found[product][0][0]:.1f} {found[product][0][1]}"
                for product in ("up", "down")
            )
        )
    return table
