"""Moves of cache entries between slots of a row, for many layers in one launch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch.integers import cdiv, next_power_of_2

BLOCK_WORDS_MAX = 256  #: words of an entry that one program copies
MOVES_AT_ONCE = 8  #: moves whose entries a program reads before it writes the first of them
WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}  #: bytes of a word -> its type


@triton.jit
def _move(slots, others, row, move, moves, words):
    """Return slot ``move`` of a row, and the words of its entry that the move copies.

    They are 0 if the other slot of the move is the same, and beyond the last move.
    """
    at = row + tl.minimum(move, moves - 1)
    slot = tl.load(slots + at)
    return slot, tl.where((slot != tl.load(others + at)) & (move < moves), words, 0)


# NOTE: this kernel lets no other kernel start before its end (kernels/launch/dependent_launch.py):
# latent attention on Hopper reads earlier keys before it waits for the kernels before it
@triton.jit(do_not_specialize=["first", "moves"])
def move_entries_kernel(
    sources,
    targets,
    table,
    first,
    moves,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
    MOVES: tl.constexpr,
):
    """Move BLOCK words of one row's entries in one cache tensor.

    ``table`` is ``EntryTable.lines``, in which ``first`` is the first tensor of the call. MOVES
    entries are read before any of them is written: a later source is not an earlier target, because
    sources ascend and no target is behind its own source.
    """
    row = tl.program_id(0).to(tl.int64) * moves
    line = table + (first + tl.program_id(1)) * 3
    pool = tl.load(line).to(tl.pointer_type(WORD))
    slot_words, words = tl.load(line + 1), tl.load(line + 2)
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    for start in range(0, moves, MOVES):
        held = ()
        for i in tl.static_range(MOVES):
            source, copied = _move(sources, targets, row, start + i, moves, words)
            at = pool + source * slot_words + word
            held = held + (tl.load(at, mask=word < copied, other=0),)  # type: ignore[assignment]
        tl.debug_barrier()
        for i in tl.static_range(MOVES):
            target, copied = _move(targets, sources, row, start + i, moves, words)
            tl.store(pool + target * slot_words + word, held[i], mask=word < copied)


class EntryTable:
    """The addresses of all tensors of a KV pool, on the device.

    An entry is copied as words, the largest integers of which all entries and their addresses are
    multiples, so its format does not matter.

    Attributes:
        lines: int64 [N, 3] on the device, for each tensor its address, the words between two
            slots and the words of an entry; layer by layer.
        starts: index of each layer's first line, and N.
        word: bytes of a word.
        words: words of the largest entry.
    """

    def __init__(self, kv: Sequence[Mapping[str, Tensor]]) -> None:
        """Describe ``kv``, for each layer its cache tensors [slots, *shape]."""
        pools = [pool for layer in kv for pool in layer.values()]
        assert all(pool[:1].is_contiguous() for pool in pools), "entries are contiguous"
        lines = [_line(pool) for pool in pools]
        self.word = math.gcd(max(WORDS), *(number for line in lines for number in line))
        self.words = max(size for _, _, size in lines) // self.word
        self.starts = [0, *accumulate(map(len, kv))]
        words = [(at, stride // self.word, size // self.word) for at, stride, size in lines]
        self.lines = torch.tensor(words, dtype=torch.int64).to(pools[0].device)


def _line(pool: Tensor) -> tuple[int, int, int]:
    """Return a cache tensor's address, and the bytes between two slots and of an entry."""
    size = math.prod(pool.shape[1:])
    return pool.data_ptr(), pool.stride(0) * pool.itemsize, size * pool.itemsize


def move_entries(table: EntryTable, sources: Tensor, targets: Tensor, layers: range) -> None:
    """Copy the entries of rows from ``sources`` to ``targets``, in ascending order.

    The reference is ``kernels.paged.move_entries_reference``.

    Args:
        table: the cache
        sources: slots to read, int64 [D, S]
        targets: slots to write, int64 [D, S]; entries with two equal slots are not touched, and of
            the others of a row sources and targets ascend, with no target behind its source
        layers: consecutive layers of the table
    """
    rows, moves = sources.shape
    first, end = table.starts[layers.start], table.starts[layers.stop]
    if not rows * moves * (end - first):
        return
    assert layers.step == 1 and sources.is_contiguous() and targets.is_contiguous()
    block = min(BLOCK_WORDS_MAX, next_power_of_2(table.words))
    move_entries_kernel[(rows, end - first, cdiv(table.words, block))](
        sources,
        targets,
        table.lines,
        first,
        moves,
        WORD=WORDS[table.word],
        BLOCK=block,
        MOVES=MOVES_AT_ONCE,
    )
