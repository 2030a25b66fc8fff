"""Sizes of the buffers through which the ranks of one host exchange data. Plan zone: no torch."""

from __future__ import annotations

from typing import NamedTuple

from glowplug.core.plugin.byte_costs import ExchangeSizes
from glowplug.kernels.collectives.buffer_sizes import WORD_BYTES, buffer_words
from glowplug.kernels.collectives.exchange_tables import (
    Times,
    exchange_table,
    fastest_up_to,
)
from glowplug.plugins.collectives.torch_distributed import groups, nccl_bytes

KIB = 1 << 10
MIB = 1 << 20
SMALL_TILE = 512  #: words per tile of tensors up to SMALL_BYTES
#: words per tile of larger tensors, which need more loads in flight (on two H200, 8 MB: 32 us, with
#: tiles of 512 words 41 us)
LARGE_TILE = 2048
#: largest tensor in small tiles (on two H200, 1 MB: 5.5 us, in large ones 6.5 us)
SMALL_BYTES = MIB
ONE_SHOT = "one_shot"
TWO_SHOT = "two_shot"
#: way of a sum in tables of measured exchanges, as `bench kernels --collectives` names it
WAYS = {way: f"peer_memory all_reduce={way}" for way in (ONE_SHOT, TWO_SHOT)}
LIBRARY = "nccl"  #: the same of a sum by the library
#: ranks -> largest tensor of a one-shot all-reduce without a table. Two ranks send as much in two
#: shots, so only the memory of the buffers limits them; NCCL took 78 us for 16 MB, this exchange
#: 61 us.
ONE_SHOT_BYTES = {2: 16 * MIB, 4: 384 * KIB, 8: 128 * KIB}
TWO_SHOT_BYTES = 16 * MIB  #: largest tensor of any all-reduce through peers' memory
GATHER_BYTES = 4 * MIB  #: largest part of a rank in an all-gather or reduce-scatter
#: most tokens of an all-reduce that is fused with a norm. Every program polls for the peers' terms,
#: one for each token: on two H100 (hidden size 2048) 128 tokens took 5.3 us, apart 7.2, but 256
#: tokens 11.9 and 8.9, 512 tokens 82 and 13.6.
NORM_ROWS_MAX = 128
#: most bytes of their rows, padded to a power of two. A program of a wide row has more warps, so
#: fewer fit on the GPU at once: on two H200 (hidden size 7168, 16 KB a row) 64 tokens took 8.5 us,
#: apart 9.0, but 128 tokens 38.5 and 12.7.
NORM_BYTES_MAX = MIB


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


class SumLimits(NamedTuple):
    """The sizes up to which a group sums tensors through peers' memory, in bytes.

    Attributes:
        one_shot: largest tensor of a one-shot all-reduce.
        two_shot: largest tensor of a two-shot all-reduce; not above ``one_shot``: there is none.
        why: source of the limits, for the plan.
    """

    one_shot: int
    two_shot: int
    why: str


def sum_limits(ranks: int, way: str = "auto", card: str = "", dtype: str = "") -> SumLimits:
    """Return the sizes up to which a group of ranks sums tensors in one shot and in two.

    NOTE: two ranks exchange everything through peers' memory whatever a table has, because NCCL's
    buffers would cost them ``NCCL_GROUP_BYTES``.

    Args:
        ranks: number of ranks in the group.
        way: value of the option ``all_reduce``.
        card: name of the GPU, to find measured times; "": none are used.
        dtype: dtype of the activations.
    """
    if way != "auto":
        one, two = (TWO_SHOT_BYTES if way == each else 0 for each in (ONE_SHOT, TWO_SHOT))
        return SumLimits(one, two, "")
    if not card or ranks <= 2:
        return SumLimits(one_shot_bytes(ranks), TWO_SHOT_BYTES, "")
    found = exchange_table(card, ranks, dtype)
    times = found.table.all_reduce if found.table is not None else {}
    if not {*WAYS.values(), LIBRARY} <= {way for row in times.values() for way in row}:
        lacks = "" if found.table is None else ", without sums of every way"
        why = f"{found.why}{lacks}: default"
        return SumLimits(one_shot_bytes(ranks), TWO_SHOT_BYTES, why)
    return SumLimits(*_measured_limits(times), found.why)


def _measured_limits(times: Times) -> tuple[int, int]:
    """Return the largest tensors for one shot and for two, from times of every way."""
    one = fastest_up_to(times, WAYS[ONE_SHOT], [WAYS[TWO_SHOT], LIBRARY])
    two = fastest_up_to(times, WAYS[TWO_SHOT], [LIBRARY], above=one)
    if two > one and two == max(times):  # nothing larger was measured
        two = TWO_SHOT_BYTES
    return min(one, TWO_SHOT_BYTES), min(two, TWO_SHOT_BYTES)


def peer_sizes(ranks: int, hidden: int, tokens: int, limits: SumLimits | None = None) -> PeerSizes:
    """Return the sizes of the buffers of one group of ranks.

    Args:
        ranks: number of ranks in the group.
        hidden: hidden size of the model.
        tokens: most tokens of a step in all dp groups, which feed-forward layers compute.
        limits: limits of all-reduces; None: those without a table.
    """
    limits = limits or sum_limits(ranks)
    largest = hidden * tokens * WORD_BYTES
    one_shot = min(largest, limits.one_shot)
    two = limits.two_shot > limits.one_shot and one_shot < largest
    two_shot = min(largest, limits.two_shot) if two else 0
    chunk = _tiles(two_shot // ranks, LARGE_TILE)
    row = 1 << (hidden - 1).bit_length()
    fitting = min(limits.one_shot, NORM_BYTES_MAX) // (row * WORD_BYTES)
    rows = min(tokens, NORM_ROWS_MAX, fitting)
    return PeerSizes(
        small=_tiles(min(one_shot, SMALL_BYTES), SMALL_TILE),
        large=_tiles(one_shot if one_shot > SMALL_BYTES else 0, LARGE_TILE),
        terms=chunk._replace(tiles=chunk.capacity // LARGE_TILE * ranks),
        sums=chunk,
        gather=_tiles(min(largest, GATHER_BYTES), SMALL_TILE),
        norm=BufferSize(rows * row, row),
    )


def buffer_bytes(sizes: ExchangeSizes) -> int:
    """Return the total bytes of one rank's receiving buffers, for the groups on all mesh axes."""
    total = 0
    for members in groups(sizes.mesh):
        ranks = len(members)
        limits = sum_limits(ranks, sizes.options.all_reduce, sizes.card, sizes.dtype)
        total += peer_sizes(ranks, sizes.hidden, sizes.tokens, limits).bytes(ranks)
    return total


def library_bytes(sizes: ExchangeSizes) -> int:
    """Return an estimate of the bytes of NCCL's buffers, for tensors that fit no buffers of ours.

    Groups of two ranks exchange all tensors through buffers of ours, except with two-shot sums.
    """
    two_shot = sizes.options.all_reduce == TWO_SHOT
    return nccl_bytes({one for one in groups(sizes.mesh) if len(one) > 2 or two_shot})


def one_shot_bytes(ranks: int) -> int:
    """Return the bytes of the largest tensor that ranks sum in one shot where no table is."""
    return next((size for most, size in ONE_SHOT_BYTES.items() if ranks <= most), 0)


def _tiles(size: int, tile: int) -> BufferSize:
    """Return the size of a buffer for ``size`` bytes, in tiles of ``tile`` words, rounded up."""
    return BufferSize(-(-size // (tile * WORD_BYTES)) * tile, tile)
