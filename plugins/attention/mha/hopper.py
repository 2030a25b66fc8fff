"""Multi-head attention on Hopper by the kernels measured fastest, Triton or FlashAttention-3."""

from __future__ import annotations

from typing import Literal

from glowplug.core.facts.kv_layout import head_entries
from glowplug.core.plugin.component import Component, Package
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import EVERY_MODE_GRAPH, AttentionOffers, Capture, Mode
from glowplug.core.plugin.options import AttentionOptions
from glowplug.plugins.attention.mha.fa3 import check_heads
from glowplug.plugins.attention.shared.attention_tables import measured_time
from glowplug.plugins.attention.shared.hopper_libraries import HOPPER, SGL_KERNEL
from glowplug.plugins.attention.shared.prefill_bytes import mha_bytes
from glowplug.plugins.attention.shared.table_bytes import hopper_mha_bytes

#: head sizes and dtypes at which the kernels' times were compared
MEASURED_HEADS = frozenset({128})
MEASURED_DTYPES = frozenset({"bfloat16"})
#: backends whose kernels decode rows; the first is this project's own
DECODES_WITH = ("triton_mha", "fa3_mha")


class HopperMhaOptions(AttentionOptions):
    use: Literal["hopper_mha"] = "hopper_mha"


@hookimpl
def register_attention_backends() -> list[Component]:
    return [
        Component(
            name="hopper_mha",
            options=HopperMhaOptions,
            check=check_heads("hopper_mha", MEASURED_HEADS),
            factory="glowplug.plugins.attention.mha.hopper_runtime:HopperMha",
            requires=(Package(SGL_KERNEL, ">=0.4.2"), Package("triton", ">=3.5")),
            offers=AttentionOffers(
                measured=measured_time(*DECODES_WITH),
                kinds=frozenset({"mha"}),
                kv_entries=head_entries,
                devices=frozenset({"cuda"}),
                compute=HOPPER,
                dtypes=MEASURED_DTYPES,
                kv_dtypes=MEASURED_DTYPES | {"fp8_e4m3", "fp8_e5m2"},
                tree=True,
                first_key=True,
                modes={**EVERY_MODE_GRAPH, Mode.PREFILL: Capture.EAGER},
                work=mha_bytes,
                reserves=hopper_mha_bytes,
            ),
            summary="multi-head and grouped-query attention on Hopper: decode rows by the kernel "
            "measured fastest for their number and heads (Triton or FlashAttention-3; table in "
            "plugins/attention/shared/decode_choice.py), prefill by FlashAttention-3",
        )
    ]
