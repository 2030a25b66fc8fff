"""Conversion of chosen experts to experts of one rank, with the count of each expert's tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch import dependent_launch
from glowplug.kernels.launch.integers import cdiv, next_power_of_2

CHOICES = 1024  #: chosen experts per program


@triton.jit(do_not_specialize=["tokens", "counted_from", "counted_to"])
def _rank_ids(
    ids,
    padding,
    counts,
    out,
    ids_stride,
    padding_stride,
    tokens,
    counted_from,
    counted_to,
    first,
    held,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Convert the ids of BLOCK tokens."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    choice = tl.arange(0, BLOCK_K)
    dependent_launch.begin(DEPENDENT)
    dependent_launch.wait(DEPENDENT)
    inside = (token < tokens)[:, None] & (choice < TOPK)[None, :]
    at = token[:, None] * ids_stride + choice[None, :]
    chosen = tl.load(ids + at, mask=inside, other=-1).to(tl.int32)
    if padding is not None:
        padded = tl.load(padding + token * padding_stride, mask=token < tokens, other=1)
        chosen = tl.where((padded != 0)[:, None], -1, chosen)
    if counts is not None:
        own = (token >= counted_from) & (token < counted_to)
        ones = tl.full((BLOCK, BLOCK_K), 1, tl.int64)
        tl.atomic_add(counts + chosen, ones, mask=own[:, None] & (chosen >= 0), sem="relaxed")
    local = chosen - first
    local = tl.where((chosen >= 0) & (local >= 0) & (local < held), local, -1)
    tl.store(out + token[:, None] * TOPK + choice[None, :], local, mask=inside)


def rank_ids(
    ids: Tensor,
    first: int,
    held: int,
    padding: Tensor | None = None,
    counts: Tensor | None = None,
    counted: slice = slice(0, 0),
) -> Tensor:
    """Return each chosen expert's index among the experts of a rank; -1 for other experts.

    Args:
        ids: chosen experts, int [T, K]; -1 for none. Rows may be strided.
        first: number of the rank's first expert.
        held: number of the rank's experts, which are consecutive.
        padding: bool [T, 1], True for tokens that choose no expert; may be strided.
        counts: int64 [experts]; the experts that ``counted`` tokens choose are added.
        counted: tokens whose experts are counted; start and stop are given.

    Returns:
        int32 [T, K].
    """
    tokens, topk = ids.shape
    out = torch.empty(tokens, topk, dtype=torch.int32, device=ids.device)
    if tokens:
        width = next_power_of_2(topk)
        block = max(1, CHOICES // width)
        _rank_ids[(cdiv(tokens, block),)](
            ids if ids.stride(1) == 1 else ids.contiguous(),
            padding,
            counts,
            out,
            ids.stride(0) if ids.stride(1) == 1 else topk,
            0 if padding is None else padding.stride(0),
            tokens,
            counted.start,
            counted.stop,
            first,
            held,
            TOPK=topk,
            BLOCK=block,
            BLOCK_K=width,
            num_warps=4,
            **dependent_launch.options(),
        )
    return out
