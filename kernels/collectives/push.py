"""Exchange of data between ranks by stores into peers' buffers, without flags.

Every rank stores its numbers into receiving buffers of its peers. A buffer holds the bits of
negative zeros where nothing has arrived, and a program polls its part of the buffer until none is
left. Negative zeros are sent as zeros. Three buffers take turns, so that one can be cleared while
peers fill another: call e clears the buffer of call e - 1. Peers fill that buffer again in call
e + 2, which they begin only after they have received this rank's data of call e + 1. The calls
are counted on the device for each tile, so a captured graph can be replayed.

All ranks of a group must make the same calls in the same order. Sums are in float32 and in order of
rank, so they are bitwise equal on all ranks, and a number's sum does not depend on its place.

Method: the low-latency protocol of TensorRT-LLM's "Lamport" all-reduce, here with Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from glowplug.kernels.collectives.buffer_sizes import BUFFERS
from glowplug.kernels.launch import dependent_launch

#: two negative zeros in bfloat16 or float16, as int32; in float32 a negative subnormal number
EMPTY_BITS = -0x7FFF8000
#: dtypes whose negative zero is sent as zero
SENT_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
TURNS = tl.constexpr(BUFFERS)
#: nanoseconds of waiting after which ``fault`` and the limit are looked at
PATIENCE = tl.constexpr(1_000_000)
BUFFER_ALIGNMENT = tl.constexpr(16)  #: bytes to which a rank's buffers are aligned
EMPTY32 = tl.constexpr(EMPTY_BITS)
EMPTY16 = tl.constexpr(-0x8000)


@dataclass(frozen=True)
class PeerBuffers:
    """Receiving buffers of a group of ranks, as one of the ranks sees them.

    A rank's buffers are 16-bit words [BUFFERS, ranks - 1, capacity]; numbers of 32 bits take two
    words. The second index is the distance from the receiving to the sending rank, less one.

    Attributes:
        rank: this rank's number in the group.
        ranks: number of ranks in the group.
        capacity: 16-bit words that a rank can send to a peer in one call.
        tile: 16-bit words per tile; fixed, because calls are counted for each tile.
        peers: addresses of the ranks' buffers, int64 [ranks].
        turns: number of calls that have used each tile, modulo BUFFERS, int32 [tiles]: the index of
            the buffer that the next call fills.
        fault: int64 [2]. First 0; if data did not arrive in time, 1 + number of the sending rank.
            Second the address of an int32 in host memory that is set to the same number.
        limit: nanoseconds to wait for data; 0: no limit.
    """

    rank: int
    ranks: int
    capacity: int
    tile: int
    peers: Tensor
    turns: Tensor
    fault: Tensor
    limit: int = 0

    def fits(self, x: Tensor, ranks: int = 1) -> bool:
        """Return whether x can be sent in one call.

        x is divided into ``ranks`` equal parts, one for each rank; 1: all of x goes to every rank.
        """
        return x.dtype in SENT_DTYPES and x.numel() * x.element_size() <= 2 * self.capacity * ranks

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors that kernels over these buffers take: peers, turns and fault."""
        return self.peers, self.turns, self.fault

    def constants(self, stages: int) -> dict[str, Any]:
        """Return the constants and launch options that all kernels over these buffers take.

        Args:
            stages: the kernel's stages to run.
        """
        return {
            "RANK": self.rank,
            "RANKS": self.ranks,
            "STAGES": stages,
            "LIMIT": self.limit,
            **dependent_launch.options(),
        }

    def words(self, x: Tensor) -> tuple[int, int]:
        """Return ``capacity`` and ``tile``, counted in elements of x instead of 16-bit words."""
        return self.capacity * 2 // x.element_size(), self.tile * 2 // x.element_size()


