"""Parallel strategies of a rank that runs alone: its requests, and the experts of other groups.

The rank's group runs every request. Other groups with work seem to have the tokens of this one. If
they chose this one's experts too, a rank would read too few different experts; so each group's
choice is moved on by an equal share of the experts. With uniform routing, an expert of this rank
then has as many tokens as if every group ran tokens of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from glowplug.core.facts.mesh import axis_size, coordinates
from glowplug.core.protocols import ExpertExchange, RequestRouter
from glowplug.core.protocols.parallel_stack import ParallelStack
from glowplug.core.step.batch import Batch
from glowplug.core.step.request import Sequence
from glowplug.entrypoints.bench.alone.copies import ExchangeLog
from glowplug.entrypoints.bench.ranks.exchange_times import EXCHANGE

if TYPE_CHECKING:
    from torch import Tensor

    from glowplug.core.plan.plan import EnginePlan

Sent = tuple[Any, "Tensor", "Tensor"]
SPREAD = "other groups choose the experts of this group's tokens, moved on by equal shares"
MIRRORED = "other groups choose the experts of this group's tokens"
OWN = "every rank has all tokens"


class LoneRouter:
    """The ``RequestRouter`` of a rank alone, whose group runs every request.

    Args:
        router: the strategies' router.
    """

    leads = True

    def __init__(self, router: RequestRouter) -> None:
        self._router = router
        self.group = router.group
        self.shares = router.shares

    def owns(self, sequence: Sequence) -> bool:
        return True

    def forget_prefixes(self) -> None:
        self._router.forget_prefixes()


class SpreadChoices:
    """The experts on this rank that the tokens of all groups choose.

    Args:
        groups: (this rank's group, number of groups).
        experts: number of experts of the layer.
        first: first expert on this rank.
        held: number of experts on this rank.
        device: torch device.
    """

    def __init__(
        self, groups: tuple[int, int], experts: int, first: int, held: int, device: str
    ) -> None:
        self._own, self._groups = groups
        chosen = torch.arange(experts)
        rows = []
        for group in range(self._groups):
            moved = (chosen + (group - self._own) * experts // self._groups) % experts - first
            local = torch.where((moved >= 0) & (moved < held), moved, -1)
            rows.append(torch.cat([local, local.new_tensor([-1])]))  # index -1: no expert
        self._all = torch.stack(rows).to(device)
        self._table = self._all.clone()

    def set_busy(self, groups: int) -> None:
        """Let this rank's group and those after it have tokens, ``groups`` in all."""
        after = [(group - self._own) % self._groups for group in range(self._groups)]
        idle = torch.tensor(after, device=self._all.device)[:, None] >= groups
        self._table.copy_(self._all.masked_fill(idle, -1))  # captured steps read this memory

    def of(self, ids: Tensor, rows: int) -> Tensor:
        """Return the local ids of all groups' tokens; -1 for experts of other ranks.

        Args:
            ids: experts that this group's tokens choose, int [T, K]; -1 for none.
            rows: tokens of a group with padding, at least T.

        Returns:
            int64 [groups * rows, K].
        """
        padded = F.pad(ids, (0, 0, 0, rows - len(ids)), value=-1) if rows > len(ids) else ids
        return self._table[:, padded.long()].flatten(0, 1)


class LoneExchange:
    """The ``ExpertExchange`` of a layer on a rank alone.

    Args:
        exchange: the strategies' exchange, over copies.
        choices: the experts that all groups choose; None: those that the exchange returns.
        log: counts of the exchanges.
        mesh_sizes: (number of ranks, number of groups).
    """

    def __init__(
        self,
        exchange: ExpertExchange,
        choices: SpreadChoices | None,
        log: ExchangeLog,
        mesh_sizes: tuple[int, int],
    ) -> None:
        self._exchange = exchange
        self._choices = choices
        self._log = log
        self._ranks, self._groups = mesh_sizes
        self.masks_padding = getattr(exchange, "masks_padding", False)
        sends = getattr(exchange, "sends_quantized", None)
        if sends is not None:
            self.sends_quantized: Callable[[str, Batch], bool] = sends
            self.dispatch_quantized = self._dispatch_quantized

    @property
    def load(self) -> Tensor | None:
        """Number of this group's tokens that chose each expert, int64 [experts], or None."""
        return self._exchange.load

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor, batch: Batch) -> Sent:
        return self._sent(self._exchange.dispatch, x, ids, weights, batch)

    def _dispatch_quantized(self, x: Any, ids: Tensor, weights: Tensor, batch: Batch) -> Sent:
        """Send tokens in the experts' input format; see ``dispatch``."""
        dispatch = self._exchange.dispatch_quantized  # type: ignore[attr-defined]
        return self._sent(dispatch, x, ids, weights, batch)

    def _sent(
        self, dispatch: Callable[..., Sent], x: Any, ids: Tensor, weights: Tensor, batch: Batch
    ) -> Sent:
        """Call ``dispatch``, and return its results with the experts that all groups choose."""
        with self._log.part_of(EXCHANGE):
            found, local, weights = dispatch(x, ids, weights, batch)
        self._log.add(EXCHANGE, "tp", self._ranks, 0, len(local) // self._ranks)
        if self._choices is None or self._log.uneven:
            return found, local, weights
        padding = batch.padding.own if batch.padding is not None and self.masks_padding else None
        if padding is not None:
            ids = ids.masked_fill(padding, -1)
        every = self._choices.of(ids, len(local) // self._groups)
        return found, every.to(local.dtype), weights

    def combine(self, y: Tensor, partial: Tensor | None = None) -> Tensor:
        with self._log.part_of(EXCHANGE):
            return self._exchange.combine(y, partial)


class LoneStack(ParallelStack):
    """The strategies of a rank that runs alone.

    Args:
        stack: the strategies, built with the copies as their collectives.
        plan: the plan of all ranks.
        rank: number of the rank.
        device: torch device of the rank.
        log: counts of the exchanges.
    """

    def __init__(
        self, stack: ParallelStack, plan: EnginePlan, rank: int, device: str, log: ExchangeLog
    ) -> None:
        super().__init__(stack.strategies)
        self._plan = plan
        self._device = device
        self._log = log
        self._at = coordinates(rank, plan.mesh)
        self._groups = axis_size("dp", plan.mesh)
        self._choices: list[SpreadChoices] = []
        found = super().router()
        self._router = None if found is None else LoneRouter(found)

    @property
    def routing(self) -> str:
        """How the tokens of other groups choose experts, in words."""
        if self._groups == 1:
            return OWN
        return SPREAD if self._choices and not self._log.uneven else MIRRORED

    def router(self) -> LoneRouter | None:
        """Return the router by which this rank's group runs every request; None without groups."""
        return self._router

    def expert_exchange(self, name: str, experts: int) -> ExpertExchange | None:
        """Return the exchange of an MoE layer, with the tokens of groups that seem to have work."""
        found = super().expert_exchange(name, experts)
        if found is None or getattr(found, "stays", False):
            return found
        choices = None
        if self.held_experts(name, experts) is None:
            held = self.shard("experts", name, experts)
            groups = self._at["dp"], self._groups
            choices = SpreadChoices(groups, experts, held.start, held.size, self._device)
            self._choices.append(choices)
        return LoneExchange(found, choices, self._log, (self._plan.ranks, self._groups))

    def set_busy(self, groups: int) -> bool:
        """Let ``groups`` groups seem to have tokens, and return whether that is possible."""
        for choices in self._choices:
            choices.set_busy(groups)
        return groups == self._groups or self.routing == SPREAD
