"""Runtime of the parallelism strategy "ep_moe": placement of experts and exchange of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from glowplug.core.facts.mesh import axis_size, coordinates, deal
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.byte_costs import ExchangeSizes
from glowplug.core.protocols import Collectives, ExpertExchange, ExpertRows, Shard, Worker
from glowplug.plugins.parallel.ep_moe import PUSH, chosen_exchange, tokens_stay
from glowplug.plugins.parallel.expert_exchange import (
    AllGatherExchange,
    AllToAllExchange,
    Layout,
    StaticAllToAllExchange,
)
from glowplug.plugins.parallel.expert_placement import Placement
from glowplug.plugins.parallel.placed_exchange import PlacedExchange
from glowplug.plugins.parallel.push_exchange import PushExchange
from glowplug.plugins.parallel.unsplit import Unsplit

if TYPE_CHECKING:
    from glowplug.plugins.parallel.ep_moe import EpMoeOptions

EXCHANGES: Mapping[str, Callable[[Layout, Collectives, str, bool], ExpertExchange]] = {
    "all_gather": AllGatherExchange,
    "all_to_all": AllToAllExchange,
    "all_to_all_static": StaticAllToAllExchange,
}


class EpMoe(Unsplit):
    """The ``ParallelStrategy`` of expert parallelism.

    Routed experts are divided over the axis "ep", and the intermediate size of each over "moe_tp".
    The shared expert's intermediate size is split over "attn_tp".
    """

    def __init__(self, options: EpMoeOptions, plan: EnginePlan, worker: Worker) -> None:
        at = coordinates(worker.rank, plan.mesh)
        self._at = {
            axis: (at.get(axis, 0), axis_size(axis, plan.mesh))
            for axis in ("tp", "ep", "moe_tp", "attn_tp")
        }
        self._stays = tokens_stay(options, plan.mesh)
        self._options = options
        self._plan = plan
        self._placement = Placement(options.placement, options.redundant_experts, self._at["ep"][1])
        self._counts = options.count_load
        self._collectives = worker.collectives
        self._device = worker.device

    def shard(self, role: str, name: str, full: int, block: int = 1) -> Shard | None:
        if role == "experts":
            return self._cut("ep", full, 1, reduce=True)
        if role == "expert_width":
            return self._cut("moe_tp", full, block, reduce=True)
        if role in ("shared_column", "shared_row"):
            return self._cut("attn_tp", full, block, reduce=role == "shared_row")
        return None

    def _cut(self, axis: str, full: int, block: int, reduce: bool) -> Shard:
        """Return this rank's part of a dimension that is divided over ``axis``.

        If tokens stay, all partial results of a layer are summed over "tp" at once.
        """
        index, parts = self._at[axis]
        if parts == 1:
            return Shard(0, full, full)
        start, size = deal(full, parts, index, block)
        summed = "tp" if self._stays else axis
        return Shard(start, size, full, reduce=reduce, axis=summed, parts=parts)

    def expert_exchange(self, name: str, experts: int) -> ExpertExchange | None:
        assert self._collectives is not None, "expert parallelism needs the ranks' collectives"
        slots = self._placement.slots(name, experts)
        layout = Layout(
            tp=self._at["tp"][1],
            ep=self._at["ep"],
            group=self._at["attn_tp"],
            experts=experts if slots is None else len(slots),
        )
        exchange = self._moved(layout, self._collectives)
        if slots is None:
            return exchange
        return PlacedExchange(slots, experts, self._device, exchange)

    def _moved(self, layout: Layout, collectives: Collectives) -> ExpertExchange:
        """Return the exchange that the options or the measured times name."""
        plan = self._plan
        tokens = plan.sizes.max_step_tokens
        sizes = ExchangeSizes.of(plan.facts, self._options, plan.mesh, tokens, plan.dtype)
        chosen = chosen_exchange(sizes, hasattr(collectives, "expert_rows"))
        common = layout, collectives, self._device, self._counts
        if chosen.name == PUSH:
            return PushExchange(*common, self._expert_rows(collectives, chosen.rows))
        return EXCHANGES[chosen.name](*common)

    def _expert_rows(self, collectives: Collectives, rows: int) -> ExpertRows | None:
        """Return the exchange of the collectives that all MoE layers share.

        ``rows``: most tokens of a rank in a step that are pushed.
        """
        plan = self._plan
        if not rows:
            return None
        models = [found for found in (plan.facts.model, plan.facts.draft) if found is not None]
        return collectives.expert_rows(  # type: ignore[attr-defined,no-any-return]
            "tp",
            plan.facts.model.hidden_size,
            max(model.sizes.experts_per_token for model in models),
            rows,
            plan.dtype,
        )

    def held_experts(self, name: str, experts: int) -> Sequence[int] | None:
        """Return the numbers of this rank's experts; None if they are those of ``shard``.

        Args:
            name: module path of the MoE layer.
            experts: number of its experts.
        """
        slots = self._placement.slots(name, experts)
        if slots is None:
            return None
        index, ranks = self._at["ep"]
        each = len(slots) // ranks
        return slots[index * each : (index + 1) * each]
