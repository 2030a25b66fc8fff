"""In which way and with which tiles routed experts are multiplied: a table's, or a rule's. No
torch.

A configuration of one product: ``way`` "gemv", "dense" or "sorted" (see ``moe_gemv`` and
``moe_gemm``) and its tiles (``wide``: columns of those of everybody's experts, where not the
kernel's own choice), or "hopper" (``moe_gemm_hopper``). Both products are sorted, with the same
block_m, or neither is, and both are by "hopper" or neither is; with ``apart`` everybody's experts
are then dense products (``moe_shared``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from glowplug.kernels.launch import tuned_tables as tuned
from glowplug.kernels.launch.tuned_tables import Config

FEW = 1  #: tokens whose experts do not overlap, so that nothing is read twice
DENSE = 16  #: tokens that fit into one tile
WIDE = 128  #: tokens that share a tile of everybody's experts


@dataclass(frozen=True)
class Problem:
    """Experts of one layer on this rank: w13 [E, 2 * inter, hidden], w2 [E, hidden, inter]; ids of
    ``topk`` columns.
    """

    experts: int
    topk: int
    hidden: int
    inter: int
    dtype: str

    @property
    def table_name(self) -> str:
        """The file of this machine's table."""
        return self.table_on(None)

    def table_on(self, machine: tuple[str, str] | None) -> str:
        """As of ``tuned.file_name``."""
        return tuned.file_name(
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


def rule(problem: Problem, tokens: int) -> dict[str, Config]:
    """{"up", "down"} where nothing was measured."""
    load = tokens * problem.topk / problem.experts
    if tokens <= FEW:
        return dict.fromkeys(
            ("up", "down"), {"way": "gemv", "block_n": 2, "block_k": 1024, "warps": 4}
        )
    if problem.dtype == "float32":  # without tensor cores
        return dict.fromkeys(("up", "down"), tile("sorted", 32, 64, 32, 4, 2))
    if load <= 64:
        way, block_m = ("dense", 16) if tokens <= DENSE else ("sorted", 16 if load <= 12 else 32)
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
def chosen(problem: Problem, tokens: int) -> Mapping[str, Config]:
    """:func:`pick` from this machine's table."""
    return pick(problem, tokens, tuned.table(problem.table_name) or {})


def pick(
    problem: Problem, tokens: int, measured: Mapping[int, Mapping[str, Config]]
) -> Mapping[str, Config]:
    """The configuration ``measured`` for the number of tokens nearest to ``tokens``; the rule's
    where there is none.

    Dense tiles that do not hold all tokens are passed over: they were measured where they did.
    """
    fitting = {
        number: config
        for number, config in measured.items()
        if all(
            product["way"] != "dense" or product["block_m"] >= tokens for product in config.values()
        )
    }
    return tuned.nearest(fitting, tokens) if fitting else rule(problem, tokens)


def has_wide_tiles(config: Config, tokens: int) -> bool:
    """Do everybody's experts get wider tiles than the others? One that took several would be
    fetched several times.
    """
    return config["way"] == "sorted" and config["block_m"] < min(tokens, WIDE)
