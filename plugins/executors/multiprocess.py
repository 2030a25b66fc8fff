"""One process a rank, spawned on this host, talking bytes over pipes: the server's default."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from glowplug.core.plugin.component import Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import ExecutorOffers
from glowplug.core.plugin.options import ExecutorOptions


class MultiprocessOptions(ExecutorOptions):
    use: Literal["multiprocess"] = "multiprocess"
    threads: int | None = Field(
        None, ge=1, description="torch threads in each rank; None: torch's own choice"
    )


@hookimpl
def register_executors() -> list[Component]:
    return [
        Component(
            name="multiprocess",
            options=MultiprocessOptions,
            factory="glowplug.plugins.executors.multiprocess_runtime:MultiprocessExecutor",
            offers=ExecutorOffers(ranks=True, hosts=False),
            summary="one spawned process a rank on this host",
        )
    ]
