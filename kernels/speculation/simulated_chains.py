"""Simulated acceptance of chains on a GPU, for benchmarks of engines with drafts.

One launch replaces about thirty small operations, which take 0.03 to 0.04 ms in a captured step.
``core.speculation.simulated`` defines the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch.integers import next_power_of_2
from glowplug.kernels.sampling.reference import GOLDEN, MIX_1, MIX_2

WEYL = tl.constexpr(GOLDEN)
FIRST = tl.constexpr(MIX_1)
SECOND = tl.constexpr(MIX_2)


@triton.jit
def _uniform(key, position):
    """Return float64 in [0, 1): ``core.speculation.simulated.uniform``."""
    state = key + position * WEYL
    state = (state ^ (state >> 30)) * FIRST
    state = (state ^ (state >> 27)) * SECOND
    return (state >> 32).to(tl.float64) * 2.3283064365386963e-10 + 0.5


@triton.jit
def _simulate(
    drawn,
    fed,
    shares,
    keys,
    positions,
    found,
    position_stride,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Replace the tokens drawn after one row's tokens; DEPTH is below WIDTH."""
    row = tl.program_id(0)
    first = row * WIDTH
    number = tl.arange(0, SIZE)
    share = tl.load(shares + number, mask=number < DEPTH, other=-1.0)
    position = tl.load(positions + row * position_stride)
    accepted = tl.sum((_uniform(tl.load(keys + row), position) < share).to(tl.int32), 0)
    token = tl.load(drawn + first + number, mask=number < WIDTH, other=0)
    drafts = number < WIDTH - 1
    draft = tl.load(fed + first + number + 1, mask=drafts, other=-1)
    unlike = tl.where(token == draft, tl.abs(token - 1), token)
    token = tl.where(drafts, tl.where(number < accepted, draft, unlike), token)
    tl.store(found + first + number, token, mask=number < WIDTH)


def simulated_chains(
    drawn: Tensor, fed: Tensor, shares: Tensor, keys: Tensor, positions: Tensor
) -> Tensor:
    """Return ``drawn`` with the tokens replaced by which a simulated number of drafts is accepted.

    Arguments and result as in ``core.speculation.simulated.chain_draws``; ``drawn`` and ``fed`` are
    contiguous.
    """
    rows, width = fed.shape
    found = torch.empty_like(drawn)
    assert drawn.is_contiguous() and fed.is_contiguous() and shares.is_contiguous()
    assert len(shares) < width
    if rows:
        _simulate[(rows,)](
            drawn,
            fed,
            shares,
            keys,
            positions,
            found,
            positions.stride(0),
            WIDTH=width,
            DEPTH=len(shares),
            SIZE=next_power_of_2(width),
        )
    return found
