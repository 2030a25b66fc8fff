"""Routed experts in Triton, in the way and with the tiles that a table or a rule gives for the number of tokens.

A configuration of one product: ``way`` "gemv", "dense" or "sorted" (see ``moe_gemv`` and ``moe_gemm``) and its tiles.
Both products are sorted, with the same block_m, or neither is.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from glowplug.kernels.triton import moe_gemm, moe_gemv, tuned
from glowplug.kernels.triton.moe_align import align
from glowplug.kernels.triton.moe_sum import moe_sum
from glowplug.kernels.triton.tuned import Config

FEW = 1  #: tokens whose experts do not overlap, so that nothing is read twice
DENSE = 16  #: tokens that fit into one tile


@dataclass(frozen=True)
class Problem:
    """Experts of one layer on this rank: w13 [E, 2 * inter, hidden], w2 [E, hidden, inter]; ids of ``topk`` columns."""

    experts: int
    topk: int
    hidden: int
    inter: int
    dtype: str

    @property
    def table_name(self) -> str:
        sizes = f"E={self.experts},N={self.inter},H={self.hidden}"
        return tuned.file_name(sizes, self.dtype)


def tile(way: str, block_m: int, block_n: int, block_k: int, warps: int, stages: int, *, group: int = 64,
         swap: bool = False, tma: bool = False) -> dict[str, str | int]:
    return {"way": way, "block_m": block_m, "block_n": block_n, "block_k": block_k, "warps": warps, "stages": stages,
            "group": group, "swap": int(swap), "tma": int(tma)}


def rule(problem: Problem, tokens: int) -> dict[str, Config]:
    """{"up", "down"} where nothing was measured."""
    load = tokens * problem.topk / problem.experts
    if tokens <= FEW:
        return dict.fromkeys(("up", "down"), {"way": "gemv", "block_n": 2, "block_k": 1024, "warps": 4})
    if problem.dtype == "float32":  # without tensor cores
        return dict.fromkeys(("up", "down"), tile("sorted", 32, 64, 32, 4, 2))
    if load <= 64:
        way, block_m = ("dense", 16) if tokens <= DENSE else ("sorted", 16 if load <= 12 else 32)
        return dict.fromkeys(("up", "down"), tile(way, block_m, 128, 128, 4, 3, swap=True, tma=True))
    if load <= 96:
        return dict.fromkeys(("up", "down"), tile("sorted", 64, 128, 64, 4, 4, group=8, tma=True))
    return {"up": tile("sorted", 128, 128, 64, 8, 4, group=8, tma=True),
            "down": tile("sorted", 128, 128, 64, 8, 3, group=8, tma=True)}


@lru_cache(maxsize=1024)
def chosen(problem: Problem, tokens: int) -> Mapping[str, Config]:
    """The table's configuration for the number of tokens nearest to ``tokens``; the rule's where there is no table.

    Dense tiles that do not hold all tokens are passed over: they were measured where they did.
    """
    measured = tuned.table(problem.table_name) or {}
    fitting = {number: config for number, config in measured.items()
               if all(product["way"] != "dense" or product["block_m"] >= tokens for product in config.values())}
    return tuned.nearest(fitting, tokens) if fitting else rule(problem, tokens)


def has_wide_tiles(config: Config, tokens: int) -> bool:
    """Do everybody's experts get wider tiles than the others? One that took several would be fetched several times."""
    return config["way"] == "sorted" and config["block_m"] < min(tokens, moe_gemm.WIDE)


def products(x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor,
             config: Mapping[str, Config] | None = None, shared: int = 0) -> tuple[Tensor, bool]:
    """x [T, H], w13 [E, 2I, H] gates before ups, w2 [E, H, I], ids [T, K] (-1: elsewhere), weights float32 [T, K] ->
    weighted rows [T * K, H] for ``moe_sum`` and False, or their sums [T, H] and True.

    A token names an expert at most once. No step depends on a value on the host. ``shared``: the last so many experts
    are the last ones of every token's, in order.
    """
    if not len(x):
        return torch.empty_like(x), True
    if config is None:
        config = chosen(Problem(w13.shape[0], ids.shape[1], w13.shape[2], w2.shape[2], str(x.dtype).split(".")[1]),
                        len(x))
    up, down = config["up"], config["down"]
    wide = shared if has_wide_tiles(up, len(x)) else 0
    aligned = align(ids, len(w13) - wide, up["block_m"], wide) if up["way"] == "sorted" else None
    hidden = (moe_gemv.up(x, w13, ids, up) if up["way"] == "gemv" else
              moe_gemm.up(x, w13, ids, aligned, up, wide))
    if down["way"] == "gemv":
        return moe_gemv.down(hidden, w2, ids, weights, down), True
    return moe_gemm.down(hidden, w2, ids, weights, aligned, down, wide), False


def experts(x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor,
            config: Mapping[str, Config] | None = None, shared: int = 0) -> Tensor:
    """:func:`products` added up: [T, H]."""
    rows, summed = products(x, w13, w2, ids, weights, config, shared)
    return rows if summed else moe_sum(rows, ids)
