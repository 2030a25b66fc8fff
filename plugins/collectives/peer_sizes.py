"""Sizes of the buffers through which the ranks of one host exchange data. Plan zone: no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from glowplug.core.facts.mesh import AXES, axis_size, group
from glowplug.kernels.collectives.buffer_sizes import WORD_BYTES, buffer_words
from glowplug.plugins.collectives.torch_distributed import nccl_bytes

KIB = 1 << 10
MIB = 1 << 20
SMALL_TILE = 512  #: words per tile of tensors up to SMALL_BYTES
#: words per tile of larger tensors, which need more loads in flight (on two H200, 8 MB: 32 us, with
#: tiles of 512 words 41 us)
LARGE_TILE = 2048
#: largest tensor in small tiles (on two H200, 1 MB: 5.5 us, in large ones 6.5 us)
SMALL_BYTES = MIB
#: ranks -> largest tensor of a one-shot all-reduce. Two ranks send as much in two shots, so only
#: the memory of the buffers limits them; NCCL took 78 us for 16 MB, this exchange 61 us.
ONE_SHOT_BYTES = {2: 16 * MIB, 4: 384 * KIB, 8: 128 * KIB}
TWO_SHOT_BYTES = 16 * MIB  #: largest tensor of a two-shot all-reduce
GATHER_BYTES = 4 * MIB  #: largest part of a rank in an all-gather or reduce-scatter
NORM_ROWS_MAX = 512  #: most tokens of an all-reduce that is fused with a norm


class BufferSize(NamedTuple):
    """Capacity of one kind of buffers and size of their tiles; see ``PeerBuffers``.

    Attributes:
        capacity: number of 16-bit words that a rank can send to a peer in one call; 0: the group
            has no such buffers.
        tile: number of 16-bit words per tile.
        tiles: number of tiles for which calls are counted; 0: as many as ``capacity`` holds.
    """

    capacity: int
    tile: int
    tiles: int = 0


class PeerSizes(NamedTuple):
    """Sizes of the buffers of one group of ranks, by the operation that uses them.

    In a one-shot all-reduce each rank sends its whole tensor to all others. In a two-shot
    all-reduce each rank owns a part of the tensor: it receives the other ranks' terms
    of this part, and sends their sum to all ranks.

    Attributes:
        small: one-shot all-reduce of small tensors.
        large: one-shot all-reduce of larger tensors.
        terms: first half of a two-shot all-reduce, in which owners receive terms.
        sums: second half of a two-shot all-reduce, in which owners send sums.
        gather: all-gather and reduce-scatter.
        norm: all-reduce fused with a norm; a tile is a token.
    """

    small: BufferSize
    large: BufferSize
    terms: BufferSize
    sums: BufferSize
    gather: BufferSize
    norm: BufferSize

    def bytes(self, ranks: int) -> int:
        """Return the bytes of the receiving buffers of one rank in a group of ``ranks`` ranks."""
        return sum(buffer_words(ranks, size.capacity) for size in self) * WORD_BYTES


def peer_sizes(ranks: int, hidden: int, tokens: int) -> PeerSizes:
    """Return the sizes of the buffers of one group of ranks.

    Args:
        ranks: number of ranks in the group.
        hidden: hidden size of the model.
        tokens: most tokens of a step in all dp groups, which feed-forward layers compute.
    """
    largest = hidden * tokens * WORD_BYTES
    one_shot = min(largest, one_shot_bytes(ranks))
    two_shot = min(largest, TWO_SHOT_BYTES) if one_shot < largest and ranks > 2 else 0
    chunk = _tiles(two_shot // ranks, LARGE_TILE)
    row = 1 << (hidden - 1).bit_length()
    rows = min(tokens, NORM_ROWS_MAX, one_shot_bytes(ranks) // (row * WORD_BYTES))
    return PeerSizes(
        small=_tiles(min(one_shot, SMALL_BYTES), SMALL_TILE),
        large=_tiles(one_shot if one_shot > SMALL_BYTES else 0, LARGE_TILE),
        terms=chunk._replace(tiles=chunk.capacity // LARGE_TILE * ranks),
        sums=chunk,
        gather=_tiles(min(largest, GATHER_BYTES), SMALL_TILE),
        norm=BufferSize(rows * row, row),
    )


def buffer_bytes(mesh: Mapping[str, int], hidden: int, tokens: int) -> int:
    """Return the total bytes of one rank's receiving buffers, for the groups on all mesh axes.

    Args:
        mesh: mesh axis -> size.
        hidden: hidden size of the model.
        tokens: most tokens of a step in all dp groups.
    """
    groups = {group(axis, 0, mesh) for axis in AXES if axis_size(axis, mesh) > 1}
    return sum(peer_sizes(len(ranks), hidden, tokens).bytes(len(ranks)) for ranks in groups)


def library_bytes(mesh: Mapping[str, int], hidden: int, tokens: int) -> int:
    """Return an estimate of the bytes of NCCL's buffers, for tensors that fit no buffers of ours.

    Groups of two ranks exchange all tensors through buffers of ours. See ``buffer_bytes`` for the
    arguments.
    """
    return nccl_bytes({group(axis, 0, mesh) for axis in AXES if axis_size(axis, mesh) > 2})


def one_shot_bytes(ranks: int) -> int:
    """Return the bytes of the largest tensor that ``ranks`` ranks sum by one-shot all-reduce."""
    return next((size for most, size in ONE_SHOT_BYTES.items() if ranks <= most), 0)


def _tiles(size: int, tile: int) -> BufferSize:
    """Return the size of a buffer for ``size`` bytes, in tiles of ``tile`` words, rounded up."""
    return BufferSize(-(-size // (tile * WORD_BYTES)) * tile, tile)
