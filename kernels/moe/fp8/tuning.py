"""Tuner for routed experts in block FP8: measure tiles and write the table of ``moe.fp8.tiles``.

The two GEMMs are timed separately, in a CUDA graph, over several routings in turn, so that weights
are read from device memory as in a model. Worker processes compile the kernels ahead of time,
because compiling takes longer than measuring.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from glowplug.kernels.formats import fp8_triton
from glowplug.kernels.formats.fp8_block import FP8_BLOCK
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
from glowplug.kernels.launch import tuned_tables
from glowplug.kernels.launch.timing import microseconds
from glowplug.kernels.launch.tuned_tables import Config
from glowplug.kernels.moe.align import Alignment
from glowplug.kernels.moe.fp8 import gemm, gemm_hopper
from glowplug.kernels.moe.fp8.experts import hopper_gated_product
from glowplug.kernels.moe.fp8.pair_tiles import Tiles, tiles_of
from glowplug.kernels.moe.fp8.tiles import HOPPER_ROWS, fits_hopper, table_name
from glowplug.kernels.moe.gemm_hopper import card_is_hopper

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
ALIGN_MICROSECONDS = 4.0  #: time of an alignment of few tokens
PAIRED_TOKENS_MAX = 4  #: most tokens at which one pair per tile may be fastest
#: fewest rows of an expert at which ``ORDER`` "columns" may be fastest in the first GEMM
COLUMN_ORDER_ROWS_MIN = 8
DEPTH_SPLITS = (4, 7, 8)  #: depth splits tried for the first GEMM of few pairs
SPLIT_TOKENS_MAX = 2  #: most tokens at which depth splits are tried
HOPPER_ROWS_MIN = 16  #: fewest rows of an expert at which the Hopper kernel may be fastest
HOPPER_GROUPS = (1, 2, 4, 8)  #: heights of the Hopper kernel's tile groups that are tried
BFLOAT16_BYTES = 2
SKEWS = (0.0, 0.7)  #: skews of :func:`routing` that alternate, as loads of experts are uneven
#: options that were fastest with small tiles for V3's first GEMM with 8 to 128 tokens on an H200
ROUND_OPTIONS: Config = {"ORDER": "filled", "ROUND": 2}
#: (kind of GEMM, rows per tile, one pair per tile) -> (microseconds, configuration)
Best = dict[tuple[str, int, bool], tuple[float, Config]]


class Fp8ExpertsProblem(NamedTuple):
    """The experts of one layer on this rank.

    Attributes:
        experts: Experts held, fused shared experts included.
        topk: Experts of a token, fused shared experts included.
        hidden: Channels of x.
        inter: Channels between the two GEMMs.
        fused_shared: Number of fused shared experts, the last ones.
        others: Experts of the layer on other ranks; ids of -1 stand for them.
    """

    experts: int
    topk: int
    hidden: int
    inter: int
    fused_shared: int = 0
    others: int = 0

    @property
    def path(self) -> Path:
        """File to which this machine's table is written."""
        return tuned_tables.path_to_write(table_name(self.experts, self.inter, self.hidden))

    def load(self, tokens: int) -> float:
        """Return the mean number of rows of an expert if the experts are chosen uniformly."""
        return tokens * self.topk / (self.experts + self.others)


class _Routing(NamedTuple):
    """The experts of the tokens, in the tiles of one configuration.

    Attributes:
        ids: Experts of each token, [T, K]; -1: an expert of another rank.
        weights: Routing weights, [T, K].
        tiles: Tiles of ``ids``.
    """

    ids: Tensor
    weights: Tensor
    tiles: Tiles


