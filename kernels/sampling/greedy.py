"""Greedy token choice: the most likely token of each row, after its edits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.integers import cdiv, next_power_of_2
from glowplug.kernels.sampling.edits import RowEdits, edited
from glowplug.kernels.sampling.reference import INFINITY_BITS
from glowplug.kernels.sampling.vocabulary_blocks import Grid, RowChoice, finished, key_of

LIST_CHUNK = 64  #: listed tokens processed together
ROWS_OF_KEYS = 64  #: rows of keys per program
NO_KEY = tl.constexpr(-0x7FFFFFFFFFFFFFFF)  #: smaller than every key
INFINITY = tl.constexpr(INFINITY_BITS)


@triton.jit
def _best(
    logits,
    keys,
    arrived,
    tokens,
    peaks,
    bad,
    least,
    vocab,
    stride,
    blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Find the most likely token of a row."""
    dependent_launch.begin(DEPENDENT)
    dependent_launch.wait(DEPENDENT)
    row, block = tl.program_id(0), tl.program_id(1)
    index = block * BLOCK + tl.arange(0, BLOCK)
    source = logits + row.to(tl.int64) * stride
    value = tl.load(source + index, mask=index < vocab, other=float("-inf"))
    _best_of_row(
        source,
        value,
        index,
        row,
        block,
        keys,
        arrived,
        tokens,
        peaks,
        bad,
        least,
        vocab,
        blocks,
        BLOCKS,
    )