def peer_buffers(
    rank: int,
    addresses: Sequence[int],
    capacity: int,
    tile: int,
    fault: Tensor,
    limit: int = 0,
    tiles: int = 0,
) -> PeerBuffers:
    """Return the ``PeerBuffers`` over memory that holds ``EMPTY_BITS`` everywhere.

    Args:
        rank: this rank's number in the group.
        addresses: address of each rank's buffers in this rank's address space, a multiple of
            ``BUFFER_ALIGNMENT``.
        capacity: 16-bit words that a rank can send to a peer in one call, a multiple of ``tile``.
        tile: 16-bit words per tile.
        fault: as in ``PeerBuffers``; its device is the device of the rank.
        limit: as in ``PeerBuffers``.
        tiles: number of tiles in ``PeerBuffers.turns``; 0: the tiles of ``capacity``.
    """
    assert capacity % tile == 0, "turns are counted for whole tiles"
    assert not any(address % BUFFER_ALIGNMENT.value for address in addresses), "not aligned"
    device = fault.device
    return PeerBuffers(
        rank=rank,
        ranks=len(addresses),
        capacity=capacity,
        tile=tile,
        peers=torch.tensor(list(addresses), dtype=torch.int64, device=device),
        turns=torch.zeros(tiles or capacity // tile, dtype=torch.int32, device=device),
        fault=fault,
        limit=limit,
    )


@triton.jit
def empty_word(WORD: tl.constexpr):
    """Return the word of type WORD that marks a place in a buffer as empty."""
    if WORD == tl.int32:
        return EMPTY32
    else:
        return EMPTY16


@triton.jit
def bits_of(x):
    """Return the bits of x to store in a peer's buffer, int16 or int32.

    Bits that would mark a place as empty become zeros.
    """
    if x.dtype.primitive_bitwidth == 32:
        bits = x.to(tl.int32, bitcast=True)
    else:
        bits = x.to(tl.int16, bitcast=True)
    return tl.where(bits == empty_word(bits.dtype), tl.zeros_like(bits), bits)


@triton.jit
def missing(bits):
    """Return whether any word of ``bits`` has not arrived."""
    return tl.max((bits == empty_word(bits.dtype)).to(tl.int32)) > 0


@triton.jit
def received(address, mask, fault, source, LIMIT: tl.constexpr):
    """Return the words at ``address`` (pointers) once all of them have arrived.

    After LIMIT nanoseconds ``fault`` is set, and the words are returned as they are. Once
    ``fault`` is set, no call waits for more than a millisecond.
    """
    bits = tl.load(address, mask=mask, other=0, volatile=True)
    if LIMIT == 0:
        while missing(bits):
            bits = tl.load(address, mask=mask, other=0, volatile=True)
    elif missing(bits):
        begun = globaltimer()
        waits = True
        while waits:
            bits = tl.load(address, mask=mask, other=0, volatile=True)
            waits = missing(bits)
            waited = globaltimer() - begun
            if waits & (waited > PATIENCE):
                if waited > LIMIT:
                    tl.store(fault, source + 1)
                    tl.store(tl.load(fault + 1).to(tl.pointer_type(tl.int32)), source + 1)
                waits = tl.load(fault, volatile=True) == 0
    return bits


@triton.jit
def buffers_of(peers, rank, like):
    """Return the buffers of ``rank`` as a pointer to words as wide as the numbers of ``like``.

    Without the hint on the address, stores and polls move one word at a time (on two H200 a decode
    step of V2-Lite then takes 3.25 instead of 3.21 ms at batch 8).
    """
    address = tl.load(peers + rank)
    if like.dtype.element_ty.primitive_bitwidth == 32:
        return tl.multiple_of(address.to(tl.pointer_type(tl.int32)), BUFFER_ALIGNMENT)
    else:
        return tl.multiple_of(address.to(tl.pointer_type(tl.int16)), BUFFER_ALIGNMENT)


@triton.jit
def slot_of(turn, source, receiver, capacity, RANKS: tl.constexpr):
    """Return the index in ``receiver``'s buffers of the first word that rank ``source`` stores.

    The buffers of a turn have a slot for each other rank, first that of the next rank.
    """
    return (turn * (RANKS - 1) + (source - receiver - 1 + RANKS) % RANKS) * capacity


@triton.jit
def push(bits, at, mask, peers, turn, capacity, like, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Store ``bits`` in every peer's buffer, at index ``at`` of the part for this rank."""
    for distance in tl.static_range(1, RANKS):
        receiver = (RANK + distance) % RANKS
        place = slot_of(turn, RANK, receiver, capacity, RANKS) + at
        tl.store(buffers_of(peers, receiver, like) + place, bits, mask=mask)


@triton.jit
def sum_of_ranks(
    mine,
    at,
    mask,
    own,
    turn,
    capacity,
    fault,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Return the float32 sum, in order of rank, of ``mine`` and the numbers that peers send."""
    total = tl.zeros(mine.shape, tl.float32)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            total += mine.to(tl.float32)
        else:
            place = slot_of(turn, rank, RANK, capacity, RANKS) + at
            bits = received(own + place, mask, fault, rank, LIMIT)
            total += bits.to(mine.dtype, bitcast=True).to(tl.float32)
    return total


@triton.jit
def clear_one(place, mask, like):
    """Mark the words at ``place`` (pointers) as empty."""
    WORD: tl.constexpr = like.dtype.element_ty
    tl.store(place, tl.full(place.shape, empty_word(WORD), WORD), mask=mask)


@triton.jit
def clear(at, mask, own, turn, capacity, RANKS: tl.constexpr):
    """Mark the words at index ``at`` of the buffer that the previous call filled as empty.

    A kernel clears before it polls for data, so that the stores run while it waits.

    ``turn``: index of the buffer that this call fills.
    """
    former = (turn + TURNS - 1) % TURNS
    for source in tl.static_range(1, RANKS):
        clear_one(own + slot_of(former, source, 0, capacity, RANKS) + at, mask, own)


@triton.jit
def next_turn(turns, tile, turn):
    """Store the next call's buffer index for ``tile``, once all threads have read ``turn``."""
    tl.debug_barrier()
    tl.store(turns + tile, (turn + 1) % TURNS)
