"""MLA attention by this project's own Triton kernels, on CUDA devices, without other libraries."""

from __future__ import annotations

from typing import Literal

from glowplug.core.facts.kv_layout import latent_entries
from glowplug.core.plugin.component import Component, Package
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import (
    EVERY_MODE_GRAPH,
    FLOAT_DTYPES,
    AttentionOffers,
    Capture,
    Mode,
)
from glowplug.kernels.launch.cards import TILES
from glowplug.plugins.attention.shared.absorbed import AbsorbedOptions, check_absorbed
from glowplug.plugins.attention.shared.attention_tables import measured_time
from glowplug.plugins.attention.shared.prefill_bytes import mla_bytes


class TritonMlaOptions(AbsorbedOptions):
    use: Literal["triton_mla"] = "triton_mla"


@hookimpl
def register_attention_backends() -> list[Component]:
    return [
        Component(
            name="triton_mla",
            options=TritonMlaOptions,
            check=check_absorbed,
            factory="glowplug.plugins.attention.mla.triton_runtime:TritonMla",
            requires=(Package("triton", ">=3.5"),),
            offers=AttentionOffers(
                measured=measured_time("triton_mla"),
                devices=frozenset({"cuda"}),
                kinds=frozenset({"mla"}),
                kv_entries=latent_entries,
                kv_dtypes=FLOAT_DTYPES | {"fp8_e4m3"},
                modes={**EVERY_MODE_GRAPH, Mode.PREFILL: Capture.EAGER},
                tree=True,
                first_key=True,
                work=mla_bytes,
                compute=TILES,
            ),
            summary="latent attention in Triton, for causal chains and trees, with a 16-bit or FP8 "
            "cache",
        )
    ]
