"""No quantization: weights in the compute dtype (float32, bfloat16, float16)."""

from __future__ import annotations

from typing import Literal

from glowplug.core.plugin.component import Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import QuantizationOffers
from glowplug.core.plugin.options import QuantizationOptions
from glowplug.plugins.quantization.shared.expert_bytes import dense_experts


class NoQuantizationOptions(QuantizationOptions):
    use: Literal["none"] = "none"


@hookimpl
def register_quantization_schemes() -> list[Component]:
    return [
        Component(
            name="none",
            options=NoQuantizationOptions,
            factory="glowplug.plugins.quantization.none_runtime:NoQuantization",
            offers=QuantizationOffers(
                reads=frozenset({"none"}),
                fused_shared=True,
                places_experts=True,
                experts_work=dense_experts,
            ),
            summary="weights in the compute dtype, unquantised",
        )
    ]
