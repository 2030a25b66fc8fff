"""One rank of a layout without the others, to measure and tune its kernels on a single device.

The plan is that of all ranks, made for as many devices of this machine's kind as the layout needs.
The rank's layers have the shapes that they have in the whole layout. Its collectives return what
they would return if every rank had sent this rank's data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from glowplug.core.facts.machine import this_machine
from glowplug.core.facts.mesh import axis_size, coordinates
from glowplug.core.facts.model_facts import HardwareFacts
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.offers import CollectiveOffers, ParallelOffers
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.protocols import Collectives, Parts

if TYPE_CHECKING:
    from torch import Tensor

    from glowplug.core.protocols.build_context import BuildContext

#: bytes of memory of a machine on which no weight is stored
UNLIMITED = 1 << 50


def plan_of_ranks(
    config: Mapping[str, Any], plugins: PluginSet, source: str, *, stores_weights: bool = True
) -> EnginePlan:
    """Return the plan of ``config`` for enough devices of this machine's kind for all its ranks.

    Args:
        config: the configuration; its executor is not used.
        plugins: the loaded plugins.
        source: name of the configuration for messages.
        stores_weights: False: the memory of the machine is not a limit, because no weight is
            stored.

    Raises:
        ConfigError, PlanRefused: see ``core.plan.resolve.plan``.
    """
    ranks = number_of_ranks(config, plugins)
    executor = {"use": "multiprocess" if ranks > 1 else "inline"}
    return make_plan(
        {**config, "executor": executor},
        plugins=plugins,
        source=source,
        hardware=machine_for(ranks, stores_weights),
    )


def number_of_ranks(config: Mapping[str, Any], plugins: PluginSet) -> int:
    """Return the number of ranks of ``config``; malformed strategies count as one rank."""
    sizes = []
    listed = config.get("parallel")
    for section in listed if isinstance(listed, list) else []:
        use, size = (section.get(key, 1) for key in ("use", "size"))
        offers = plugins.offers("parallel", str(use))
        adds = isinstance(offers, ParallelOffers) and not offers.axes.isdisjoint({"tp", "pp"})
        sizes.append(size if adds and isinstance(size, int) else 1)
    return max(1, prod(sizes))


def machine_for(ranks: int, stores_weights: bool = True) -> HardwareFacts:
    """Return the facts of a machine with this machine's first device, cores and memory per rank."""
    here = this_machine() if stores_weights else without_memory_limit(this_machine())
    return replace(
        here,
        devices=here.devices[:1] * ranks,
        cpu_cores=here.cpu_cores * ranks,
        cpu_memory=here.cpu_memory * ranks,
    )


def without_memory_limit(machine: HardwareFacts) -> HardwareFacts:
    """Return the facts of ``machine`` with more memory than any model needs."""
    devices = tuple(replace(device, memory=UNLIMITED) for device in machine.devices)
    return replace(machine, devices=devices, cpu_memory=UNLIMITED)


def lone_context(plan: EnginePlan, plugins: PluginSet, rank: int = 0) -> BuildContext:
    """Return the context of one rank of ``plan``, on the first device, without other ranks."""
    from glowplug.core.startup.components import build_context, make_worker

    worker = replace(make_worker(plan, rank), device=make_worker(plan, 0).device)
    if plan.ranks == 1:
        return build_context(plan, plugins, worker)
    return build_context(plan, plugins, worker, collectives=_collectives(plan, plugins, rank))


def _collectives(plan: EnginePlan, plugins: PluginSet, rank: int) -> Collectives:
    """Return the stand-in for the plan's collectives, with sums in norms if the plan has them."""
    offers = plugins.offers("collectives", plan.choice("collectives").name)
    in_norm = isinstance(offers, CollectiveOffers) and offers.sums_in_norm
    return (LoneRankSumsInNorm if in_norm else LoneRank)(plan.mesh, rank)


class LoneRank:
    """``Collectives`` of a single rank of a mesh: every other rank seems to send the same data.

    Results have the shapes and dtypes that they have among all ranks. Sums are this rank's terms.

    Args:
        mesh: mesh axis -> size.
        rank: number of the rank.
    """

    def __init__(self, mesh: Mapping[str, int], rank: int) -> None:
        self._mesh = mesh
        self._at = coordinates(rank, mesh)

    def _size(self, axis: str) -> int:
        return axis_size(axis, self._mesh)

    def all_reduce(self, x: Tensor, axis: str) -> Tensor:
        return x

    def all_gather(self, x: Tensor, axis: str, dim: int = 0) -> Tensor:
        copies = [1] * x.dim()
        copies[dim] = self._size(axis)
        return x.repeat(copies)

    def reduce_scatter(self, x: Tensor, axis: str) -> Tensor:
        own: Tensor = x.chunk(self._size(axis))[self._at[axis]]
        return own.clone()

    def all_to_all(self, x: Tensor, axis: str) -> Tensor:
        return x[self._at[axis]].expand_as(x).contiguous()

    def all_to_all_rows(
        self, x: Tensor, counts: Sequence[int], received: Sequence[int], axis: str
    ) -> Tensor:
        own: Tensor = x.split(list(counts))[self._at[axis]]
        return own.repeat(len(received), *[1] * (x.dim() - 1))

    def expert_rows(self, *given: object) -> None:
        """Return None: there is no peer whose memory could be accessed."""

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        return data or b""

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data] * self._size("tp")

    def all_gather_numbers(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.tile(values, (self._size("tp"), 1))

    def close(self) -> None:
        return None


class LoneRankSumsInNorm(LoneRank):
    """The stand-in for collectives whose sums over the ranks are computed by the next norm."""

    def reduced_norm(self, input_format: str, add_norm: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that adds a residual to this rank's terms and norms the sum."""

        def reduce(
            terms: Parts | Tensor,
            axis: str,
            residual: Tensor,
            weight: Tensor,
            eps: float,
        ) -> tuple[Any, Tensor]:
            return add_norm(terms, residual, weight, eps)  # type: ignore[no-any-return]

        return reduce
