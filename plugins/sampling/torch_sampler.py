"""The sampler "torch": every sampling feature in plain tensor operations, on CPU and CUDA."""

from __future__ import annotations

from typing import Literal

from glowplug.core.plugin.component import Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import SamplerOffers
from glowplug.core.plugin.options import SamplingOptions


class TorchSamplerOptions(SamplingOptions):
    use: Literal["torch"] = "torch"


@hookimpl
def register_samplers() -> list[Component]:
    return [
        Component(
            name="torch",
            options=TorchSamplerOptions,
            factory="glowplug.plugins.sampling.torch_sampler_runtime:TorchSampler",
            # counts and a mask, whose memory grows by doubling; a step with every feature was
            # measured to use 10.75 times the memory of its logits
            offers=SamplerOffers(state_bytes=5 * 1.25, scratch_rows=lambda rows: 39 * rows // 4),
            summary="greedy, temperature, top-k, top-p, min-p, penalties, bias, seeds and "
            "log-probabilities in torch",
        )
    ]
