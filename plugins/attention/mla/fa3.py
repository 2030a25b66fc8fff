"""Latent attention by FlashAttention-3 of sgl_kernel, on Hopper."""

from __future__ import annotations

from typing import Literal

from glowplug.core.facts.kv_layout import latent_entries
from glowplug.core.plugin.component import Component, Package
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import EVERY_MODE_GRAPH, AttentionOffers, Capture, Mode
from glowplug.plugins.attention.shared.absorbed import AbsorbedOptions
from glowplug.plugins.attention.shared.attention_tables import measured_time
from glowplug.plugins.attention.shared.hopper_libraries import (
    HOPPER,
    SGL_KERNEL,
    SIXTEEN_BITS,
    check_sizes_and_kv,
)
from glowplug.plugins.attention.shared.prefill_bytes import mla_bytes
from glowplug.plugins.attention.shared.table_bytes import fa3_mla_bytes


class Fa3MlaOptions(AbsorbedOptions):
    use: Literal["fa3_mla"] = "fa3_mla"


@hookimpl
def register_attention_backends() -> list[Component]:
    return [
        Component(
            name="fa3_mla",
            options=Fa3MlaOptions,
            check=check_sizes_and_kv("fa3_mla"),
            factory="glowplug.plugins.attention.mla.fa3_runtime:Fa3Mla",
            requires=(Package(SGL_KERNEL, ">=0.4.2"),),
            offers=AttentionOffers(
                measured=measured_time("fa3_mla"),
                kinds=frozenset({"mla"}),
                kv_entries=latent_entries,
                devices=frozenset({"cuda"}),
                compute=HOPPER,
                dtypes=SIXTEEN_BITS,
                kv_dtypes=SIXTEEN_BITS,
                first_key=True,
                modes={**EVERY_MODE_GRAPH, Mode.PREFILL: Capture.EAGER},
                work=mla_bytes,
                reserves=fa3_mla_bytes,
            ),
            summary="latent attention by FlashAttention-3 (sgl_kernel), Hopper",
        )
    ]
