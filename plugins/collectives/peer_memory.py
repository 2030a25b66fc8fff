"""Collectives of the GPUs of one host by stores into each other's memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from glowplug.core.errors import Refusal
from glowplug.core.plan.plan import Decision
from glowplug.core.plugin.component import CheckContext, Component, Package
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import CollectiveOffers
from glowplug.plugins.collectives.peer_sizes import (
    KIB,
    SumLimits,
    buffer_bytes,
    library_bytes,
    sum_limits,
)
from glowplug.plugins.collectives.torch_distributed import TorchDistributedOptions, groups

NAME = "peer_memory"
RANKS_MAX = 8  #: GPUs that NVLink connects within a host


class PeerMemoryOptions(TorchDistributedOptions):
    use: Literal["peer_memory"] = "peer_memory"
    all_reduce: Literal["auto", "one_shot", "two_shot"] = Field(
        "auto",
        description="how tensors of up to 16 MiB are summed. one_shot: every rank sends its whole "
        "tensor to the others. two_shot: each rank sums a part and sends the sum. auto: one shot "
        "for small tensors, two for larger ones, then NCCL, by the measured times of this card and "
        "number of ranks; two ranks always use one shot",
        json_schema_extra={"provider": True},
    )

    def without_effect(self, context: CheckContext) -> dict[str, str]:
        found = super().without_effect(context)
        if context.values.ranks == 1:
            found["all_reduce"] = "one rank has nothing to sum"
        return found


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
def plan_remarks(context: CheckContext) -> list[Decision]:
    """Return notes on the sizes up to which sums use one shot and two, for each size of a group.

    Two ranks have no such sizes.
    """
    (chosen,) = context.of(CollectiveOffers) or (None,)
    devices = context.facts.hardware.devices
    if (
        chosen is None
        or not isinstance(chosen.options, PeerMemoryOptions)
        or chosen.options.all_reduce != "auto"
        or not devices
    ):
        return []
    sizes = sorted({len(members) for members in groups(context.values.mesh)} - {2})
    limits = [sum_limits(n, "auto", devices[0].name, context.values.dtype) for n in sizes]
    return (
        [
            Decision(
                "collectives.all_reduce",
                "; ".join(_described(ranks, one) for ranks, one in zip(sizes, limits, strict=True)),
                "facts",
                "; ".join(dict.fromkeys(one.why for one in limits)),
            )
        ]
        if sizes
        else []
    )


def _described(ranks: int, limits: SumLimits) -> str:
    """Return the limits of a group of ``ranks`` ranks as text."""
    steps = [f"one-shot to {limits.one_shot / KIB:g} KiB"] if limits.one_shot else []
    if limits.two_shot > limits.one_shot:
        steps.append(f"two-shot to {limits.two_shot / KIB:g} KiB")
    return f"{ranks} ranks: {', '.join([*steps, 'then NCCL'])}"


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
                table_writer="glowplug.plugins.collectives.saved_table:save_table",
            ),
            requires=(Package("torch"), Package("triton")),
            summary="GPUs of one host, by stores into peers' memory; NCCL for large tensors",
        )
    ]
