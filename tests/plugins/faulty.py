"""A plugin with faults in one layer: a scheme that damages a weight after it is loaded, and an
attention backend that is wrong in decode steps only.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from glowplug.core.plugin.component import Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import EVERY_MODE_EAGER, AttentionOffers, QuantizationOffers
from glowplug.plugins.attention.mla.torch import TorchMlaOptions
from glowplug.plugins.attention.shared.kv_layout import parted_latent_entries
from glowplug.plugins.quantization.block_fp8.plugin import BlockFp8Options


class FaultyWeightOptions(BlockFp8Options):
    use: Literal["faulty_weight"] = "faulty_weight"  # type: ignore[assignment]
    activations: Literal["auto", "dynamic", "none"] = "none"
    module: str = Field("", description="path of the damaged linear layer; empty: none")
    fault: Literal["scale", "transpose"] = "scale"


class FaultyDecodeOptions(TorchMlaOptions):
    use: Literal["faulty_decode"] = "faulty_decode"  # type: ignore[assignment]
    layer: int = 0


@hookimpl
def register_quantization_schemes() -> list[Component]:
    return [
        Component(
            "faulty_weight",
            FaultyWeightOptions,
            "tests.plugins.faulty_runtime:faulty_weight",
            offers=QuantizationOffers(
                reads=frozenset({"none", "fp8"}),
                block_shape=(128, 128),
                dequantizes=frozenset({"cpu"}),
            ),
            summary="dense weights, one of them damaged",
        )
    ]


@hookimpl
def register_attention_backends() -> list[Component]:
    return [
        Component(
            "faulty_decode",
            FaultyDecodeOptions,
            "tests.plugins.faulty_runtime:FaultyDecode",
            offers=AttentionOffers(
                kinds=frozenset({"mla"}),
                modes=dict(EVERY_MODE_EAGER),
                first_key=True,
                kv_entries=parted_latent_entries,
            ),
            summary="torch_mla with a wrong scale in one layer's decode steps",
        )
    ]
