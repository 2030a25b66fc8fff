"""Collectives of the GPUs of one host by stores into each other's memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from glowplug.core.errors import Refusal
from glowplug.core.plugin.component import CheckContext, Component, Package
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import CollectiveOffers
from glowplug.plugins.collectives.peer_sizes import buffer_bytes, library_bytes
from glowplug.plugins.collectives.torch_distributed import TorchDistributedOptions

NAME = "peer_memory"
RANKS_MAX = 8  #: GPUs that NVLink connects within a host


class PeerMemoryOptions(TorchDistributedOptions):
    use: Literal["peer_memory"] = "peer_memory"


def check_peer_memory(context: CheckContext) -> Iterator[Refusal]:
    """Refuse plans with ranks on several hosts, or with more ranks than the host has GPUs."""
    if context.values.hosts > 1:
        yield Refusal(
            NAME,
            "collectives.use",
            f"{NAME} connects the GPUs of one host, and the plan has {context.values.hosts} hosts",
            'collectives.use = "nccl"',
        )
    elif context.values.ranks > RANKS_MAX:
        yield Refusal(
            NAME,
            "collectives.use",
            f"{NAME} connects up to {RANKS_MAX} GPUs, the plan has {context.values.ranks} ranks",
            'collectives.use = "nccl"',
        )


@hookimpl
def register_collectives() -> list[Component]:
    return [
        Component(
            name=NAME,
            options=PeerMemoryOptions,
            check=check_peer_memory,
            factory="glowplug.plugins.collectives.peer_memory_runtime:PeerMemory",
            offers=CollectiveOffers(
                devices=frozenset({"cuda"}),
                least_compute=70,
                ranks=True,
                expandable_segments=True,
                sums_in_norm=True,
                buffer_bytes=buffer_bytes,
                library_bytes=library_bytes,
                expert_rows=True,
            ),
            requires=(Package("torch"), Package("triton")),
            summary="GPUs of one host, by stores into peers' memory; NCCL for large tensors",
        )
    ]
