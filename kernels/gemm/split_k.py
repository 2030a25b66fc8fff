"""Products whose depth is split among programs: into how many parts, and the sum of the parts."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch import dependent_launch as dependent
from glowplug.kernels.launch.integers import cdiv

BLOCK_SIZE = 512  #: numbers a program adds up
STEP = 128  #: columns of a step along the depth
FEWEST = 4  #: steps of a part


def splits_for(tiles: int, depth: int, programs: int) -> int:
    """A power of two of parts, so that ``tiles`` of the output come to ``programs``, or parts
    become too short.
    """
    split = 1
    while tiles * split < programs and depth // STEP // (2 * split) >= FEWEST:
        split *= 2
    return split


@triton.jit(do_not_specialize=["count"])
def _sum_parts(parts, out, size, count, BLOCK_SIZE: tl.constexpr, DEPENDENT: tl.constexpr):
    dependent.begin(DEPENDENT)
    dependent.wait(DEPENDENT)
    at = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    total = tl.zeros((BLOCK_SIZE,), tl.float32)
    for part in range(count):
        total += tl.load(parts + part * size + at, mask=at < size, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < size)


def sum_parts(parts: Tensor, out: Tensor) -> None:
    """parts float32 [S, M, N], added up in order into out [M, N]."""
    size = out.numel()
    _sum_parts[(cdiv(size, BLOCK_SIZE),)](
        parts, out, size, len(parts), BLOCK_SIZE=BLOCK_SIZE, **dependent.options()
    )
