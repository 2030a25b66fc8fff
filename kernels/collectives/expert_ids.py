"""Conversion of chosen experts to experts of one rank, with the count of each expert's tokens.

Where experts have copies, a table converts chosen experts to the copies that tokens use.
"""

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
    slots,
    ids_stride,
    padding_stride,
    tokens,
    counted_from,
    counted_to,
    first,
    held,
    WAYS: tl.constexpr,
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
    if slots is not None:
        way = tl.sum(tl.where(inside, chosen, 0), axis=1) & (WAYS - 1)
        slot = tl.load(slots + chosen * WAYS + way[:, None], mask=inside & (chosen >= 0), other=-1)
        chosen = slot.to(tl.int32)
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
    slots: tuple[Tensor, int] | None = None,
) -> Tensor:
    """Return each chosen expert's index among the experts of a rank; -1 for other experts.

    Args:
        ids: chosen experts, int [T, K]; -1 for none. Rows may be strided.
        first: number of the rank's first expert.
        held: number of the rank's experts, which are consecutive.
        padding: bool [T, 1], True for tokens that choose no expert; may be strided.
        counts: int64 [experts]; the experts that ``counted`` tokens choose are added.
        counted: tokens whose experts are counted; start and stop are given.
        slots: int64 [experts * ways, or more] and ways, a power of two: element ``e * ways + w`` is
            the slot of expert e for tokens whose ids have the sum w modulo ``ways``. Then
            ``first``, ``held``, ``counts`` and the result mean slots instead of experts.

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
            None if slots is None else slots[0],
            ids.stride(0) if ids.stride(1) == 1 else topk,
            0 if padding is None else padding.stride(0),
            tokens,
            counted.start,
            counted.stop,
            first,
            held,
            WAYS=1 if slots is None else slots[1],
            TOPK=topk,
            BLOCK=block,
            BLOCK_K=width,
            num_warps=4,
            **dependent_launch.options(),
        )
    return out