@dataclass
class _Experts:
    """Random weights of experts, and methods that make the input of one GEMM and run it."""

    w13: Tensor
    scales13: Tensor
    w2: Tensor
    scales2: Tensor

    @staticmethod
    def make(problem: Fp8ExpertsProblem, held: int, device: str = "cuda") -> _Experts:
        """Return random weights of ``held`` experts, the number that a rank holds."""
        hidden = problem.hidden
        inter = problem.inter
        return _Experts(
            random_fp8(held, 2 * inter, hidden, device=device),
            torch.rand(held, 2 * inter // FP8_BLOCK, hidden // FP8_BLOCK, device=device),
            random_fp8(held, hidden, inter, device=device),
            torch.rand(held, hidden // FP8_BLOCK, inter // FP8_BLOCK, device=device),
        )

    def input(self, kind: str, config: Config, routing: _Routing) -> tuple[Tensor, Tensor]:
        """Return random quantised input of one GEMM, and its scales. Kinds as in :meth:`call`.

        The first GEMM has a row per token. The second has a row per pair, or for the Hopper kernel
        a row per position of the alignment, which may be more.
        """
        rows = len(routing.ids)
        depth = self.w13.shape[2]
        if kind == "second":
            rows = (routing.tiles.pairs if "GROUP" in config else routing.ids).numel()
            depth = self.w2.shape[2]
        x = torch.randn(rows, depth, device=self.w2.device, dtype=torch.bfloat16)
        return fp8_triton.quantize(x)

    def call(
        self, kind: str, config: Config, x: tuple[Tensor, Tensor], routing: _Routing
    ) -> object:
        """Run one GEMM: ``kind`` "gated" (first, activated), "plain" (first) or "second".

        ``x`` is the result of :meth:`input`, ``config`` one of :func:`variants`.
        """
        own = without(config, "BLOCK_M", "PAIRED")
        if "GROUP" in config:
            return self._on_hopper(kind, own, x, routing)
        ids, weights, tiles = routing
        tile = config["BLOCK_M"]
        pairs = ids.numel()
        per_token = ids.shape[1]
        if kind == "gated":
            return gemm.gated_product(
                *x, self.w13, self.scales13, tiles, tile, pairs, per_token, own
            )
        if kind == "plain":
            return fp8_triton.silu_and_mul(
                gemm.product(
                    *x, self.w13, self.scales13, tiles, tile, pairs, per_token, torch.bfloat16, own
                )
            )
        return gemm.product(
            *x,
            self.w2,
            self.scales2,
            tiles,
            tile,
            pairs,
            1,
            torch.bfloat16,
            own,
            weights,
            gemm.fetch_of(tile),
        )

    def _on_hopper(
        self, kind: str, config: Config, x: tuple[Tensor, Tensor], routing: _Routing
    ) -> object:
        """Run one GEMM, as :meth:`call`, by the Hopper kernel."""
        ids, weights, tiles = routing
        order = Alignment(*tiles[:3], ends=tiles.filled)  # the kernel does not read ends
        dtype = torch.bfloat16
        if kind == "gated":
            return hopper_gated_product(*x, self.w13, self.scales13, ids, order, dtype, config)
        return gemm_hopper.product(*x, self.w2, self.scales2, order, weights, dtype, config)


def routing(
    problem: Fp8ExpertsProblem,
    held: int,
    tokens: int,
    seed: int,
    device: str = "cuda",
    skew: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return random (ids, weights) that route ``tokens`` tokens to ``held`` experts.

    Every token has all fused shared experts; its other experts are drawn without replacement, also
    among those of other ranks, whose ids are -1. ``skew`` is the standard deviation of the
    logarithm of an expert's probability; 0: all are equal.
    """
    generator = torch.Generator(device).manual_seed(seed)
    routed = held - problem.fused_shared
    layer = routed + problem.others
    popular = skew * torch.randn(layer, generator=generator, device=device)
    waiting = torch.empty(tokens, layer, device=device).exponential_(generator=generator)
    ids = popular - waiting.log()  # the Gumbel trick: the largest are such a draw
    ids = ids.topk(min(layer, problem.topk - problem.fused_shared), 1).indices.int()
    ids.masked_fill_(ids >= routed, -1)
    always = torch.arange(routed, held, dtype=torch.int32, device=device).expand(tokens, -1)
    ids = torch.cat([ids, always], 1)
    return ids, torch.rand(ids.shape, generator=generator, device=device)


def expert_candidates(tokens: int, problem: Fp8ExpertsProblem) -> Iterator[tuple[str, Config]]:
    """Yield the pairs (kind of GEMM, configuration) to measure for ``tokens`` tokens.

    Candidates depend on the mean number of rows of an expert. Kinds as in ``_Experts.call``.
    """
    load = problem.load(tokens)
    if load >= HOPPER_ROWS_MIN and card_is_hopper() and fits_hopper(problem.hidden, BFLOAT16_BYTES):
        for kind, group in product(("gated", "second"), HOPPER_GROUPS):
            yield kind, {"BLOCK_M": HOPPER_ROWS, "GROUP": group}
    for block in (16, 32, 64, 128):
        if (block > 16 and load < block / 4) or load > 8 * block:
            continue
        few = block <= 64 and load <= 64
        warps, stages = ((4, 8), (3, 4, 6)) if few else ((8, 4), (3, 4))
        columns: tuple[Config, ...] = ({}, {"ORDER": "columns"}) if few else ({},)
        orders = columns if load >= COLUMN_ORDER_ROWS_MIN else ({},)
        for order, tile in product(orders, fitting_tiles(few, block, (128,), warps, stages, 2)):
            yield "gated", {"BLOCK_M": block, **tile, **order}
        for splits in DEPTH_SPLITS if tokens <= SPLIT_TOKENS_MAX else ():
            for tile in fitting_tiles(few, block, (128,), warps, (3,), 2):
                yield "gated", {"BLOCK_M": block, **tile, "SPLITS": splits}
        for tile in (
            fitting_tiles(few, block, (128,), warps, stages, 4) if few and block <= 32 else ()
        ):
            yield "gated", {"BLOCK_M": block, **tile, **ROUND_OPTIONS}
        for order, tile in product(
            columns, fitting_tiles(few, block, (64, 128) if few else (128,), warps, stages)
        ):
            yield "second", {"BLOCK_M": block, **tile, **order}
            if not few:
                yield "plain", {"BLOCK_M": block, **tile}


def variants(tokens: int, problem: Fp8ExpertsProblem) -> Iterator[tuple[str, Config]]:
    """Yield the pairs of :func:`expert_candidates`, each with the key ``PAIRED``.

    For few tokens all candidates are repeated with tiles of one pair. Depth splits need such tiles.
    """
    choices = (False, True) if tokens <= PAIRED_TOKENS_MAX else (False,)
    for paired, (kind, config) in product(choices, expert_candidates(tokens, problem)):
        if paired or "SPLITS" not in config:
            yield kind, {**config, "PAIRED": paired}


def _compile_experts(wanted: Sequence[tuple[str, Config]], problem: Fp8ExpertsProblem) -> list[str]:
    """Run each candidate once, so that its kernel is cached on disk.

    Returns:
        Keys of the candidates that fail.
    """
    held = problem.fused_shared + 4
    bench = _Experts.make(problem, held)
    # NOTE: kernels are compiled for the number of ids of a token, so tokens here have as many as in
    # a run; most are of experts elsewhere
    small = problem._replace(others=problem.topk)
    ids, weights = routing(small, held, SPLIT_TOKENS_MAX, 0)
    failed = []
    for kind, config in wanted:
        try:
            tiled = _Routing(ids, weights, tiles_of(ids, held, config))
            x = bench.input(kind, config, tiled)
            torch.cuda.synchronize()  # the second GEMM may read the alignment before it waits
            bench.call(kind, config, x, tiled)
            torch.cuda.synchronize()
        except Exception as error:
            error.add_note(f"candidate: {kind} {config}")
            check_refusal(error)
            failed.append(key((kind, config)))
    return failed


def tune_experts(
    problem: Fp8ExpertsProblem,
    path: Path,
    *,
    tokens: Sequence[int] = TOKENS,
    seconds: float = 300.0,
    workers: int = 8,
    log: Log = print,
) -> Table:
    """Find the fastest kernels for each token count that the table lacks; store each at once.

    Args:
        problem: The experts.
        path: File of the table.
        tokens: Token counts of the table.
        seconds: Time limit.
        workers: Processes that compile kernels.
        log: Receives progress lines.

    Returns:
        The table.
    """
    run = TuningRun(path, seconds, workers, log)
    bench: _Experts | None = None
    for number in run.compiled(tokens, lambda n: variants(n, problem), _compile_experts, problem):
        bench = bench or _Experts.make(problem, problem.experts)
        spent, chosen = _cheapest(_measure(bench, problem, number, run.failed))
        run.keep(number, chosen, f"{number} tokens: {spent:.1f} us {chosen}")
    return run.table


def _routings(problem: Fp8ExpertsProblem, tokens: int, device: str) -> list[tuple[Tensor, Tensor]]:
    """Return the routings over which a GEMM is timed, with even and uneven loads in turn."""
    return [
        routing(problem, problem.experts, tokens, seed, device, SKEWS[seed % len(SKEWS)])
        for seed in range(8 if tokens <= 64 else 4)
    ]


def _measure(bench: _Experts, problem: Fp8ExpertsProblem, number: int, failed: set[str]) -> Best:
    """Return the fastest configuration of each kind of GEMM and tile size for ``number`` tokens.

    An error, which may leave the device unusable, is raised with a note that names the candidate.
    """
    routes = _routings(problem, number, str(bench.w2.device))
    best: Best = {}
    for kind, config in variants(number, problem):
        if key((kind, config)) in failed:
            continue
        try:
            spent = _spent(bench, kind, config, routes)
        except Exception as error:
            error.add_note(f"candidate for {number} tokens: {kind} {config}")
            raise
        variant = (kind, config["BLOCK_M"], config["PAIRED"])
        if variant not in best or spent < best[variant][0]:
            best[variant] = spent, without(config, "PAIRED")
    return best


def _spent(
    bench: _Experts, kind: str, config: Config, routes: Sequence[tuple[Tensor, Tensor]]
) -> float:
    """Return the mean microseconds of one GEMM over the routings ``routes``, pairs (ids, weights).

    All routings have the same input, whose size depends on the shape of the ids alone.
    """
    experts = len(bench.w2)
    tiled = [_Routing(ids, weights, tiles_of(ids, experts, config)) for ids, weights in routes]
    x = bench.input(kind, config, tiled[0])
    return microseconds([partial(bench.call, kind, config, x, each) for each in tiled], 2)


def _cheapest(best: Best) -> tuple[float, Config]:
    """Return (microseconds, configuration) of the fastest pair of GEMMs.

    Both GEMMs have the same rows per tile, and both or neither have tiles of one pair. ``best``
    holds the fastest GEMM of each kind and tile.
    """
    found = []
    for (kind, tile, paired), first in best.items():
        if kind == "second" or ("second", tile, paired) not in best:
            continue
        second = best["second", tile, paired]
        found.append(
            (
                first[0] + second[0] + (0.0 if paired else ALIGN_MICROSECONDS),
                {
                    "BLOCK_M": tile,
                    "FUSE": kind == "gated",
                    "PAIRED": paired,
                    "first": without(first[1], "BLOCK_M"),
                    "second": without(second[1], "BLOCK_M"),
                },
            )
        )
    return min(found, key=lambda item: item[0])
