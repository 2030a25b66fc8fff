"""Latent attention on Hopper by the kernel measured fastest for each step: FlashMLA or this project's own."""
from __future__ import annotations

from typing import Literal

from glowplug.core.component import Component, Package
from glowplug.core.hookspecs import hookimpl
from glowplug.core.offers import EVERY_MODE_GRAPH, AttentionOffers, Capture, Mode
from glowplug.plugins.attention.absorbed import AbsorbedOptions
from glowplug.plugins.attention.flashmla import PAGE
from glowplug.plugins.attention.library import HOPPER, SGL_KERNEL, SIXTEEN_BITS, check_kv_is_compute
from glowplug.plugins.attention.prefill_bytes import mla_bytes


class HopperMlaOptions(AbsorbedOptions):
    use: Literal["hopper_mla"] = "hopper_mla"


@hookimpl
def register_attention_backends() -> list[Component]:
    return [Component(
        name="hopper_mla", options=HopperMlaOptions, check=check_kv_is_compute("hopper_mla"),
        factory="glowplug.plugins.attention.hopper_mla_runtime:HopperMla",
        requires=(Package(SGL_KERNEL, ">=0.4.2"), Package("triton", ">=3.5")),
        offers=AttentionOffers(
            kinds=frozenset({"mla"}), devices=frozenset({"cuda"}), compute=HOPPER, dtypes=SIXTEEN_BITS,
            kv_dtypes=SIXTEEN_BITS | {"fp8_e4m3"}, page_sizes=frozenset({PAGE}), tree=True, first_key=True,
            modes={**EVERY_MODE_GRAPH, Mode.PREFILL: Capture.EAGER}, work=mla_bytes),
        summary="latent attention on Hopper, each step's decoding rows by what was measured fastest for their number, "
                "heads and the longest that can come (FlashMLA or Triton; table in attention/measured.py), prefill by "
                "FlashAttention-3")]
