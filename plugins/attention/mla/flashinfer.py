"""Latent attention by flashinfer, on Hopper: its paged MLA wrapper and its ragged prefill.

Drafted tokens must form a causal chain, because the kernel supports no other mask
(``BatchMLAPageAttentionHopper`` of 0.6.11 returns cudaErrorNotSupported for
``MaskMode::kCustom``). Trees are therefore not offered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from glowplug.core.errors import Refusal
from glowplug.core.facts.kv_layout import latent_entries
from glowplug.core.facts.mesh import axis_size, divides
from glowplug.core.plugin.byte_costs import DecodingRows
from glowplug.core.plugin.component import CheckContext, Component, Package
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import EVERY_MODE_GRAPH, AttentionOffers, Capture, Mode
from glowplug.plugins.attention.shared.absorbed import AbsorbedOptions
from glowplug.plugins.attention.shared.attention_tables import measured_time
from glowplug.plugins.attention.shared.hopper_libraries import (
    HOPPER,
    SIXTEEN_BITS,
    check_sizes_and_kv,
)
from glowplug.plugins.attention.shared.prefill_bytes import mla_bytes
from glowplug.plugins.attention.shared.table_bytes import shifted_bytes

TILE_QUERIES = 128  #: most queries (tokens x heads) of a row in one tile of the kernel
WORKSPACE_BYTES = 128 << 20  #: workspace for partial results, sized as flashinfer documents

_check_sizes = check_sizes_and_kv("flashinfer_mla")


class FlashInferMlaOptions(AbsorbedOptions):
    use: Literal["flashinfer_mla"] = "flashinfer_mla"


def check(context: CheckContext) -> Iterator[Refusal]:
    """Refuse unsupported sizes and dtypes, and heads that do not fill the causal kernel's tiles.

    NOTE: a tile must hold whole tokens, with all their heads. The causal kernel rounds down the
    number of tokens before a tile's end (``(packed_qo_start + cluster_tile_q) / num_heads``). It
    would therefore skip the newest keys of a token that continues in the next tile.
    """
    yield from _check_sizes(context)
    width = context.values.width
    mesh = context.values.mesh
    heads = context.facts.model.num_heads // axis_size("attn_tp", mesh) if divides(mesh) else 0
    if heads and width > 1 and width * heads > TILE_QUERIES and TILE_QUERIES % heads:
        yield Refusal(
            "flashinfer_mla",
            "attention.use",
            "flashinfer_mla computes several query tokens per row in tiles of "
            f"{TILE_QUERIES} queries, which is not a multiple of the {heads} heads of a rank",
            'attention.use = "auto", or speculative.use = "none"',
        )


def reserves(step: DecodingRows) -> int:
    """Return the bytes of FlashInfer's workspace and of the page tables that draft passes need.

    The backend's offers declare this function as ``AttentionOffers.reserves``. ``step``: the
    largest decode step.
    """
    return WORKSPACE_BYTES + shifted_bytes(step)


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
                measured=measured_time("flashinfer_mla"),
                kinds=frozenset({"mla"}),
                kv_entries=latent_entries,
                devices=frozenset({"cuda"}),
                compute=HOPPER,
                dtypes=SIXTEEN_BITS,
                kv_dtypes=SIXTEEN_BITS,
                first_key=True,
                modes={**EVERY_MODE_GRAPH, Mode.PREFILL: Capture.EAGER},
                work=mla_bytes,
                reserves=reserves,
            ),
            summary="latent attention by flashinfer, Hopper, for causal chains; compiles its "
            "kernels at first use",
        )
    ]
