"""Draws of tokens, by the rules of ``kernels.sampling.reference``.

Each program sums the weights of one block of the vocabulary; the last program of a row chooses a
block, then a token in it, by the row's uniform number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.sampling.vocabulary_blocks import (
    Grid,
    RowChoice,
    RowParameters,
    columns_of,
    finished,
    weights_of,
)

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)
BELOW_ONE = tl.constexpr(1.0 - 2.0**-53)


@triton.jit
def _mix(x):
    """Apply the finaliser of SplitMix64, as ``kernels.sampling.reference.mix64`` does."""
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, position):
    """Return float64 in [0, 1): ``kernels.sampling.reference.uniform`` of stream 0."""
    state = _mix(seed.to(tl.uint64) + GOLDEN)
    state = _mix(state + position.to(tl.uint64) * GOLDEN)
    return (state >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _first_above(weight, cumulative, target, SIZE: tl.constexpr):
    """Return the first position with a positive weight and a cumulative sum above ``target``.

    The position is at most SIZE - 1.
    """
    at = tl.arange(0, SIZE)
    return tl.minimum(tl.min(tl.where((cumulative > target) & (weight > 0), at, SIZE)), SIZE - 1)


@triton.jit
def _draw(
    logits,
    rows,
    positions,
    tokens,
    peaks,
    least,
    masses,
    arrived,
    temperatures,
    temperature_stride,
    min_ps,
    min_p_stride,
    seeds,
    seed_stride,
    vocab,
    stride,
    blocks,
    coldest,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Sum the weights of a block; the last program of the row draws a token."""
    dependent_launch.begin(DEPENDENT)
    dependent_launch.wait(DEPENDENT)
    row, block = tl.program_id(0), tl.program_id(1)
    state = tl.load(rows + row)
    temperature = tl.load(temperatures + state * temperature_stride)
    if temperature >= coldest:
        source = logits + row.to(tl.int64) * stride
        peak, min_p = tl.load(peaks + row), tl.load(min_ps + state * min_p_stride)
        cut = tl.load(least + row).to(tl.float32, bitcast=True)
        weight = weights_of(
            source, block * BLOCK + tl.arange(0, BLOCK), vocab, peak, temperature, min_p, cut
        )
        tl.store(masses + row * blocks + block, tl.sum(weight.to(tl.float64)))
        if finished(arrived, row, blocks):
            each = tl.arange(0, BLOCKS)
            mass = tl.load(
                masses + row * blocks + each, mask=each < blocks, other=0.0, cache_modifier=".cg"
            )
            cumulative = tl.cumsum(mass, 0)
            total = tl.max(cumulative)
            uniform = _uniform(tl.load(seeds + state * seed_stride), tl.load(positions + row))
            target = tl.minimum(uniform * total, total * BELOW_ONE)
            chosen = _first_above(mass, cumulative, target, BLOCKS)
            before = tl.max(tl.where(each < chosen, cumulative, 0.0))
            weight = weights_of(
                source, chosen * BLOCK + tl.arange(0, BLOCK), vocab, peak, temperature, min_p, cut
            )
            inside = tl.cumsum(weight.to(tl.float64), 0)
            target = tl.minimum(target - before, tl.max(inside) * BELOW_ONE)
            token = chosen * BLOCK + _first_above(weight, inside, target, BLOCK)
            tl.store(tokens + row, tl.minimum(token, vocab - 1).to(tl.int64))


def draw(
    logits: Tensor,
    choice: RowChoice,
    rows: Tensor,
    positions: Tensor,
    parameters: RowParameters,
    coldest: float,
    arrived: Tensor,
) -> None:
    """Draw tokens for the rows that are not greedy, and store them in ``choice.tokens``.

    A draw uses the uniform number of (seed, position).

    Args:
        logits: float32 [N, V]; rows may be strided
        choice: result of ``greedy.best``, with the cut-offs of ``cut_off``; ``tokens`` is
            overwritten
        rows: int64 [N], rows of the sequence table
        positions: int64 [N]
        parameters: sampling parameters of the sequence table
        coldest: temperature below which a row is greedy
        arrived: int32 [N or more], counters of finished programs per row, zeros before and after
    """
    grid = Grid.over(logits)
    if len(rows):
        masses = torch.empty(grid.programs, dtype=torch.float64, device=logits.device)
        _draw[grid.programs](
            logits,
            rows,
            positions,
            choice.tokens,
            choice.peaks,
            choice.least,
            masses,
            arrived,
            *columns_of(parameters, parameters.seed),
            *grid.sizes,
            coldest,
            BLOCK=grid.block,
            BLOCKS=grid.blocks,
            **dependent_launch.options(),
        )
