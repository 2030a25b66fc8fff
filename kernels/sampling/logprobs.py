"""Log-probabilities of drawn and most likely tokens, in one launch, without a sort or a copy.

As in every pass over ``vocabulary_blocks``, each block of a row finds its own result, and the last
program of the row to finish combines them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.integers import next_power_of_2
from glowplug.kernels.sampling.vocabulary_blocks import Grid, finished, key_of

NONE: tl.constexpr = tl.constexpr(-0x7FFFFFFFFFFFFFFF)  # less than ``key_of`` of any logit


@triton.jit
def _scores(
    logits,
    tokens,
    peaks,
    masses,
    found,
    token_scores,
    top_ids,
    top,
    arrived,
    vocab,
    stride,
    blocks,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PLACES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Find the K largest logits and the sum of exponentials of a block; combine them per row."""
    dependent_launch.begin(DEPENDENT)
    dependent_launch.wait(DEPENDENT)
    row, block = tl.program_id(0), tl.program_id(1)
    source = logits + row.to(tl.int64) * stride
    index = block * BLOCK + tl.arange(0, BLOCK)
    peak = tl.load(peaks + row)
    value = tl.load(source + index, mask=index < vocab, other=float("-inf"))
    tl.store(masses + row * blocks + block, tl.sum(tl.exp(value - peak)))
    key = tl.where(index < vocab, key_of(value, index), NONE)
    for j in range(K):
        best = tl.max(key)
        tl.store(found + (row * blocks + block) * K + j, best)
        key = tl.where(key == best, NONE, key)
    if finished(arrived, row, blocks):
        each = tl.arange(0, BLOCKS)
        mass = tl.load(
            masses + row * blocks + each, mask=each < blocks, other=0.0, cache_modifier=".cg"
        )
        norm = peak + tl.log(tl.sum(mass.to(tl.float64))).to(tl.float32)
        tl.store(token_scores + row, tl.load(source + tl.load(tokens + row)) - norm)
        place = tl.arange(0, PLACES)
        held = tl.load(
            found + row * blocks * K + place,
            mask=place < blocks * K,
            other=NONE,
            cache_modifier=".cg",
        )
        for j in range(K):
            best = tl.max(held)
            token = tl.minimum(0x7FFFFFFF - (best & 0xFFFFFFFF), vocab - 1)
            tl.store(top_ids + row * K + j, token)
            tl.store(top + row * K + j, tl.load(source + token) - norm)
            held = tl.where(held == best, NONE, held)


def token_logprobs(
    logits: Tensor, tokens: Tensor, peaks: Tensor, k: int, arrived: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities of ``tokens`` and of the k most likely tokens, best first.

    Of equal logits the lower id is first. The reference is
    ``kernels.sampling.reference.token_logprobs``.

    Args:
        logits: float32 [N, V]
        tokens: int64 [N]
        peaks: float32 [N]: the largest logit of each row
        k: number of most likely tokens
        arrived: int32 [N or more], counters of finished programs per row, zeros before and after

    Returns:
        token float32 [N], top_ids int64 [N, k] and top float32 [N, k]; k is at most V
    """
    grid = Grid.over(logits)
    rows = len(logits)
    device = logits.device
    k = min(k, logits.shape[1])
    most = max(1, k)
    scores = torch.empty(rows, device=device)
    top = torch.empty(rows, most, device=device)
    top_ids = torch.empty(rows, most, dtype=torch.int64, device=device)
    if rows:
        masses = torch.empty(grid.programs, device=device)
        found = torch.empty(*grid.programs, most, dtype=torch.int64, device=device)
        _scores[grid.programs](
            logits,
            tokens,
            peaks,
            masses,
            found,
            scores,
            top_ids,
            top,
            arrived,
            *grid.sizes,
            K=most,
            BLOCK=grid.block,
            BLOCKS=grid.blocks,
            PLACES=max(2, next_power_of_2(grid.sizes[2] * most)),
            **dependent_launch.options(),
        )
    return scores, top_ids[:, :k], top[:, :k]
