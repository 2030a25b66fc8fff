"""Shared code of the decoding kernels over a paged cache.

It contains the masks, the addresses, the running softmax and the number of splits. The query tokens
of a row are its last tokens. The keys of a row are divided among ``splits`` programs
(FlashDecoding, Dao 2023). The number of splits depends only on values that a captured graph fixes;
lengths are read on the device.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TYPICAL_TILES = 32  #: tiles of the row length for which the number of splits is chosen: 2048 keys
LOG2_E = 1.4426950408889634


@triton.jit
def visible(pos, begin, own, tree, first_key, end, TREE: tl.constexpr):
    """Return the mask [M, N] of keys at ``pos`` [N] that the query tokens ``own`` [M] see.

    The row's own tokens begin at ``begin``. With TREE bit j of ``tree`` int64 [M] names the key at
    ``begin + j``, and all keys before ``begin`` are seen.
    """
    if TREE:
        mine = (pos - begin)[None, :]
        bit = tl.minimum(tl.maximum(mine, 0), 63).to(tl.int64)
        seen = (mine < 0) | ((tree[:, None] >> bit) & 1 != 0)
    else:
        seen = pos[None, :] <= begin + own[:, None]
    return seen & ((pos >= first_key) & (pos < end))[None, :]


@triton.jit
def entries(kv, table, n0, n, end, kv_stride: tl.constexpr, PAGE: tl.constexpr, STEP: tl.constexpr):
    """Return pointers [N] to the cache entries at positions ``n0 + n`` of a row.

    ``table`` points at the pages of the row. ``n0`` is a multiple of STEP and ``n`` is below STEP.
    If ``kv`` is an integer, offsets are returned.
    """
    if PAGE % STEP == 0:
        slot = (tl.load(table + n0 // PAGE) * PAGE + n0 % PAGE).to(tl.int64)
        return kv + slot * kv_stride + n * kv_stride
    pos = n0 + n
    page = tl.load(table + pos // PAGE, mask=pos < end, other=0)
    # NOTE: the terms are multiplied before the sum: Triton 3.6 takes the sum of a page's first slot
    # and an offset in the page for a multiple of PAGE, and then copies 16 bytes at a time from
    # entries that are not aligned to 16 bytes
    return kv + page.to(tl.int64) * (PAGE * kv_stride) + (pos % PAGE) * kv_stride


@triton.jit
def weights(scores, top, total):
    """Continue the softmax over one more tile of keys.

    Returns:
        The weights of the tile's keys, the factor on the sums so far, the new maximum and total.
    """
    higher = tl.maximum(top, tl.max(scores, axis=1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    fresh = tl.exp2(scores - base[:, None])
    kept = tl.exp2(top - base)[:, None]
    return fresh, kept, higher, total * kept + fresh


def tree_arguments(
    tree: Tensor | None, tree_span: int, unread: Tensor, width: int
) -> tuple[Tensor, int]:
    """Return a kernel's arguments ``tree_mask`` and ``span`` for rows of ``width`` tokens.

    Args:
        tree: masks, int64 [B, W]; None for chains
        tree_span: keys that a mask names; 0: ``width``
        unread: tensor in place of the masks of chains
        width: W
    """
    if tree is None:
        return unread, width
    assert tree.is_contiguous()
    return tree, tree_span or width


def best_splits(blocks: int, tiles: int, programs: int) -> int:
    """Return the number of KV splits of a kernel that has ``blocks`` programs without splits.

    A row has at most ``tiles`` tiles of keys. The number minimises the estimated time
    for rows of TYPICAL_TILES tiles, where ``programs`` programs run at a time. In units of the time
    for one tile, the start of a program costs 2.5 and a merge of splits 1. Of equal costs the
    largest number is taken, which suits longer rows.
    """

    def cost(splits: int) -> float:
        """Return the estimated time with ``splits`` splits, in units of the time for one tile."""
        return -(-blocks * splits // programs) * (-(-TYPICAL_TILES // splits) + 2.5) + (
            1 if splits > 1 else 0
        )

    return min(
        range(1, max(1, min(tiles, programs // min(blocks, programs) * 4, programs)) + 1),
        key=lambda splits: (cost(splits), -splits),
    )
