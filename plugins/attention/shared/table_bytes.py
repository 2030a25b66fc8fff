"""Sizes of page tables over smaller pages, which some kernels read instead of the batch's table.

Both the byte budget and the backends' ``reserve`` use these functions. This module imports no
torch.
"""

from __future__ import annotations

from glowplug.core.plugin.byte_costs import NUMBER_BYTES, DecodingRows

#: keys in a tile of FlashAttention-3's latent kernel, which is also the largest number of queries
#: of one key head that it handles without TMA
FA3_TILE_KEYS = 64
#: tokens in a small page of keys and values. NOTE: pages that hold whole tiles of keys are copied
#: by TMA, which also reads beyond the end of a row: see ``mla/fa3_runtime.py``
SMALL_PAGE = 64


def mla_small_pages(page_size: int, queries: int) -> int:
    """Return the number of smaller pages that replace a page for FlashAttention-3 over latents.

    Args:
        page_size: Tokens of a page.
        queries: Queries of a row (tokens times heads).
    """
    return (
        2 * page_size // FA3_TILE_KEYS
        if page_size % FA3_TILE_KEYS == 0 and queries > FA3_TILE_KEYS
        else 1
    )


def mha_small_pages(page_size: int) -> int:
    """Return the number of smaller pages that replace each page for multi-head FlashAttention-3.

    ``page_size``: tokens of a page.
    """
    return page_size // SMALL_PAGE if page_size > SMALL_PAGE and page_size % SMALL_PAGE == 0 else 1


def shifted_bytes(step: DecodingRows) -> int:
    """Return the bytes of a draft's one-token pages and row lengths (``GraphBuffers.shifted``)."""
    return step.rows * step.columns * step.page_size * NUMBER_BYTES if step.drafts else 0


def fa3_mla_bytes(step: DecodingRows) -> int:
    """Return the bytes of the largest page table of ``fa3_mla``."""
    return max(
        shifted_bytes(step),
        _small_pages_bytes(step, mla_small_pages(step.page_size, step.width * step.heads)),
    )


def fa3_mha_bytes(step: DecodingRows) -> int:
    """Return the bytes of the largest page table of ``fa3_mha``."""
    return max(shifted_bytes(step), hopper_mha_bytes(step))


def hopper_mha_bytes(step: DecodingRows) -> int:
    """Return the bytes of the largest page table of ``hopper_mha``.

    Draft rows need no table of their own: their kernels read the batch's table.
    """
    return _small_pages_bytes(step, mha_small_pages(step.page_size))


def no_bytes(step: DecodingRows) -> int:
    """Return 0, for backends whose decode kernels read the batch's own page table."""
    return 0


def _small_pages_bytes(step: DecodingRows, split: int) -> int:
    return step.rows * step.columns * split * NUMBER_BYTES if split > 1 else 0
