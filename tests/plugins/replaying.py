"""A plugin for tests: the graph runner "replaying", which is "cuda_graph" over functions instead of
CUDA's graphs, so that padding, graphs and filling are tested on a CPU."""

from __future__ import annotations

from typing import Literal

from glowplug.core.plugin.component import Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import GraphOffers
from glowplug.plugins.graphs.cuda_graph import CudaGraphOptions


class ReplayingOptions(CudaGraphOptions):
    use: Literal["replaying"] = "replaying"  # type: ignore[assignment]
    prefill: bool | None = False  #: only where a test requests it
    #: "mode rows piece", "pass tokens" or "extend tokens" whose capture fails
    breaks: str | None = None
    #: attention plans on the device, so that the passes of a draft are one piece
    one_piece: bool = True
    breaks_rank: int = 0  #: rank on which it fails


@hookimpl
def register_graph_runners() -> list[Component]:
    return [
        Component(
            name="replaying",
            options=ReplayingOptions,
            factory="tests.plugins.replaying_runtime:Replaying",
            offers=GraphOffers(),
            summary="graphs of functions",
        )
    ]
