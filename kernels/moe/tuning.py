"""Tuner for routed experts: measure tiles and write the table that ``moe.tiles`` reads.

The two GEMMs are timed separately, in a CUDA graph, over several routings in turn, so that weights
are read from device memory as in a model. Worker processes compile the kernels ahead of time,
because compiling takes longer than measuring.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

from glowplug.kernels.launch import tuned_tables
from glowplug.kernels.launch.integers import next_power_of_2
from glowplug.kernels.launch.timing import microseconds
from glowplug.kernels.launch.tuned_tables import Config
from glowplug.kernels.moe import (
    gemm,
    gemm_hopper,
    gemv,
)
from glowplug.kernels.moe.align import Alignment, align
from glowplug.kernels.moe.experts import fused_shared_mlp
from glowplug.kernels.moe.sum import moe_sum
from glowplug.kernels.moe.tiles import (
    SHARED_TILE_TOKENS_MAX,
    ExpertsProblem,
    fused_shared_has_own_tiles,
)
from glowplug.kernels.moe.tuning_candidates import candidates

TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
Measured = tuple[float, Config]  #: (microseconds, configuration)


@dataclass
class Bench:
    """Weights of a problem, and methods that make random routings and run one GEMM.

    The last ``fused_shared`` experts are fused shared experts.
    """

    problem: ExpertsProblem
    w13: Tensor
    w2: Tensor
    fused_shared: int

    @staticmethod
    def make(
        problem: ExpertsProblem, fused_shared: int, held: int = 0, device: str = "cuda"
    ) -> Bench:
        """Return a bench with random weights of ``held`` experts (0: all of the problem's)."""
        count = held or problem.experts
        dtype = getattr(torch, problem.dtype)
        w13 = torch.empty(
            count, 2 * problem.inter, problem.hidden, dtype=dtype, device=device
        ).normal_(std=0.02)
        w2 = torch.empty(count, problem.hidden, problem.inter, dtype=dtype, device=device).normal_(
            std=0.02
        )
        return Bench(problem, w13, w2, fused_shared)

    def routing(self, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return random (ids, weights) that route ``tokens`` tokens.

        Every token has all fused shared experts; its other experts are drawn uniformly, also among
        those of other ranks, whose ids are -1.
        """
        device = self.w13.device
        generator = torch.Generator(device).manual_seed(seed)
        routed = len(self.w13) - self.fused_shared
        layer = routed + self.problem.others
        ids = torch.rand(tokens, layer, generator=generator, device=device)
        ids = ids.topk(min(layer, self.problem.topk - self.fused_shared), 1).indices.int()
        ids.masked_fill_(ids >= routed, -1)
        always = torch.arange(
            routed, routed + self.fused_shared, dtype=torch.int32, device=device
        ).expand(tokens, -1)
        ids = torch.cat([ids, always], 1)
        return ids, torch.rand(ids.shape, generator=generator, device=device)

    def separate_shared(self, config: Config, tokens: int) -> int:
        """Return the number of fused shared experts that are computed outside the alignment."""
        return (
            self.fused_shared
            if fused_shared_has_own_tiles(config, tokens) or config["way"] == "hopper"
            else 0
        )

    def align(self, config: Config, ids: Tensor) -> Alignment | None:
        """Return the alignment of ``ids`` that a configuration needs; None if it needs none."""
        separate_shared = self.separate_shared(config, len(ids))
        return (
            align(ids, len(self.w13) - separate_shared, config["block_m"], separate_shared)
            if aligns(config)
            else None
        )

    def rows(self, product: str, config: Config, tokens: int, aligned: Alignment | None) -> Tensor:
        """Return random input of a GEMM for ``tokens`` tokens. ``product``: "up" or "down"."""
        pairs = tokens * self.problem.topk
        if aligned is not None:
            separate_shared = (
                0 if config["way"] == "hopper" else self.separate_shared(config, tokens)
            )
            pairs = len(aligned.sorted_pairs) + separate_shared * tokens
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
        """Run the GEMM ``product``, "up" or "down", on the input x."""
        separate_shared = self.separate_shared(config, len(ids))
        if config["way"] == "hopper":
            return self._run_hopper(product, config, x, ids, weights, aligned)
        if product == "up":
            return (
                gemv.up(x, self.w13, ids, config)
                if config["way"] == "gemv"
                else gemm.up(x, self.w13, ids, aligned, config, separate_shared)
            )
        return (
            gemv.down(x, self.w2, ids, weights, config)
            if config["way"] == "gemv"
            else gemm.down(x, self.w2, ids, weights, aligned, config, separate_shared)
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
        kept = ids.shape[1] - max(self.fused_shared - 1, 0)
        rows = torch.empty(len(ids), kept, self.problem.hidden, dtype=x.dtype, device=x.device)
        if product == "down":
            return gemm_hopper.down(x, self.w2, weights, aligned, config, rows)
        if self.fused_shared:
            fused_shared_mlp(
                x, self.w13[-self.fused_shared :], self.w2[-self.fused_shared :], rows[:, -1]
            )
        return gemm_hopper.up(x, self.w13, ids, aligned, config)


def aligns(config: Config) -> bool:
    """Return whether the kernel of a configuration needs an alignment."""
    return config["way"] in ("sorted", "hopper")


def _compile(
    problem: ExpertsProblem, fused_shared: int, wanted: Sequence[tuple[str, Config, int]]
) -> list[str]:
    """Run each (GEMM, configuration, tokens) once, so that its kernel is cached on disk.

    Only a few of the problem's experts are allocated for this.

    Returns:
        Keys of the configurations that failed.
    """
    bench = Bench.make(problem, fused_shared, held=problem.topk)
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


def _equivalent_tokens(config: Config, tokens: int, fused_shared: int) -> int:
    """Return a small token count for which the same kernel is compiled as for ``tokens``."""
    if fused_shared and fused_shared_has_own_tiles(config, tokens):
        return min(SHARED_TILE_TOKENS_MAX, next_power_of_2(tokens))
    return 16


def compile_ahead(
    problem: ExpertsProblem, fused_shared: int, tokens: Sequence[int], workers: int
) -> set[str]:
    """Compile every candidate and return the keys of those that do not compile.

    Args:
        problem: The experts.
        fused_shared: Number of fused shared experts, the last ones.
        tokens: Token counts whose candidates are compiled.
        workers: Processes.
    """
    wanted = {
        json.dumps([product, config, equivalent]): (product, config, equivalent)
        for number in tokens
        for product in ("up", "down")
        for config in candidates(product, problem, number)
        for equivalent in (_equivalent_tokens(config, number, fused_shared),)
    }
    shares = [list(wanted.values())[number::workers] for number in range(workers)]
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        done = [pool.submit(_compile, problem, fused_shared, share) for share in shares if share]
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
    """Return the microseconds that an alignment and the final sum take for ``tokens`` tokens."""
    ids, _ = bench.routing(tokens, 0)
    rows = torch.empty(
        ids.numel(), bench.problem.hidden, dtype=bench.w13.dtype, device="cuda"
    ).normal_()
    return (
        microseconds([lambda: align(ids, len(bench.w13), 32)] * 4),
        microseconds([lambda: moe_sum(rows, ids)] * 4),
    )


def best_pair(
    found: dict[str, list[Measured]], aligning: float, summing: float
) -> tuple[float, dict[str, Config]]:
    """Return (microseconds, {"up", "down"}) of the fastest compatible pair of GEMMs.

    Args:
        found: Measurements of each GEMM.
        aligning: Microseconds of an alignment, added if the two GEMMs need one.
        summing: Microseconds of the final sum, added if the second GEMM does not sum.
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
    fused_shared: int,
    path: Path,
    *,
    tokens: Sequence[int] = TOKENS,
    seconds: float = 300.0,
    workers: int = 8,
    log: Callable[[str], None] = print,
) -> dict[int, Config]:
    """Find the fastest kernels for each token count that the table lacks; store each at once.

    Args:
        problem: The experts.
        fused_shared: Number of fused shared experts, the last ones.
        path: File of the table, ``tuned_tables.path_to_write(problem.table_name)``.
        tokens: Token counts of the table.
        seconds: Time limit.
        workers: Processes that compile kernels.
        log: Receives progress lines.

    Returns:
        The table: token count -> {"up", "down"}.
    """
    begin = time.monotonic()
    table = tuned_tables.begun(path)
    open_ = [number for number in tokens if number not in table]
    if not open_:
        return table
    failed = compile_ahead(problem, fused_shared, open_, workers)
    log(
        f"{asdict(problem)}: compiled in {time.monotonic() - begin:.0f} s; "
        f"{len(failed)} candidates do not compile"
    )
    bench = Bench.make(problem, fused_shared)
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
        tuned_tables.keep(path, table)
        log(
            f"{number} tokens: {spent:.1f} us; align {aligning:.1f}, sum {summing:.1f}; "
            + "; ".join(
                f"{product} {found[product][0][0]:.1f} {found[product][0][1]}"
                for product in ("up", "down")
            )
        )
    return table
