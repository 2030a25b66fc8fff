"""Collectives by torch.distributed's process groups: gloo for CPUs, NCCL for CUDA devices."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Literal

from pydantic import Field

from glowplug.core.facts.mesh import AXES, axis_size, group
from glowplug.core.plugin.component import OPERATIONAL, Component, Package
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import CollectiveOffers
from glowplug.core.plugin.options import CollectivesOptions

#: bytes that NCCL allocates for a group of ranks: measured once, for two H200
NCCL_GROUP_BYTES = 870_000_000
RUNTIME = "glowplug.plugins.collectives.torch_distributed_runtime"


class TorchDistributedOptions(CollectivesOptions):
    interface: str | None = Field(
        None,
        description="network interface over which gloo and NCCL reach other hosts; None: the "
        "interface on the route to rank 0's address, or loopback on a single host",
        json_schema_extra=OPERATIONAL,
    )


class GlooOptions(TorchDistributedOptions):
    use: Literal["gloo"] = "gloo"


class NcclOptions(TorchDistributedOptions):
    use: Literal["nccl"] = "nccl"


def nccl_bytes(groups: Collection[tuple[int, ...]]) -> int:
    """Return an estimate of the bytes of NCCL's buffers on a rank in these groups of ranks.

    NOTE: groups of any size count as much as two ranks, the only number that was measured.
    """
    return NCCL_GROUP_BYTES * len(groups)


def groups(mesh: Mapping[str, int]) -> frozenset[tuple[int, ...]]:
    """Return the groups of rank 0 on all axes of the mesh that have several ranks."""
    return _groups(tuple(mesh.items()))


@cache
def _groups(sizes: tuple[tuple[str, int], ...]) -> frozenset[tuple[int, ...]]:
    """Return ``groups`` of the mesh with these axes and sizes.

    NOTE: they are needed several times in each attempt of a plan, and are 2% of its time.
    """
    mesh = dict(sizes)
    return frozenset(group(axis, 0, mesh) for axis in AXES if axis_size(axis, mesh) > 1)


@hookimpl
def register_collectives() -> list[Component]:
    return [
        Component(
            name="gloo",
            options=GlooOptions,
            factory=f"{RUNTIME}:Gloo",
            offers=CollectiveOffers(devices=frozenset({"cpu"}), ranks=True),
            requires=(Package("torch"),),
            summary="ranks on CPUs of one or several hosts",
        ),
        Component(
            name="nccl",
            options=NcclOptions,
            factory=f"{RUNTIME}:Nccl",
            offers=CollectiveOffers(
                devices=frozenset({"cuda"}),
                ranks=True,
                expandable_segments=True,
                library_bytes=lambda sizes: nccl_bytes(groups(sizes.mesh)),
            ),
            requires=(Package("torch"),),
            summary="ranks on CUDA devices; host data is exchanged by gloo",
        ),
    ]
