"""Blocks of the vocabulary: the grid of a sampling pass, and what all passes share.

A pass divides each row of logits into blocks of the vocabulary, one program per block. The last
program of a row to finish combines the results of the blocks in order, so a result depends on its
row alone. There is no sort and no host synchronisation. Shapes: N rows, V vocabulary, B blocks per
row.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch.integers import cdiv, next_power_of_2

PROGRAM_TOKENS = (
    2048  #: tokens of the vocabulary per program; equal for every batch, since sums depend on it
)


class RowParameters(NamedTuple):
    """Sampling parameters of the R rows of the sequence table, one tensor [R] each.

    Each may be a strided column of a table. ``seed`` and ``top_k`` are int64, the others float32.
    """

    temperature: Tensor
    min_p: Tensor
    top_p: Tensor
    top_k: Tensor
    seed: Tensor


class RowChoice(NamedTuple):
    """Chosen tokens of N rows.

    Attributes:
        tokens: int64 [N]: the most likely token
        peaks: float32 [N]: its logit
        bad: bool [N]: that logit is not finite
        least: int32 [N]: bits of the cut-off, a float32; 0: none yet
    """

    tokens: Tensor
    peaks: Tensor
    bad: Tensor
    least: Tensor


@triton.jit
def finished(arrived, row, blocks):
    """Return whether this is the last program of ``row`` to finish.

    If it is, the stores of the row's other programs are visible to it, and the row's counter in
    ``arrived`` is reset to zero.
    """
    tl.debug_barrier()
    last = tl.atomic_add(arrived + row, 1, sem="acq_rel") == blocks - 1
    if last:
        tl.store(arrived + row, 0)
    return last


@triton.jit
def key_of(value, index):
    """Return an int64 key that orders by value, then by smaller index; NaN is largest."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # the sum makes -0 equal to 0
    ordered = tl.where(value != value, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))
    return (ordered.to(tl.int64) << 32) + (0x7FFFFFFF - index)


@triton.jit
def weights_of(source, index, vocab, peak, temperature, min_p, least):
    """Return the sampling weights of the tokens ``index``: exp((logit - peak) / temperature).

    Weights below ``min_p`` or ``least`` become 0, as do those beyond the vocabulary.
    """
    value = tl.load(source + index, mask=index < vocab, other=float("-inf"))
    weight = tl.exp((value - peak) / temperature)
    return tl.where((weight < min_p) | (weight < least) | (index >= vocab), 0.0, weight)


class Grid(NamedTuple):
    """Launch grid and sizes of a pass over ``logits`` [N, V]."""

    programs: tuple[int, int]  #: N, B
    sizes: tuple[int, int, int]  #: V, stride between rows, B
    blocks: int  #: B rounded up to a power of two
    block: int  #: tokens of the vocabulary per program

    @classmethod
    def over(cls, logits: Tensor) -> Grid:
        """Return the grid for ``logits``."""
        blocks = cdiv(logits.shape[1], PROGRAM_TOKENS)
        return cls(
            (logits.shape[0], blocks),
            (logits.shape[1], logits.stride(0), blocks),
            max(2, next_power_of_2(blocks)),
            PROGRAM_TOKENS,
        )


def columns_of(parameters: RowParameters, last: Tensor) -> tuple[Tensor | int, ...]:
    """Return the kernel arguments temperature, min-p and ``last``, each followed by its stride.

    Temperature and min-p are columns of ``parameters``.
    """
    each = (parameters.temperature, parameters.min_p, last)
    return tuple(value for column in each for value in (column, column.stride(0)))
