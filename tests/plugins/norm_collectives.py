"""Collectives on the CPU whose sums are left to norms, as those over peers' memory are."""

from __future__ import annotations

from typing import Literal

from glowplug.core.plugin.component import Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import CollectiveOffers
from glowplug.plugins.collectives.torch_distributed import TorchDistributedOptions


class NormCollectivesOptions(TorchDistributedOptions):
    use: Literal["norm_collectives"] = "norm_collectives"


@hookimpl
def register_collectives() -> list[Component]:
    return [
        Component(
            name="norm_collectives",
            options=NormCollectivesOptions,
            factory="tests.plugins.norm_collectives_runtime:NormCollectives",
            offers=CollectiveOffers(devices=frozenset({"cpu"}), ranks=True),
            summary="gloo whose sums are left to norms",
        )
    ]
