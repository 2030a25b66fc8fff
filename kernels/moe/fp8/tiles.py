"""In which way and with which tiles routed experts in block FP8 are multiplied: a table's, or a
rule's. No torch.

A configuration: rows a tile (``BLOCK_M``), ``first`` and ``second`` product, whether the first
activates (``FUSE``), and whether a tile is one pair (``PAIRED``; left out: no).

A product of ``moe_gemm_fp8``: columns a program (``BLOCK_N``), are weights the left operand
(``SWAP``) and read through descriptors (``TMA``), whose programs lie side by side (``ORDER``:
"columns" of one tile, "filled" tiles or, left out, "tiles"), groups of the depth read side by side
(``ROUND``; left out: 1), parts of the depth that gates and ups of paired tiles are cut into
(``SPLITS``; left out: 1), warps, stages. Both products of ``moe_gemm_fp8_hopper``: tiles of rows
that lie above each other (``GROUP``).
"""

from __future__ import annotations

from functools import lru_cache

from glowplug.kernels.launch import tuned_tables as tuned
from glowplug.kernels.launch.tuned_tables import Config

BLOCK = 128
HOPPER_ROWS = 192  #: a tile of ``moe_gemm_fp8_hopper``
FEW = 40  #: rows that an expert gets up to which narrow tiles are quicker


def on_hopper(config: Config) -> bool:
    """Are the products those of ``moe_gemm_fp8_hopper``?"""
    return "GROUP" in config["first"]


def hopper(group: int) -> Config:
    return {
        "BLOCK_M": HOPPER_ROWS,
        "FUSE": True,
        "PAIRED": False,
        "first": {"GROUP": group},
        "second": {"GROUP": group},
    }


def rule(tokens: int, per_token: int, experts: int, has_hopper: bool) -> Config:
    """A configuration for a problem that nobody has tuned, by the rows that an expert gets."""
    rows = tokens * per_token / experts
    if rows <= FEW:
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
    """The file of this machine's table, or of another: see ``tuned.file_name``."""
    return tuned.file_name(f"E={experts},N={inter},H={hidden}", tuned.FP8, (BLOCK, BLOCK), machine)


def fits_hopper(hidden: int, element: int) -> bool:
    """Does ``moe_gemm_fp8_hopper`` multiply experts of this size, for results of so many bytes a
    number?
    """
    return hidden % BLOCK == 0 and element == 2


@lru_cache(maxsize=4096)
def config_for(
    tokens: int,
    per_token: int,
    experts: int,
    inter: int,
    hidden: int,
    has_hopper: bool,
    machine: tuple[str, str] | None = None,
) -> Config:
    """``inter`` in whole blocks. ``has_hopper``: on such a card, and :func:`fits_hopper`."""
    name = table_name(experts, inter, hidden, machine)
    found = tuned.measured_for(name, tokens, lambda config: has_hopper or not on_hopper(config))
    return found or rule(tokens, per_token, experts, has_hopper)
