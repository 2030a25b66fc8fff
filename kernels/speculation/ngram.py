"""Prompt lookup on a GPU: drafts copied from earlier occurrences of a row's last tokens.

``ngram_reference`` defines the result. The host does not know the rows' lengths, so the launch does
not depend on them: a row's tokens are divided into a fixed number of parts, which are searched at
the same time, and a second kernel merges what the parts have found.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch.integers import cdiv, next_power_of_2
from glowplug.kernels.speculation.ngram_reference import Lookup

BLOCK = 512  #: positions that a program compares at a time
PART_TOKENS = 2048  #: columns of the table for which a row gets one more part
PARTS_MAX = 32  #: most parts of a row


def parts_of(columns: int) -> int:
    """Return the number of parts into which a row is divided, a power of two.

    Args:
        columns: Number of columns of the table of tokens.
    """
    return min(PARTS_MAX, next_power_of_2(cdiv(columns, PART_TOKENS)))


@triton.jit
def _taken(tokens, begins, TOPK: tl.constexpr):
    """Return which of ``tokens`` [N] are among ``begins`` [TOPK_SIZE]; with one branch none is."""
    if TOPK == 1:
        return tokens < 0
    return tl.max((tokens[:, None] == begins[None, :]).to(tl.int32), 1) > 0


@triton.jit
def _search(
    table,
    rows,
    lengths,
    keys,
    columns,
    longest,
    shortest,
    TOPK: tl.constexpr,
    TOPK_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the best matches of one part of a row, as length * 2^32 + position; -1 for none."""
    place, part = tl.program_id(0), tl.program_id(1)
    text = table + tl.load(rows + place).to(tl.int64) * columns
    last = tl.load(lengths + place).to(tl.int32) - 1
    size = tl.cdiv(tl.cdiv(last, PARTS), BLOCK) * BLOCK
    slots = tl.arange(0, TOPK_SIZE)
    begins = tl.full((TOPK_SIZE,), -1, tl.int32)
    for branch in tl.static_range(TOPK):
        best = tl.full((BLOCK,), -1, tl.int64)
        for start in range(part * size, tl.minimum((part + 1) * size, last), BLOCK):
            ends = start + tl.arange(0, BLOCK)
            alive = ends < last
            following = tl.load(text + ends + 1, mask=alive, other=-1)
            count = tl.zeros((BLOCK,), tl.int32)
            for back in range(longest):
                inside = alive & (ends >= back)
                own = tl.load(text + ends - back, mask=inside, other=-1)
                wanted = tl.load(text + tl.maximum(last - back, 0))
                alive = inside & (own == wanted)
                count += alive.to(tl.int32)
            good = (count >= shortest) & (~_taken(following, begins, TOPK))
            ordered = count.to(tl.int64) * 4294967296 + ends
            best = tl.maximum(best, tl.where(good, ordered, -1))
        key = tl.max(best, 0)
        tl.store(keys + (place * PARTS + part) * TOPK + branch, key)
        end = (key & 0xFFFFFFFF).to(tl.int32)
        begin = tl.where(key >= 0, tl.load(text + end + 1), -1)
        begins = tl.where(slots == branch, begin, begins)


@triton.jit
def _merge(
    table,
    rows,
    lengths,
    keys,
    branches,
    matches,
    columns,
    steps,
    TOPK: tl.constexpr,
    TOPK_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    KEYS_SIZE: tl.constexpr,
    STEPS_SIZE: tl.constexpr,
):
    """Write the branches of a row and its number of matches, from the best ones of its parts."""
    place = tl.program_id(0)
    text = table + tl.load(rows + place).to(tl.int64) * columns
    last = tl.load(lengths + place).to(tl.int32) - 1
    number = tl.arange(0, KEYS_SIZE)
    key = tl.load(keys + place * PARTS * TOPK + number, mask=number < PARTS * TOPK, other=-1)
    ends = (key & 0xFFFFFFFF).to(tl.int32)
    following = tl.load(text + ends + 1, mask=key >= 0, other=-1)
    slots = tl.arange(0, TOPK_SIZE)
    begins = tl.full((TOPK_SIZE,), -1, tl.int32)
    step = tl.arange(0, STEPS_SIZE)
    newest = tl.load(text + last)
    count = 0
    for branch in tl.static_range(TOPK):
        best = tl.max(tl.where(_taken(following, begins, TOPK), -1, key), 0)
        end = tl.where(best >= 0, (best & 0xFFFFFFFF).to(tl.int32), last - 1)
        copied = tl.load(text + end + 1 + step % (last - end), mask=step < steps, other=0)
        spare = newest
        if branch > 0:
            spare = tl.min(tl.where(_taken(slots, begins, TOPK), TOPK_SIZE, slots), 0)
        count += (best >= 0).to(tl.int32)
        drafts = tl.where(best >= 0, copied, spare)
        tl.store(
            branches + (place * TOPK + branch) * steps + step,
            drafts.to(tl.int64),
            mask=step < steps,
        )
        begin = tl.sum(tl.where(step == 0, drafts, 0), 0)
        begins = tl.where(slots == branch, begin, begins)
    tl.store(matches + place, count)


def ngram_branches(
    tokens: Tensor, rows: Tensor, lengths: Tensor, lookup: Lookup
) -> tuple[Tensor, Tensor]:
    """Return the continuations of the best matches of each row, and the number of these matches.

    Arguments and results are those of ``ngram_reference.ngram_branches``, on a GPU. The host does
    not wait for the device, so the call can be captured.
    """
    count, columns = len(rows), tokens.shape[1]
    topk, parts = lookup.topk, parts_of(columns)
    branches = rows.new_empty(count, topk, lookup.steps)
    matches = tokens.new_empty(count)
    if not count:
        return branches, matches
    keys = rows.new_empty(count, parts, topk)
    size = next_power_of_2(topk)
    _search[(count, parts)](
        tokens,
        rows,
        lengths,
        keys,
        columns,
        lookup.longest,
        lookup.shortest,
        TOPK=topk,
        TOPK_SIZE=size,
        PARTS=parts,
        BLOCK=BLOCK,
    )
    _merge[(count,)](
        tokens,
        rows,
        lengths,
        keys,
        branches,
        matches,
        columns,
        lookup.steps,
        TOPK=topk,
        TOPK_SIZE=size,
        PARTS=parts,
        KEYS_SIZE=next_power_of_2(parts * topk),
        STEPS_SIZE=next_power_of_2(lookup.steps),
    )
    return branches, matches
