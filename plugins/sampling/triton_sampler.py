"""The sampler "triton": the torch sampler, choosing tokens in a few passes over the logits on CUDA devices."""
from __future__ import annotations

from typing import Literal

from glowplug.core.component import Component, Package
from glowplug.core.hookspecs import hookimpl
from glowplug.core.offers import SamplerOffers
from glowplug.core.options import SamplingOptions
from glowplug.plugins.sampling.torch_sampler import FEATURES


class TritonSamplerOptions(SamplingOptions):
    use: Literal["triton"] = "triton"


@hookimpl
def register_samplers() -> list[Component]:
    return [Component(
        name="triton", options=TritonSamplerOptions,
        factory="glowplug.plugins.sampling.triton_sampler_runtime:TritonSampler",
        offers=SamplerOffers(devices=frozenset({"cuda"}), features=FEATURES, state_bytes=4.0, copies=1.0),
        requires=(Package("triton", ">=3.5"),),
        summary="every feature of the torch sampler without a sort or a word from the host, so that graphs hold it")]
