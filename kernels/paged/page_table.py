"""What the decoding kernels over a paged cache share: masks, addresses, the softmax that goes on,
the number of splits.

A row's query tokens are its last ones; the keys of a row are divided among ``splits`` programs
(FlashDecoding, Dao 2023), fixed by what a captured graph fixes, while lengths are read on the
device.
"""

from __future__ import annotations

import triton
import triton.language as tl

TYPICAL_TILES = 32  #: of a row, for which the number of splits is chosen: 2048 keys
LOG2_E = 1.4426950408889634


@triton.jit
def visible(pos, begin, own, tree, first_key, end, TREE: tl.constexpr):
    """[M, N]: which keys at ``pos`` [N] the query tokens ``own`` [M] see; the row's own tokens
    begin at ``begin``.
    """
    if TREE:
        mine = (pos - begin)[None, :]
        seen = (mine < 0) | ((tree[:, None] >> tl.maximum(mine, 0).to(tl.int64)) & 1 != 0)
    else:
        seen = pos[None, :] <= begin + own[:, None]
    return seen & ((pos >= first_key) & (pos < end))[None, :]


@triton.jit
def entries(kv, table, n0, n, end, kv_stride: tl.constexpr, PAGE: tl.constexpr, STEP: tl.constexpr):
    """Pointers [N] to the cache entries of positions ``n0 + n`` of the row whose pages are at
    ``table``.

    ``n0`` is a multiple of STEP and ``n`` is below it. With an integer for ``kv``, offsets.
    """
    if PAGE % STEP == 0:
        slot = (tl.load(table + n0 // PAGE) * PAGE + n0 % PAGE).to(tl.int64)
        return kv + slot * kv_stride + n * kv_stride
    pos = n0 + n
    page = tl.load(table + pos // PAGE, mask=pos < end, other=0)
    # NOTE: multiplied before they are summed: of a page's first slot plus a place in the page,
    # Triton 3.6 takes the sum for a multiple of PAGE, and copies 16 bytes at a time of entries that
    # begin at multiples of fewer
    return kv + page.to(tl.int64) * (PAGE * kv_stride) + (pos % PAGE) * kv_stride


@triton.jit
def weights(scores, top, total):
    """Softmax goes on over one more tile: its weights, what is kept of the sums so far, and top and
    total after it.
    """
    higher = tl.maximum(top, tl.max(scores, axis=1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    fresh = tl.exp2(scores - base[:, None])
    kept = tl.exp2(top - base)[:, None]
    return fresh, kept, higher, total * kept + fresh


def best_splits(blocks: int, tiles: int, slots: int) -> int:
    """Into how many parts to cut the keys of each of ``blocks`` that cover ``tiles`` tiles at most.

    The least time for rows of 32 tiles, in units of a tile: rounds of ``slots`` programs at a time,
    where a program costs two and a half to begin, and a merge one more. Of equals the most, which
    longer rows want.
    """

    def cost(splits: int) -> float:
        return -(-blocks * splits // slots) * (-(-TYPICAL_TILES // splits) + 2.5) + (
            1 if splits > 1 else 0
        )

    return min(
        range(1, max(1, min(tiles, slots // min(blocks, slots) * 4, slots)) + 1),
        key=lambda splits: (cost(splits), -splits),
    )
