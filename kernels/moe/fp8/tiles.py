"""Kernel and tile configurations of routed experts in block FP8, from a tuned table or a rule.

This module does not import torch. The keys of a configuration:

- ``BLOCK_M``: rows of a tile.
- ``first`` and ``second``: the configurations of both GEMMs.
- ``FUSE``: the first GEMM also computes silu(gate) * up.
- ``PAIRED``: a tile is one (token, expert) pair, without an alignment; default false.

The keys of one GEMM of ``moe.fp8.gemm``, besides warps and stages:

- ``BLOCK_N``: columns of a program.
- ``SWAP``: weights are the left operand.
- ``TMA``: weights are read through descriptors.
- ``ORDER``: the order of programs: "columns" of one tile first, "filled" tiles first, or all
  "tiles" first (default).
- ``ROUND``: depth groups read together; default 1.
- ``SPLITS``: depth splits of the first GEMM of paired tiles; default 1.

Both GEMMs of ``moe.fp8.gemm_hopper`` have one key, ``GROUP``: the height of a tile group, in tiles.
"""

from __future__ import annotations

from functools import lru_cache

from glowplug.kernels.formats.fp8_block import FP8_BLOCK
from glowplug.kernels.launch import tuned_tables
from glowplug.kernels.launch.tuned_tables import Config

HOPPER_ROWS = 192  #: rows of a tile of ``moe.fp8.gemm_hopper``
SMALL_TILE_ROWS_MAX = 40  #: rows of an expert up to which small tiles are faster


def on_hopper(config: Config) -> bool:
    """Return whether ``config`` is a configuration of ``moe.fp8.gemm_hopper``."""
    return "GROUP" in config["first"]


def hopper(group: int) -> Config:
    """Return the configuration of ``moe.fp8.gemm_hopper``.

    ``group``: row blocks of a swizzle group.
    """
    return {
        "BLOCK_M": HOPPER_ROWS,
        "FUSE": True,
        "PAIRED": False,
        "first": {"GROUP": group},
        "second": {"GROUP": group},
    }


def fp8_experts_rule(tokens: int, per_token: int, experts: int, has_hopper: bool) -> Config:
    """Return a configuration for sizes without a table, by the mean number of rows of an expert.

    Arguments as in :func:`fp8_experts_config`.
    """
    rows = tokens * per_token / experts
    if rows <= SMALL_TILE_ROWS_MAX:
        block = 16 if rows <= 10 else 32
        each = {"SWAP": True, "TMA": True, "num_warps": 4, "num_stages": 3}
    elif has_hopper:
        return hopper(1)
    else:
        block = 128
        each = {"SWAP": False, "TMA": True, "num_warps": 8, "num_stages": 3}
    return {
        "BLOCK_M": block,
        "FUSE": block < 128,
        "PAIRED": tokens <= 1,
        "first": {**each, "BLOCK_N": 128},
        "second": {**each, "BLOCK_N": 128},
    }


def table_name(
    experts: int, inter: int, hidden: int, machine: tuple[str, str] | None = None
) -> str:
    """Return the file name of the table of ``experts`` experts [inter, hidden].

    ``machine`` as in ``tuned_tables.file_name``; None: this machine's.
    """
    return tuned_tables.file_name(
        f"E={experts},N={inter},H={hidden}", tuned_tables.FP8, (FP8_BLOCK, FP8_BLOCK), machine
    )


def fits_hopper(hidden: int, element: int) -> bool:
    """Return whether ``moe.fp8.gemm_hopper`` supports ``hidden`` channels.

    ``element``: bytes of an element of the result.
    """
    return hidden % FP8_BLOCK == 0 and element == 2


@lru_cache(maxsize=4096)
def fp8_experts_config(
    tokens: int,
    per_token: int,
    experts: int,
    inter: int,
    hidden: int,
    has_hopper: bool,
    machine: tuple[str, str] | None = None,
) -> Config:
    """Return the tuned configuration for the nearest number of tokens; if none fits, the rule's.

    Args:
        tokens: Tokens of a step.
        per_token: Columns of the ids.
        experts: Experts held.
        inter: Channels between the GEMMs, a multiple of ``FP8_BLOCK``.
        hidden: Channels of x.
        has_hopper: The card is a Hopper GPU and :func:`fits_hopper` returns true.
        machine: See :func:`table_name`.
    """
    name = table_name(experts, inter, hidden, machine)
    found = tuned_tables.measured_for(
        name, tokens, lambda config: has_hopper or not on_hopper(config)
    )
    return found or fp8_experts_rule(tokens, per_token, experts, has_hopper)
