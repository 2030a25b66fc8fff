"""Tiles of (token, expert) pairs: the pairs, expert and column block of each program."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch.tuned_tables import Config
from glowplug.kernels.moe.align import align


@triton.jit
def pairs_of(tile, pairs, experts, total_pairs, BLOCK_M: tl.constexpr, ALIGNED: tl.constexpr):
    """Return a tile's (token, expert) pairs, its expert, and a mask of rows that are not padding.

    If not ``ALIGNED``, a tile is one pair, and ``experts`` are the ids.
    """
    at = tl.arange(0, BLOCK_M)
    if ALIGNED:
        pair = tl.load(pairs + tile * BLOCK_M + at)
    else:
        pair = tl.where(at == 0, tile, total_pairs)
    return pair, tl.load(experts + tile).to(tl.int64), pair < total_pairs


@triton.jit
def is_empty(tile, experts, filled, BLOCK_M: tl.constexpr, ALIGNED: tl.constexpr):
    """Return whether ``tile`` has no pairs."""
    if ALIGNED:
        empty = tile * BLOCK_M >= tl.load(filled)
    else:
        empty = tl.load(experts + tile) < 0
    return empty


@triton.jit
def tile_and_block(tiles, filled, BLOCK_M: tl.constexpr, ORDER: tl.constexpr):
    """Return (tile, column block) of this program.

    With ``ORDER`` "columns" consecutive programs have the column blocks of one tile. Otherwise they
    have the same column block of consecutive tiles. With "filled" the programs of tiles in use come
    first, and the idle programs last.
    """
    blocks = tl.num_programs(0) // tiles
    if ORDER == "columns":
        tile, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    elif ORDER == "filled":
        real = tl.load(filled) // BLOCK_M
        each = tl.maximum(real, 1)
        block = tl.program_id(0) // each
        tile = tl.where(block < blocks, tl.program_id(0) % each, real)
    else:
        tile, block = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    return tile, block


class Tiles(NamedTuple):
    """The pairs and the expert of each tile, from an alignment or with one pair per tile.

    Attributes:
        pairs: ``Alignment.sorted_pairs``; without an alignment the ids [T * K].
        experts: ``Alignment.expert_of_block``; without an alignment the ids.
        filled: ``Alignment.num_padded``; without an alignment the ids.
        total: Number of tiles.
        aligned: False if each tile is one pair.
    """

    pairs: Tensor
    experts: Tensor
    filled: Tensor
    total: int
    aligned: bool


def tiles_of(ids: Tensor, experts: int, config: Config) -> Tiles:
    """Return the tiles of ids [T, K] for ``experts`` experts.

    ``config`` is one of ``moe.fp8.tiles``; with its key ``PAIRED`` a tile is one pair, which saves
    the alignment for few tokens.
    """
    if config.get("PAIRED"):
        return Tiles(ids, ids, ids, ids.numel(), False)
    order = align(ids, experts, config["BLOCK_M"])
    return Tiles(
        order.sorted_pairs,
        order.expert_of_block,
        order.num_padded,
        order.expert_of_block.shape[0],
        True,
    )
