"""Page tables that kernels read in place of the batch's, over smaller pages: into how many parts a
page goes, and what the largest table takes. The byte budget and the backends' ``reserve`` ask here
alike. No torch."""

from __future__ import annotations

from glowplug.core.plugin.byte_costs import SHOWN, DecodingRows

#: keys of a tile of FlashAttention-3's kernel for latents, and its most queries of one key head
#: without TMA
TILE = 64
#: NOTE: pages that hold whole tiles of keys are copied by TMA, past a row's end: see
#: fa3_mla_runtime
SMALL_PAGE = 64


def mla_parts(page_size: int, queries: int) -> int:
    """Parts of a page that FlashAttention-3 reads for ``queries`` (tokens x heads) of a row over
    latents.
    """
    return 2 * page_size // TILE if page_size % TILE == 0 and queries > TILE else 1


def mha_parts(page_size: int) -> int:
    """The same of keys and values of heads."""
    return page_size // SMALL_PAGE if page_size > SMALL_PAGE and page_size % SMALL_PAGE == 0 else 1


def slots_bytes(step: DecodingRows) -> int:
    """A draft's pages of one token and its rows' lengths: see ``SlotBuffers.shifted``."""
    return step.rows * step.columns * step.page_size * SHOWN if step.drafts else 0


def fa3_mla_bytes(step: DecodingRows) -> int:
    return max(
        slots_bytes(step), _parts_bytes(step, mla_parts(step.page_size, step.width * step.heads))
    )


def fa3_mha_bytes(step: DecodingRows) -> int:
    return max(slots_bytes(step), hopper_mha_bytes(step))


def hopper_mha_bytes(step: DecodingRows) -> int:
    """Its drafts go by kernels that read the batch's own table."""
    return _parts_bytes(step, mha_parts(step.page_size))


def no_bytes(step: DecodingRows) -> int:
    """Every kernel reads the batch's own table."""
    return 0


def _parts_bytes(step: DecodingRows, parts: int) -> int:
    return step.rows * step.columns * parts * SHOWN if parts > 1 else 0
