"""Kernel and tile configurations of routed experts, from a tuned table or a rule.

This module does not import torch.

A configuration of one GEMM has a ``way``: "gemv" (``moe.gemv``), "dense" or "sorted" (``moe.gemm``)
with its tile sizes, or "hopper" (``moe.gemm_hopper``). ``wide`` is the number of columns of the
fused shared experts' tiles; without it the kernel chooses. Either both GEMMs are sorted, with the
same block_m, or neither is. Either both are "hopper" or neither is; with ``apart`` the fused
shared experts are then a dense MLP (``moe.experts.fused_shared_mlp``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from glowplug.kernels.launch import tuned_tables
from glowplug.kernels.launch.tuned_tables import Config

#: tokens up to which the rule uses "gemv": their experts do not overlap, so no weight is read twice
GEMV_TOKENS_MAX = 1
DENSE_TOKENS_MAX = 16  #: tokens that fit into one "dense" tile
SHARED_TILE_TOKENS_MAX = 128  #: tokens that share one tile of a fused shared expert


@dataclass(frozen=True)
class ExpertsProblem:
    """The experts of one layer on this rank.

    Attributes:
        experts: E, number of experts held, fused shared experts included.
        topk: Columns of the ids.
        hidden: Channels of x; w13 is [E, 2 * inter, hidden], w2 [E, hidden, inter].
        inter: Channels between the two GEMMs.
        dtype: Name of the weights' dtype, e.g. "bfloat16".
        others: Experts of the layer on other ranks, for tuning; ids of -1 stand for them.
    """

    experts: int
    topk: int
    hidden: int
    inter: int
    dtype: str
    others: int = 0

    def load(self, tokens: int) -> float:
        """Return the mean number of rows of an expert if the experts are chosen uniformly."""
        return tokens * self.topk / (self.experts + self.others)

    @property
    def table_name(self) -> str:
        """File name of this machine's table."""
        return self.table_on(None)

    def table_on(self, machine: tuple[str, str] | None) -> str:
        """Return the file name of a machine's table; see ``tuned_tables.file_name``."""
        return tuned_tables.file_name(
            f"E={self.experts},N={self.inter},H={self.hidden}", self.dtype, machine=machine
        )


def tile(
    way: str,
    block_m: int,
    block_n: int,
    block_k: int,
    warps: int,
    stages: int,
    *,
    group: int = 64,
    swap: bool = False,
    tma: bool = False,
    wide: int = 0,
) -> dict[str, str | int]:
    """Return the configuration of a "dense" or "sorted" GEMM.

    Args:
        way: "dense" or "sorted".
        block_m: Rows of a tile.
        block_n: Columns of a tile.
        block_k: Depth of a pipeline stage.
        warps: Warps of a program.
        stages: Pipeline stages.
        group: Row blocks of a swizzle group.
        swap: The weight is the left operand.
        tma: Weights are read through TMA descriptors.
        wide: Columns of the fused shared experts' tiles; 0: the kernel chooses.
    """
    found: dict[str, str | int] = {
        "way": way,
        "block_m": block_m,
        "block_n": block_n,
        "block_k": block_k,
        "warps": warps,
        "stages": stages,
        "group": group,
        "swap": int(swap),
        "tma": int(tma),
    }
    return found | ({"wide": wide} if wide else {})


def dense_experts_rule(problem: ExpertsProblem, tokens: int) -> dict[str, Config]:
    """Return configurations {"up", "down"} of both GEMMs by rule, without measurements.

    ``tokens``: number of tokens of a step.
    """
    load = tokens * problem.topk / problem.experts
    if tokens <= GEMV_TOKENS_MAX:
        return dict.fromkeys(
            ("up", "down"), {"way": "gemv", "block_n": 2, "block_k": 1024, "warps": 4}
        )
    if problem.dtype == "float32":  # without tensor cores
        return dict.fromkeys(("up", "down"), tile("sorted", 32, 64, 32, 4, 2))
    if load <= 64:
        way, block_m = (
            ("dense", 16) if tokens <= DENSE_TOKENS_MAX else ("sorted", 16 if load <= 12 else 32)
        )
        return dict.fromkeys(
            ("up", "down"), tile(way, block_m, 128, 128, 4, 3, swap=True, tma=True)
        )
    if load <= 96:
        return dict.fromkeys(("up", "down"), tile("sorted", 64, 128, 64, 4, 4, group=8, tma=True))
    return {
        "up": tile("sorted", 128, 128, 64, 8, 4, group=8, tma=True),
        "down": tile("sorted", 128, 128, 64, 8, 3, group=8, tma=True),
    }


@lru_cache(maxsize=1024)
def dense_experts_config(problem: ExpertsProblem, tokens: int) -> Mapping[str, Config]:
    """Return the configurations {"up", "down"} of both GEMMs for ``tokens`` tokens.

    They are those that :func:`pick` finds in this machine's tuned table.
    """
    return pick(problem, tokens, tuned_tables.table(problem.table_name) or {})


def pick(
    problem: ExpertsProblem, tokens: int, measured: Mapping[int, Mapping[str, Config]]
) -> Mapping[str, Config]:
    """Return the configurations {"up", "down"} measured for the nearest number of tokens.

    A configuration with a "dense" GEMM is skipped if a tile has fewer than ``tokens`` rows: dense
    tiles were measured only where one held all tokens. If none is near, the rule's are returned.
    """
    fitting = {
        number: config
        for number, config in measured.items()
        if all(
            product["way"] != "dense" or product["block_m"] >= tokens for product in config.values()
        )
    }
    return tuned_tables.near(fitting, tokens) or dense_experts_rule(problem, tokens)


def fused_shared_has_own_tiles(config: Config, tokens: int) -> bool:
    """Return whether the fused shared experts get larger tiles than the routed experts.

    With several small tiles the shared experts' weights would be read several times. ``config`` is
    one GEMM's configuration for ``tokens`` tokens.
    """
    fitting_tokens = min(tokens, SHARED_TILE_TOKENS_MAX)
    return config["way"] == "sorted" and bool(config["block_m"] < fitting_tokens)
