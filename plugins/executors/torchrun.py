"""Executor of ranks on several hosts, started on each host by hand or by ``torchrun``.

The hosts meet at one TCP store.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from glowplug.core.errors import Refusal
from glowplug.core.plugin.component import CheckContext, Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import ExecutorOffers
from glowplug.core.plugin.options import ExecutorOptions


class TorchrunOptions(ExecutorOptions):
    use: Literal["torchrun"] = "torchrun"
    host_rank: int = Field(0, ge=0, description="number of this host; host 0 has the HTTP server")
    address: str | None = Field(
        None,
        description="HOST:PORT of host 0, where the hosts meet; not used under torchrun, which "
        "sets an address of its own",
    )
    threads: int | None = Field(
        None, ge=1, description="torch threads of each rank; None: torch's default"
    )


def check_torchrun(context: CheckContext) -> Iterator[Refusal]:
    """Refuse a host number that the plan does not have, and an address that is not HOST:PORT."""
    options: TorchrunOptions = context.options
    hosts: int = context.values.hosts
    if options.host_rank >= hosts:
        yield Refusal(
            "torchrun",
            "executor.host_rank",
            f"there is no host {options.host_rank}: the plan has {hosts}",
            f"executor.host_rank (--node-rank) from 0 to {hosts - 1}, or more hosts in "
            "executor.hosts (--nnodes)",
        )
    if options.address is not None and not _is_address(options.address):
        yield Refusal(
            "torchrun",
            "executor.address",
            f"{options.address!r} is not HOST:PORT",
            "the address of host 0 and a free port there, for example 10.0.0.1:29500",
        )


def _is_address(text: str) -> bool:
    host, colon, port = text.rpartition(":")
    return bool(host and colon) and port.isdigit() and 0 < int(port) < 65536


@hookimpl
def register_executors() -> list[Component]:
    return [
        Component(
            name="torchrun",
            options=TorchrunOptions,
            factory="glowplug.plugins.executors.torchrun_runtime:TorchrunExecutor",
            offers=ExecutorOffers(ranks=True, hosts=True),
            check=check_torchrun,
            summary="one spawned process per rank, on several hosts",
        )
    ]
