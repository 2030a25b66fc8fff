"""Composition of several parallelism strategies into one object for layers and the loop."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from glowplug.core.protocols.parallel import ExpertExchange, ParallelStrategy, RequestRouter, Shard
from glowplug.core.step.batch import Batch, StepShape

if TYPE_CHECKING:
    from torch import Tensor


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

    def shard(self, role: str, name: str, full: int, block: int = 1) -> Shard:
        """Return this rank's part of a dimension, from the last strategy that decides it.

        If no strategy decides, the part is the whole dimension. Arguments as in
        ``ParallelStrategy.shard``.
        """
        for strategy in reversed(self.strategies):
            found = strategy.shard(role, name, full, block)
            if found is not None:
                return found
        return Shard(0, full, full)

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

        The call waits for the device. Layers that do not count are left out.
        """
        return {
            name: exchange.load.tolist()
            for name, exchange in self._exchanges.items()
            if exchange.load is not None
        }

    def forget_load(self) -> None:
        """Set the counts of ``expert_load`` to zero, so that counting starts anew."""
        for exchange in self._exchanges.values():
            if exchange.load is not None:
                exchange.load.zero_()
