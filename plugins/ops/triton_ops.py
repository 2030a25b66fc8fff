"""Small kernels in Triton, for CUDA devices."""

from __future__ import annotations

from typing import Literal

from glowplug.core.plugin.component import Component, Package
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import OpsOffers
from glowplug.core.plugin.options import OpsOptions
from glowplug.kernels.launch.cards import TRITON
from glowplug.plugins.ops.torch_ops import TABLE


class TritonOpsOptions(OpsOptions):
    use: Literal["triton"] = "triton"


@hookimpl
def register_ops() -> list[Component]:
    return [
        Component(
            name="triton",
            options=TritonOpsOptions,
            factory="glowplug.plugins.ops.triton_ops_runtime:TritonOps",
            offers=OpsOffers(
                devices=frozenset({"cuda"}),
                least_compute=TRITON,
                ops=TABLE | {"route", "route_and_set_ready"},
                adds_parts=True,
            ),
            requires=(Package("triton", ">=3.5"),),
            summary="fused normalisation, rotation, activation and gates in Triton",
        )
    ]
