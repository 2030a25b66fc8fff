"""Executor with one Ray actor per rank, on this host or on the hosts of a Ray cluster.

Messages are bytes, as with the other executors.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from glowplug.core.plugin.component import Component, Package
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import ExecutorOffers
from glowplug.core.plugin.options import ExecutorOptions


class RayOptions(ExecutorOptions):
    use: Literal["ray"] = "ray"
    address: str | None = Field(
        None, description='a running Ray: "auto" or HOST:PORT; None: start Ray on this host'
    )
    threads: int | None = Field(
        None, ge=1, description="torch threads of each rank; None: torch's default"
    )


@hookimpl
def register_executors() -> list[Component]:
    return [
        Component(
            name="ray",
            options=RayOptions,
            factory="glowplug.plugins.executors.ray_runtime:RayExecutor",
            offers=ExecutorOffers(ranks=True, hosts=True),
            requires=(Package("ray", ">=2.40"),),
            summary="one Ray actor per rank, on one host or several",
        )
    ]
