"""Sizes of page tables for smaller pages, which some kernels read instead of the batch's table.

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
    """Return the number of parts into which FlashAttention-3 over latents divides each page.

    The parts serve as smaller pages. The result is 1 if pages are not divided.

    Args:
        page_size: Number of tokens of a page.
        queries: Number of queries of a row (tokens times heads).
    """
    return (
        2 * page_size // FA3_TILE_KEYS
        if page_size % FA3_TILE_KEYS == 0 and queries > FA3_TILE_KEYS
        else 1
    )


def mha_small_pages(page_size: int) -> int:
    """Return the number of parts into which multi-head FlashAttention-3 divides each page.

    The parts serve as smaller pages. The result is 1 if pages are not divided. ``page_size``:
    number of tokens of a page.
    """
    return page_size // SMALL_PAGE if page_size > SMALL_PAGE and page_size % SMALL_PAGE == 0 else 1


def shifted_bytes(step: DecodingRows) -> int:
    """Return the bytes of the page table and row lengths of draft passes; 0 without drafts.

    The table has one-token pages (``GraphBuffers.shifted``).
    """
    return step.rows * step.columns * step.page_size * NUMBER_BYTES if step.drafts else 0


def fa3_mla_bytes(step: DecodingRows) -> int:
    """Return the bytes of the largest page table that the backend ``fa3_mla`` makes."""
    return max(
        shifted_bytes(step),
        _small_pages_bytes(step, mla_small_pages(step.page_size, step.width * step.heads)),
    )


def fa3_mha_bytes(step: DecodingRows) -> int:
    """Return the bytes of the largest page table that the backend ``fa3_mha`` makes."""
    return max(shifted_bytes(step), hopper_mha_bytes(step))


def hopper_mha_bytes(step: DecodingRows) -> int:
    """Return the bytes of the largest page table that the backend ``hopper_mha`` makes.

    Draft rows need no table of their own: their kernels read the batch's table.
    """
    return _small_pages_bytes(step, mha_small_pages(step.page_size))


def no_bytes(step: DecodingRows) -> int:
    """Return 0, for backends whose decode kernels read the batch's own page table."""
    return 0


def _small_pages_bytes(step: DecodingRows, split: int) -> int:
    return step.rows * step.columns * split * NUMBER_BYTES if split > 1 else 0
