"""A plugin for comparing logits: tokens that are given instead of drawn, and plain torch instead of
our own kernels.

The sampler "teacher" returns the same tokens whatever the logits are, and keeps the logits. The
scheme "plain_torch" keeps dequantised weights and multiplies by torch on every device;
``activations = "dynamic"`` rounds them as FP8 GEMMs do. The attention backend "rounded_mla" rounds
cached values to another format. The sampler "keeper" is the device's own and keeps the logits of
every step, replayed or not, without the host's involvement.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field

from glowplug.core.facts.kv_layout import KVContext, KVEntry
from glowplug.core.plugin.component import Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import (
    EVERY_MODE_EAGER,
    AttentionOffers,
    QuantizationOffers,
    SamplerOffers,
)
from glowplug.plugins.attention.mla.torch import TorchMlaOptions
from glowplug.plugins.attention.shared.kv_layout import parted_latent_entries
from glowplug.plugins.quantization.block_fp8.plugin import BlockFp8Options
from glowplug.plugins.sampling.torch_sampler import TorchSamplerOptions


def rounded_entries(context: KVContext) -> tuple[KVEntry, ...]:
    """Return the entries of ``torch_mla``, which hold rounded numbers in float16."""
    return parted_latent_entries(replace(context, dtype="float16"))


class TeacherOptions(TorchSamplerOptions):
    use: Literal["teacher"] = "teacher"  # type: ignore[assignment]


class KeeperOptions(TorchSamplerOptions):
    use: Literal["keeper"] = "keeper"  # type: ignore[assignment]
    first: int = Field(0, description="position of the first token whose logits are kept")
    count: int = Field(
        64, description="positions kept of each row; those of others fall upon the last"
    )


class PlainTorchOptions(BlockFp8Options):
    use: Literal["plain_torch"] = "plain_torch"  # type: ignore[assignment]
    activations: Literal["auto", "dynamic", "none"] = "none"


class RoundedMlaOptions(TorchMlaOptions):
    use: Literal["rounded_mla"] = "rounded_mla"  # type: ignore[assignment]
    to: Literal["float8_e4m3fn", "float8_e5m2", "bfloat16"] = "float8_e4m3fn"


@hookimpl
def register_samplers() -> list[Component]:
    return [
        Component(
            "teacher",
            TeacherOptions,
            "tests.plugins.teacher_runtime:Teacher",
            offers=SamplerOffers(),
            summary="given tokens, kept logits",
        ),
        Component(
            "keeper",
            KeeperOptions,
            "tests.plugins.teacher_runtime:keeper",
            offers=SamplerOffers(state_bytes=4.0),
            summary="kept logits",
        ),
    ]


@hookimpl
def register_quantization_schemes() -> list[Component]:
    offers = QuantizationOffers(
        reads=frozenset({"none", "fp8"}),
        block_shape=(128, 128),
        dequantizes=frozenset({"cpu", "cuda"}),
    )
    return [
        Component(
            "plain_torch",
            PlainTorchOptions,
            "tests.plugins.teacher_runtime:plain_torch",
            offers=offers,
            summary="dequantised weights, products by torch",
        )
    ]


@hookimpl
def register_attention_backends() -> list[Component]:
    offers = AttentionOffers(
        kinds=frozenset({"mla"}),
        kv_entries=rounded_entries,
        modes=dict(EVERY_MODE_EAGER),
        first_key=True,
    )
    return [
        Component(
            "rounded_mla",
            RoundedMlaOptions,
            "tests.plugins.teacher_runtime:RoundedMla",
            offers=offers,
            summary="torch_mla whose cache holds rounded numbers",
        )
    ]
