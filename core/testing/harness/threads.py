"""Plugin of collectives among threads: ``collectives.use = "threads"``.

``glowplug.core.testing.harness.ranks`` uses it. Sums are taken in rank order, so that they are
deterministic and every rank gets the same bits. Imports no torch.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from glowplug.core.plugin.component import Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import CollectiveOffers
from glowplug.core.plugin.options import CollectivesOptions

COLLECTIVES = "threads"  #: the component's name


class ThreadOptions(CollectivesOptions):
    """Options of the collectives."""

    use: Literal["threads"] = "threads"
    timeout: float = Field(
        60.0, gt=0, description="seconds before a collective that does not finish ends the engine"
    )


@hookimpl
def register_collectives() -> list[Component]:
    """Return the component ``threads``."""
    return [
        Component(
            name=COLLECTIVES,
            options=ThreadOptions,
            factory="glowplug.core.testing.harness.threads_runtime:ThreadCollectives",
            offers=CollectiveOffers(devices=frozenset({"cpu"}), ranks=True),
            summary="ranks as threads of one process, for tests",
        )
    ]
