"""Latent attention by flashinfer, on Hopper: its paged MLA wrapper and its ragged prefill.

Drafted tokens form a causal chain: the kernel knows no other mask (``BatchMLAPageAttentionHopper``
of 0.6.11 answers ``MaskMode::kCustom`` with cudaErrorNotSupported), so trees are not offered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from glowplug.core.errors import Refusal
from glowplug.core.facts.mesh import axis_size, divides
from glowplug.core.plugin.byte_costs import DecodingRows
from glowplug.core.plugin.component import CheckContext, Component, Package
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import EVERY_MODE_GRAPH, AttentionOffers, Capture, Mode
from glowplug.plugins.attention.shared.absorbed import AbsorbedOptions
from glowplug.plugins.attention.shared.hopper_libraries import (
    HOPPER,
    SIXTEEN_BITS,
    check_kv_is_compute,
)
from glowplug.plugins.attention.shared.prefill_bytes import mla_bytes
from glowplug.plugins.attention.shared.table_bytes import slots_bytes

TILE = 128  #: most queries (tokens x heads) of a row that go through the kernel at once
WORKSPACE = 128 << 20  #: bytes of partial results, as the library's documentation asks for

_check_sizes = check_kv_is_compute("flashinfer_mla")


class FlashInferMlaOptions(AbsorbedOptions):
    use: Literal["flashinfer_mla"] = "flashinfer_mla"


def check(context: CheckContext) -> Iterator[Refusal]:
    """Its sizes and dtypes, and heads of which whole ones fill a tile of its causal kernel.

    NOTE: that kernel counts the keys of a tile by the tokens that begin and end in it
    (``(packed_qo_start + cluster_tile_q) / num_heads`` rounds down), so that a token cut by the end
    of a tile would miss its newest keys.
    """
    yield from _check_sizes(context)
    width = context.values["width"]
    mesh = context.values["mesh"]
    heads = context.facts.model.num_heads // axis_size("attn_tp", mesh) if divides(mesh) else 0
    if heads and width > 1 and width * heads > TILE and TILE % heads:
        yield Refusal(
            "flashinfer_mla",
            "attention.use",
            f"flashinfer_mla takes several query tokens a row in tiles of "
            f"{TILE} heads, which {heads} a rank do not divide",
            'attention.use = "auto", or speculative.use = "none"',
        )


def reserves(step: DecodingRows) -> int:
    return WORKSPACE + slots_bytes(step)


@hookimpl
def register_attention_backends() -> list[Component]:
    return [
        Component(
            name="flashinfer_mla",
            options=FlashInferMlaOptions,
            check=check,
            factory="glowplug.plugins.attention.mla.flashinfer_runtime:FlashInferMla",
            requires=(Package("flashinfer-python", ">=0.6.11"),),
            offers=AttentionOffers(
                kinds=frozenset({"mla"}),
                devices=frozenset({"cuda"}),
                compute=HOPPER,
                dtypes=SIXTEEN_BITS,
                kv_dtypes=SIXTEEN_BITS,
                first_key=True,
                modes={**EVERY_MODE_GRAPH, Mode.PREFILL: Capture.EAGER},
                work=mla_bytes,
                reserves=reserves,
            ),
            summary="latent attention by flashinfer, Hopper, of causal chains; builds its kernels at first use",
        )
    ]
