"""Latent attention by flashinfer, on Hopper: its paged MLA wrapper and its ragged prefill."""
from __future__ import annotations

from typing import Literal

from glowplug.core.component import Component, Package
from glowplug.core.hookspecs import hookimpl
from glowplug.core.offers import AttentionOffers, Capture, Mode
from glowplug.plugins.attention.absorbed import AbsorbedOptions
from glowplug.plugins.attention.library import HOPPER, SIXTEEN_BITS, check_kv_is_compute
from glowplug.plugins.attention.prefill_bytes import mla_bytes

#: it plans with lengths that the host knows, so nothing where they live on the device (drafts and their verification)
MODES = {Mode.PREFILL: Capture.EAGER, Mode.DECODE: Capture.GRAPH, Mode.IDLE: Capture.GRAPH, Mode.VERIFY: Capture.NO,
         Mode.DRAFT_DECODE: Capture.NO, Mode.DRAFT_EXTEND: Capture.NO}


class FlashInferMlaOptions(AbsorbedOptions):
    use: Literal["flashinfer_mla"] = "flashinfer_mla"


@hookimpl
def register_attention_backends() -> list[Component]:
    return [Component(
        name="flashinfer_mla", options=FlashInferMlaOptions, check=check_kv_is_compute("flashinfer_mla"),
        factory="glowplug.plugins.attention.flashinfer_mla_runtime:FlashInferMla",
        requires=(Package("flashinfer-python", ">=0.6.11"),),
        offers=AttentionOffers(kinds=frozenset({"mla"}), devices=frozenset({"cuda"}), compute=HOPPER,
                               dtypes=SIXTEEN_BITS, kv_dtypes=SIXTEEN_BITS, max_width=1, modes=MODES, work=mla_bytes),
        summary="latent attention by flashinfer, Hopper; without drafts; builds its kernels at first use")]
