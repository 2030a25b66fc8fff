"""Executor with one spawned process per rank on this host, the server's default.

Messages are bytes on pipes.
"""

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
        None, ge=1, description="torch threads of each rank; None: torch's default"
    )


@hookimpl
def register_executors() -> list[Component]:
    return [
        Component(
            name="multiprocess",
            options=MultiprocessOptions,
            factory="glowplug.plugins.executors.multiprocess_runtime:MultiprocessExecutor",
            offers=ExecutorOffers(ranks=True, hosts=False),
            summary="one spawned process per rank on this host",
        )
    ]
