"""Edits of logits before a token is chosen, according to each row of the sequence table, in Triton.

Penalties follow ``kernels.sampling.reference.apply_penalties``; listed tokens and masks are applied
first, as in vLLM. A row without edits costs one load of its flags.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.integers import next_power_of_2

PENALTIES = 1  #: row flag: the row has penalties
ALLOWED = 2  #: row flag: only some tokens are allowed
LISTED = 4  #: row flag: the row has a list of tokens with numbers to add
FORBIDDEN = -(1 << 31)  #: bit of a table entry: the token is not allowed
#: bit of a table entry: the token is in the prompt. The lower bits count it in the output
IN_PROMPT = 1 << 30

_PENALTIES = tl.constexpr(PENALTIES)
_ALLOWED = tl.constexpr(ALLOWED)
_LISTED = tl.constexpr(LISTED)
_IN_PROMPT = tl.constexpr(IN_PROMPT)


class RowEdits(NamedTuple):
    """Changes to the logits of each row of the sequence table, before a token is chosen.

    There are R rows, V tokens in the vocabulary, and at most L entries in a row's list.

    Attributes:
        flags: int64 column [R], bits PENALTIES, ALLOWED and LISTED
        min_length: int64 column [R]: position before which all entries of the row's list count
        added: int64 column [R]: number of first entries of the list that always count
        listed: int64 column [R]: number of entries of the list. The four int64 columns belong to
            one table
        repetition: float32 column [R]
        frequency: float32 column [R]
        presence: float32 column [R]. The three float32 columns belong to one table
        ids: int32 [R, L]: listed tokens, distinct among the first ``added`` and among the others
        values: float32 [R, L]: numbers added to the logits of the listed tokens
        table: int32 [R, V], for rows with penalties or allowed tokens: how often the output has
            each token, and the bits IN_PROMPT and FORBIDDEN
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
        """Row strides of the int64 and the float32 columns, and L."""
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
    """Add the values of listed tokens ``first`` to ``last`` to their logits in place."""
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
    """Return the penalised logits of tokens ``index``, given their logits ``value``.

    ``held`` are the tokens' entries in ``RowEdits.table``. The ``ahead_count`` tokens at ``ahead``
    count too, although they were not observed yet.
    """
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
    """Edit the row's logits at ``index``, write them back to ``source`` and return them.

    The row's edits are those of row ``state`` of the sequence table. Indices beyond the vocabulary
    give -inf.
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
    """Add the accepted tokens of one row to its token counts in ``table``, for the penalties."""
    dependent_launch.begin(DEPENDENT)
    dependent_launch.wait(DEPENDENT)
    row = tl.program_id(0)
    state = tl.load(rows + row)
    if tl.load(flags + state * int_stride) & _PENALTIES != 0:
        place = tl.arange(0, WIDTH)
        accepted = place < tl.load(counts + row)
        token = tl.load(tokens + row * tokens_stride + place, mask=accepted, other=0)
        tl.atomic_add(table + state * vocab + token, 1, mask=accepted)


def observe(tokens: Tensor, counts: Tensor, rows: Tensor, edits: RowEdits) -> None:
    """Add tokens to the token counts of their rows, for rows with penalties.

    Args:
        tokens: int64 [B, W]
        counts: int32 [B]: the number of first tokens of each row to add
        rows: int64 [B], rows of the sequence table
        edits: the rows' edits; ``table`` is updated
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
            **dependent_launch.options(),
        )


# ---- masks of allowed tokens ---------------------------------------------------------------------

MASK_BLOCK = 4096  #: tokens of one program of ``forbid``


@triton.jit
def _forbid(logits, rows, masks, vocab, stride, words, BLOCK: tl.constexpr):
    """Set the logits of one block of one row to minus infinity where its mask has no bit."""
    number, block = tl.program_id(0), tl.program_id(1)
    index = block * BLOCK + tl.arange(0, BLOCK)
    inside = index < vocab
    word = tl.load(masks + number.to(tl.int64) * words + index // 32, mask=inside, other=-1)
    row = tl.load(rows + number)
    absent = ((word >> (index % 32)) & 1) == 0
    tl.store(logits + row * stride + index, float("-inf"), mask=inside & absent)


def forbid(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Do the work of ``reference.forbid`` with one launch, without temporary memory.

    The last dimensions of ``logits`` and ``masks`` are contiguous.
    """
    count, words = masks.shape
    vocab = logits.shape[1]
    grid = (count, -(-vocab // MASK_BLOCK))
    _forbid[grid](logits, rows, masks, vocab, logits.stride(0), words, BLOCK=MASK_BLOCK)
