"""Latent attention by FlashMLA of sgl_kernel, on Hopper; prefill and drafts by its FlashAttention-3."""
from __future__ import annotations

from typing import Literal

from glowplug.core.component import Component, Package
from glowplug.core.hookspecs import hookimpl
from glowplug.core.offers import EVERY_MODE_GRAPH, AttentionOffers, Capture, Mode
from glowplug.plugins.attention.absorbed import AbsorbedOptions
from glowplug.plugins.attention.library import HOPPER, SGL_KERNEL, SIXTEEN_BITS, check_kv_is_compute
from glowplug.plugins.attention.prefill_bytes import mla_bytes

PAGE = 64  #: the only page size its kernels read


class FlashMlaOptions(AbsorbedOptions):
    use: Literal["flashmla"] = "flashmla"


@hookimpl
def register_attention_backends() -> list[Component]:
    return [Component(
        name="flashmla", options=FlashMlaOptions, check=check_kv_is_compute("flashmla"),
        factory="glowplug.plugins.attention.flashmla_runtime:FlashMla",
        requires=(Package(SGL_KERNEL, ">=0.4.2"),),
        offers=AttentionOffers(
            kinds=frozenset({"mla"}), devices=frozenset({"cuda"}), compute=HOPPER, dtypes=SIXTEEN_BITS,
            kv_dtypes=SIXTEEN_BITS, page_sizes=frozenset({PAGE}), first_key=True,
            modes={**EVERY_MODE_GRAPH, Mode.PREFILL: Capture.EAGER}, work=mla_bytes),
        summary="latent attention by FlashMLA (sgl_kernel), Hopper, pages of 64")]