@triton.jit
def _best_edited(
    logits,
    keys,
    arrived,
    tokens,
    peaks,
    bad,
    least,
    rows,
    positions,
    ahead,
    ahead_stride,
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
    stride,
    blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    LIST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Edit the logits of a row and find its most likely token."""
    dependent_launch.begin(DEPENDENT)
    dependent_launch.wait(DEPENDENT)
    row, block = tl.program_id(0), tl.program_id(1)
    index = block * BLOCK + tl.arange(0, BLOCK)
    source = logits + row.to(tl.int64) * stride
    value = edited(
        source,
        tl.load(rows + row),
        index,
        block,
        tl.load(positions + row),
        ahead + row * ahead_stride,
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
        BLOCK,
        LIST,
    )
    _best_of_row(
        source,
        value,
        index,
        row,
        block,
        keys,
        arrived,
        tokens,
        peaks,
        bad,
        least,
        vocab,
        blocks,
        BLOCKS,
    )


@triton.jit
def _largest(keys, row, blocks, BLOCKS: tl.constexpr):
    """Return the largest of the keys of a row's blocks."""
    each = tl.arange(0, BLOCKS)
    found = tl.load(
        keys + row * blocks + each, mask=each < blocks, other=NO_KEY, cache_modifier=".cg"
    )
    return tl.max(found)


@triton.jit
def _best_keys(
    logits,
    block_keys,
    arrived,
    keys,
    vocab,
    stride,
    blocks,
    first,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Find the largest key of a row; the ids of its tokens begin at ``first``."""
    dependent_launch.begin(DEPENDENT)
    dependent_launch.wait(DEPENDENT)
    row, block = tl.program_id(0), tl.program_id(1)
    index = block * BLOCK + tl.arange(0, BLOCK)
    source = logits + row.to(tl.int64) * stride
    value = tl.load(source + index, mask=index < vocab, other=float("-inf"))
    tl.store(block_keys + row * blocks + block, tl.max(key_of(value, index + first)))
    if finished(arrived, row, blocks):
        tl.store(keys + row, _largest(block_keys, row, blocks, BLOCKS))


@triton.jit(do_not_specialize=["rows"])
def _best_of_keys(
    keys,
    tokens,
    bad,
    rows,
    ranks,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Find the largest key of BLOCK rows over the ranks, and store its token."""
    dependent_launch.begin(DEPENDENT)
    dependent_launch.wait(DEPENDENT)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rank = tl.arange(0, RANKS)
    inside = (rank < ranks)[:, None] & (row < rows)[None, :]
    found = tl.load(keys + rank[:, None] * rows + row[None, :], mask=inside, other=NO_KEY)
    best = tl.max(found, 0)
    ordered = best >> 32
    tl.store(tokens + row, 0x7FFFFFFF - (best & 0xFFFFFFFF), mask=row < rows)
    tl.store(bad + row, (ordered >= INFINITY) | (ordered < -INFINITY), mask=row < rows)


@triton.jit
def _best_of_row(
    source,
    value,
    index,
    row,
    block,
    keys,
    arrived,
    tokens,
    peaks,
    bad,
    least,
    vocab,
    blocks,
    BLOCKS: tl.constexpr,
):
    """Find a block's best key (``key_of``); the last program of the row writes the row's choice."""
    tl.store(keys + row * blocks + block, tl.max(key_of(value, index)))
    if finished(arrived, row, blocks):
        found = _largest(keys, row, blocks, BLOCKS)
        token = tl.minimum(0x7FFFFFFF - (found & 0xFFFFFFFF), vocab - 1)
        peak = tl.load(source + token, cache_modifier=".cg")  # another program may have edited it
        tl.store(tokens + row, token)
        tl.store(peaks + row, peak)
        tl.store(bad + row, (peak - peak) != 0)
        tl.store(least + row, 0)


def best(logits: Tensor, arrived: Tensor) -> RowChoice:
    """Choose the most likely token of each row.

    Args:
        logits: float32 [N, V]; rows may be strided
        arrived: int32 [N or more], counters of finished programs per row, zeros before and after
    """
    grid = Grid.over(logits)
    choice = _choice(logits)
    if len(logits):
        keys = torch.empty(grid.programs, dtype=torch.int64, device=logits.device)
        _best[grid.programs](
            logits,
            keys,
            arrived,
            *choice,
            *grid.sizes,
            BLOCK=grid.block,
            BLOCKS=grid.blocks,
            **dependent_launch.options(),
        )
    return choice


def best_edited(
    logits: Tensor,
    arrived: Tensor,
    rows: Tensor,
    positions: Tensor,
    ahead: Tensor | None,
    edits: RowEdits,
) -> RowChoice:
    """Edit logits in place and choose the most likely token of each row.

    Args:
        logits: float32 [N, V]; rows may be strided
        arrived: int32 [N or more], counters of finished programs per row, zeros before and after
        rows: int64 [N], rows of the sequence table
        positions: int64 [N]
        ahead: int64 [N, W - 1]: tokens that penalties count although they were not observed yet;
            -1: none
        edits: edits of the rows
    """
    grid = Grid.over(logits)
    choice = _choice(logits)
    if len(logits):
        keys = torch.empty(grid.programs, dtype=torch.int64, device=logits.device)
        count = 0 if ahead is None else ahead.shape[1]
        # NOTE: without fusion, each product and sum is rounded as in torch, so that ties are equal.
        _best_edited[grid.programs](
            logits,
            keys,
            arrived,
            *choice,
            rows,
            positions,
            rows if ahead is None else ahead,
            0 if ahead is None else ahead.stride(0),
            count,
            *edits,
            *edits.strides,
            *grid.sizes,
            BLOCK=grid.block,
            BLOCKS=grid.blocks,
            LIST=LIST_CHUNK,
            enable_fp_fusion=False,
            **dependent_launch.options(),
        )
    return choice


def best_keys(logits: Tensor, first: int, arrived: Tensor) -> Tensor:
    """Return a key of each row's most likely token, int64 [N], as ``reference.best_keys`` does.

    Args:
        logits: float32 [N, S], those of the tokens ``first`` to ``first + S - 1``; rows may be
            strided
        first: token id of the first column
        arrived: int32 [N or more], counters of finished programs per row, zeros before and after
    """
    grid = Grid.over(logits)
    keys = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(logits):
        block_keys = torch.empty(grid.programs, dtype=torch.int64, device=logits.device)
        _best_keys[grid.programs](
            logits,
            block_keys,
            arrived,
            keys,
            *grid.sizes,
            first,
            BLOCK=grid.block,
            BLOCKS=grid.blocks,
            **dependent_launch.options(),
        )
    return keys


def best_of_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the most likely tokens of rows whose vocabulary is divided among ranks.

    Args:
        keys: int64 [ranks, N], contiguous, from ``best_keys``

    Returns:
        tokens int64 [N], and bool [N]: the logit of the token is not finite
    """
    ranks, rows = keys.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=keys.device)
    bad = torch.empty(rows, dtype=torch.bool, device=keys.device)
    if rows:
        _best_of_keys[cdiv(rows, ROWS_OF_KEYS),](
            keys,
            tokens,
            bad,
            rows,
            ranks,
            BLOCK=ROWS_OF_KEYS,
            RANKS=next_power_of_2(ranks),
            **dependent_launch.options(),
        )
    return tokens, bad


def _choice(logits: Tensor) -> RowChoice:
    """Allocate an uninitialised :class:`RowChoice` for the rows of ``logits``."""
    rows = logits.shape[0]
    device = logits.device
    return RowChoice(
        torch.empty(rows, dtype=torch.int64, device=device),
        torch.empty(rows, device=device),
        torch.empty(rows, dtype=torch.bool, device=device),
        torch.empty(rows, dtype=torch.int32, device=device),
    )
