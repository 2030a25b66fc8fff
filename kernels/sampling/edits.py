"""Logits changed before a token is chosen from them, by what each row of the sequence table asks
for; in Triton.

The rules are those of ``kernels.sampling.apply_penalties``; listed tokens and masks come before, as
in vLLM. A row that asks for nothing costs a look at its flags.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch import dependent_launch as dependent
from glowplug.kernels.launch.integers import next_power_of_2

#: bits of a row's flags
PENALTIES = 1
ALLOWED = 2
LISTED = 4
#: bits of a token's entry in the table: it is not allowed; it is in the prompt. The rest counts it
#: in the output
FORBIDDEN = -(1 << 31)
IN_PROMPT = 1 << 30

_PENALTIES = tl.constexpr(PENALTIES)
_ALLOWED = tl.constexpr(ALLOWED)
_LISTED = tl.constexpr(LISTED)
_IN_PROMPT = tl.constexpr(IN_PROMPT)


class RowEdits(NamedTuple):
    """What rows of the sequence table ask for. R rows, V vocabulary, L entries of a list at most.

    Attributes:
        flags, min_length, added, listed: int64 columns [R] of one table. The first ``added`` of a
            row's list always count, the others, ``listed`` in all, before position ``min_length``.
        repetition, frequency, presence: float32 columns [R] of one table.
        ids, values: int32, float32 [R, L]: numbers added to logits of these tokens, which differ
            among the added ones and among the others.
        table: int32 [R, V], of rows with penalties or allowed tokens.
    """

    flags: Tensor
    min_length: Tensor
    added: Tensor
    listed: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    ids: Tensor
    values: Tensor
    table: Tensor

    @property
    def strides(self) -> tuple[int, int, int]:
        return self.flags.stride(0), self.repetition.stride(0), self.ids.shape[1]


@triton.jit
def _add_listed(
    source,
    state,
    first,
    last,
    position,
    min_length,
    added,
    listed,
    ids,
    values,
    width,
    LIST: tl.constexpr,
):
    """Add to the logits of listed tokens ``first`` to ``last`` in place."""
    always, count = tl.load(added), tl.load(listed)
    until = tl.where(position < tl.load(min_length), count, always)
    for start in range(0, until.to(tl.int32), LIST):
        entry = start + tl.arange(0, LIST)
        token = tl.load(ids + state * width + entry, mask=entry < until, other=-1)
        value = tl.load(values + state * width + entry, mask=entry < until, other=0.0)
        tl.atomic_add(source + token, value, mask=(token >= first) & (token < last))
    tl.debug_barrier()


@triton.jit
def _penalised(value, held, index, ahead, ahead_count, repetition, frequency, presence):
    count = held & (_IN_PROMPT - 1)
    seen = (held & 0x7FFFFFFF) != 0
    for j in range(ahead_count):
        now = index == tl.load(ahead + j)
        count += now.to(tl.int32)
        seen = seen | now
    factor = tl.where(seen, tl.load(repetition), 1.0)
    value = tl.where(value > 0, tl.div_rn(value, factor), value * factor)
    value = value - count.to(tl.float32) * tl.load(frequency)
    return value - tl.where(count > 0, tl.load(presence), 0.0)


@triton.jit
def edited(
    source,
    state,
    index,
    block,
    position,
    ahead,
    ahead_count,
    flags,
    min_length,
    added,
    listed,
    repetition,
    frequency,
    presence,
    ids,
    values,
    table,
    int_stride,
    float_stride,
    width,
    vocab,
    BLOCK: tl.constexpr,
    LIST: tl.constexpr,
):
    """The row's logits at ``index``, -inf behind the vocabulary, edited and written back to
    ``source``.
    """
    inside = index < vocab
    asked = tl.load(flags + state * int_stride)
    if asked & _LISTED != 0:
        at = state * int_stride
        _add_listed(
            source,
            state,
            block * BLOCK,
            tl.minimum(block * BLOCK + BLOCK, vocab),
            position,
            min_length + at,
            added + at,
            listed + at,
            ids,
            values,
            width,
            LIST,
        )
    value = tl.load(source + index, mask=inside, other=float("-inf"), cache_modifier=".cg")
    if asked & (_PENALTIES | _ALLOWED) != 0:
        held = tl.load(table + state * vocab + index, mask=inside, other=0)
        if asked & _PENALTIES != 0:
            at = state * float_stride
            value = _penalised(
                value,
                held,
                index,
                ahead,
                ahead_count,
                repetition + at,
                frequency + at,
                presence + at,
            )
        value = tl.where(held < 0, float("-inf"), value)
        tl.store(source + index, value, mask=inside)
    return value


@triton.jit
def _observe(
    rows,
    tokens,
    counts,
    flags,
    table,
    int_stride,
    tokens_stride,
    vocab,
    WIDTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    dependent.begin(DEPENDENT)
    dependent.wait(DEPENDENT)
    row = tl.program_id(0)
    state = tl.load(rows + row)
    if tl.load(flags + state * int_stride) & _PENALTIES != 0:
        place = tl.arange(0, WIDTH)
        accepted = place < tl.load(counts + row)
        token = tl.load(tokens + row * tokens_stride + place, mask=accepted, other=0)
        tl.atomic_add(table + state * vocab + token, 1, mask=accepted)


def observe(tokens: Tensor, counts: Tensor, rows: Tensor, edits: RowEdits) -> None:
    """Count the first ``counts`` int32 [B] of tokens int64 [B, W] in the table, for rows int64 [B]
    with penalties.
    """
    if len(rows):
        width = next_power_of_2(max(2, tokens.shape[1]))
        _observe[(len(rows),)](
            rows,
            tokens,
            counts,
            edits.flags,
            edits.table,
            edits.flags.stride(0),
            tokens.stride(0),
            edits.table.shape[1],
            WIDTH=width,
            num_warps=1,
            **dependent.options(),
        )
