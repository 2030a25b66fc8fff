"""Composition of several parallelism strategies into one object for layers and the loop."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from glowplug.core.protocols.parallel import ExpertExchange, ParallelStrategy, RequestRouter, Shard
from glowplug.core.step.batch import Batch, StepShape

if TYPE_CHECKING:
    from torch import Tensor

#: special role of a dimension -> role for strategies that do not decide the special one
GENERAL_ROLES = {"shared_column": "column", "shared_row": "row", "heads_row": "row"}


class ParallelStack:
    """The strategies of ``[[parallel]]`` as one, in the operator's order.

    A later strategy refines those before it: "tensor" splits the heads, and "dp_attention" after it
    makes them whole again.
    """

    def __init__(self, strategies: Seq[ParallelStrategy]) -> None:
        self.strategies = tuple(strategies)
        # a strategy written before the attribute existed may move tokens
        self.moves_tokens = any(getattr(each, "moves_tokens", True) for each in self.strategies)
        self._exchanges: dict[str, ExpertExchange] = {}
        self._forgotten: dict[str, list[int]] = {}

    def shard(self, role: str, name: str, full: int, block: int = 1) -> Shard:
        """Return this rank's part of a dimension, from the last strategy that decides it.

        If no strategy decides, the part is the whole dimension. Arguments as in
        ``ParallelStrategy.shard``.
        """
        for strategy in reversed(self.strategies):
            found = strategy.shard(role, name, full, block)
            if found is None and role in GENERAL_ROLES:
                found = strategy.shard(GENERAL_ROLES[role], name, full, block)
            if found is not None:
                return found
        return Shard(0, full, full)

    def held_experts(self, name: str, experts: int) -> tuple[int, ...] | None:
        """Return the experts that this rank holds of the MoE layer ``name``.

        The result is that of the last strategy that lists them; None: the range of ``shard``.
        """
        for strategy in reversed(self.strategies):
            method = getattr(strategy, "held_experts", None)
            found = None if method is None else method(name, experts)
            if found is not None:
                return tuple(found)
        return None

    def agree(self, local: StepShape) -> StepShape:
        """Return the step shape after every strategy has agreed on it with the other ranks."""
        for strategy in self.strategies:
            local = strategy.agree(local)
        return local

    def router(self) -> RequestRouter | None:
        """Return the router of the last strategy that has one; None if no strategy has one."""
        found = [
            router for strategy in self.strategies if (router := strategy.router()) is not None
        ]
        return found[-1] if found else None

    def leave_attention(self, x: Tensor, batch: Batch) -> Tensor:
        """Apply each strategy's ``leave_attention``, in order."""
        for strategy in self.strategies:
            x = strategy.leave_attention(x, batch)
        return x

    def enter_attention(self, x: Tensor, batch: Batch) -> Tensor:
        """Apply each strategy's ``enter_attention``, in reverse order."""
        for strategy in reversed(self.strategies):
            x = strategy.enter_attention(x, batch)
        return x

    def expert_exchange(self, name: str, experts: int) -> ExpertExchange | None:
        """Return the expert exchange of the MoE layer ``name``; None if no strategy has one.

        The last strategy that has one decides.
        """
        for strategy in reversed(self.strategies):
            exchange = strategy.expert_exchange(name, experts)
            if exchange is not None:
                # NOTE: a draft from a folder of its own may have a layer of the same name
                self._exchanges[f"{name} (draft)" if name in self._exchanges else name] = exchange
                return exchange
        return None

    def expert_load(self) -> dict[str, list[int]]:
        """Return the number of tokens that chose each expert on this rank, by layer.

        Only tokens since the last ``forget_load`` count. The call waits for the device. Layers that
        do not count are left out.
        """
        found = self._counted()
        for name, before in self._forgotten.items():
            found[name] = [now - then for now, then in zip(found[name], before, strict=True)]
        return found

    def forget_load(self) -> None:
        """Let the counts of ``expert_load`` start anew. The call waits for the device."""
        self._forgotten = self._counted()

    def _counted(self) -> dict[str, list[int]]:
        """Return the number of tokens so far that chose each expert on this rank, by layer."""
        loads = ((name, exchange.load) for name, exchange in self._exchanges.items())
        return {name: load.tolist() for name, load in loads if load is not None}
