"""Ranks on several hosts, started by hand on each of them or by ``torchrun``; they meet at one TCP
store.
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
    host_rank: int = Field(
        0, ge=0, description="which of the hosts this is; host 0 has the HTTP server"
    )
    address: str | None = Field(
        None, description="HOST:PORT of host 0, where the hosts meet; torchrun sets its own"
    )
    threads: int | None = Field(
        None, ge=1, description="torch threads in each rank; None: torch's own choice"
    )


def check_torchrun(context: CheckContext) -> Iterator[Refusal]:
    options: TorchrunOptions = context.options
    hosts: int = context.values["hosts"]
    if options.host_rank >= hosts:
        yield Refusal(
            "torchrun",
            "executor.host_rank",
            f"there is no host {options.host_rank} among {hosts}",
            f"executor.host_rank (--node-rank) from 0 to {hosts - 1}, or more executor.hosts (--nnodes)",
        )
    if options.address is not None and not _is_address(options.address):
        yield Refusal(
            "torchrun",
            "executor.address",
            f"{options.address!r} is not HOST:PORT",
            "the address of host 0 and a free port there, as in 10.0.0.1:29500",
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
            summary="a spawned process a rank on each of several hosts",
        )
    ]
