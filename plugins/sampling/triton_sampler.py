"""The sampler "triton": the torch sampler with fused kernels on CUDA devices.

A step chooses its tokens in a few passes over the logits.
"""

from __future__ import annotations

from typing import Literal

from glowplug.core.plugin.component import Component, Package
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import SamplerOffers
from glowplug.core.plugin.options import SamplingOptions
from glowplug.kernels.launch.cards import TRITON
from glowplug.kernels.launch.chunks import LOGPROB_ROWS


class TritonSamplerOptions(SamplingOptions):
    use: Literal["triton"] = "triton"


def scratch_rows(rows: int) -> int:
    """Return the size of the scratch memory for sampling ``rows`` rows, in rows of logits.

    The scratch holds the unedited logits for log-probabilities, and the workspace of the sums of
    exponentials, which takes up to ``LOGPROB_ROWS`` rows at a time.
    """
    return rows + min(rows, LOGPROB_ROWS)


@hookimpl
def register_samplers() -> list[Component]:
    return [
        Component(
            name="triton",
            options=TritonSamplerOptions,
            factory="glowplug.plugins.sampling.triton_sampler_runtime:TritonSampler",
            offers=SamplerOffers(
                devices=frozenset({"cuda"}),
                least_compute=TRITON,
                state_bytes=4.0,
                scratch_rows=scratch_rows,
            ),
            requires=(Package("triton", ">=3.5"),),
            summary="every feature of the torch sampler without sorting or host synchronisation, "
            "so that CUDA graphs capture it",
        )
    ]
