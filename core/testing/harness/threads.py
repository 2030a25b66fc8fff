"""The plugin of collectives among threads: ``collectives.use = "threads"`` in
``glowplug.core.testing.harness.ranks``.

Exact and deterministic: sums are taken in rank order, so every rank gets the same bits. No torch
here.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from glowplug.core.plugin.component import Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import CollectiveOffers
from glowplug.core.plugin.options import CollectivesOptions


class ThreadOptions(CollectivesOptions):
    use: Literal["threads"] = "threads"
    timeout: float = Field(
        60.0, gt=0, description="seconds before a collective that does not finish ends the engine"
    )


@hookimpl
def register_collectives() -> list[Component]:
    return [
        Component(
            name="threads",
            options=ThreadOptions,
            factory="glowplug.core.testing.harness.threads_runtime:ThreadCollectives",
            offers=CollectiveOffers(devices=frozenset({"cpu"}), ranks=True),
            summary="ranks as threads of one process, for tests",
        )
    ]
