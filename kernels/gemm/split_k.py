"""Split-K GEMMs: the number of splits, and the sum of the splits."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.integers import cdiv

SUM_BLOCK = 512  #: results per program of ``sum_splits``
STEP_COLUMNS = 128  #: columns of one step of the loop over the depth
SPLIT_STEPS_MIN = 4  #: fewest such steps of a split


def splits_for(tiles: int, depth: int, programs: int) -> int:
    """Return the number of depth splits of a GEMM, a power of two.

    It is the smallest that gives at least ``programs`` programs for ``tiles`` tiles of the output,
    unless splits would become too short.
    """
    split = 1
    steps = depth // STEP_COLUMNS
    while tiles * split < programs and steps // (2 * split) >= SPLIT_STEPS_MIN:
        split *= 2
    return split


@triton.jit(do_not_specialize=["count"])
def _sum_parts(splits, out, size, count, BLOCK_SIZE: tl.constexpr, DEPENDENT: tl.constexpr):
    """Sum ``BLOCK_SIZE`` results over ``count`` splits."""
    dependent_launch.begin(DEPENDENT)
    dependent_launch.wait(DEPENDENT)
    at = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    total = tl.zeros((BLOCK_SIZE,), tl.float32)
    for split in range(count):
        total += tl.load(splits + split * size + at, mask=at < size, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < size)


def sum_splits(splits: Tensor, out: Tensor) -> None:
    """Sum the splits, float32 [S, M, N], in order into ``out`` [M, N]."""
    size = out.numel()
    _sum_parts[(cdiv(size, SUM_BLOCK),)](
        splits, out, size, len(splits), BLOCK_SIZE=SUM_BLOCK, **dependent_launch.options()
    )
