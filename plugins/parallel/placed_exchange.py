"""Exchange of tokens with experts whose copies are placed on ranks by load.

Gates choose experts; ranks hold slots, each with one copy of an expert
(``plugins/parallel/expert_placement.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from glowplug.core.protocols import ExpertExchange, Quantized
from glowplug.core.step.batch import Batch

#: number of ways in which tokens are dealt to the copies of an expert, a power of two. With 64, the
#: shares of three copies differ by a twentieth.
WAYS = 64


class PlacedExchange:
    """An ``ExpertExchange`` that replaces a token's experts by slots and passes it to another one.

    NOTE: the copy of an expert depends only on the sum of the token's experts. So a token's bits do
    not depend on its row, its group or the other tokens of the step, and nothing waits for the
    device.
    """

    def __init__(
        self, slots: Sequence[int], experts: int, device: str, exchange: ExpertExchange
    ) -> None:
        """Wrap ``exchange``, whose experts are the slots.

        Args:
            slots: expert in each slot, at least one slot for each expert.
            experts: number of experts.
        """
        self._exchange = exchange
        self._slots = torch.tensor(slots, device=device)
        self._experts = experts
        self._ways = WAYS if len(slots) > experts else 1
        self._slot_of = torch.tensor(slot_table(slots, experts, self._ways), device=device)
        take = getattr(exchange, "take_slots", None)
        #: the exchange itself replaces experts by slots, with the same table
        self._taken = take is not None and take(self._slot_of, self._ways)
        self.stays = getattr(exchange, "stays", False)
        self.masks_padding = getattr(exchange, "masks_padding", False)
        self.combine = exchange.combine

    @property
    def load(self) -> Tensor | None:
        """Number of tokens that chose each expert, int64 [experts]; None if not counted."""
        load = self._exchange.load
        if load is None:
            return None
        return load.new_zeros(self._experts).index_add_(0, self._slots, load)

    def dispatch(
        self, x: Tensor, ids: Tensor, weights: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._exchange.dispatch(x, self._given(ids), weights, batch)

    def select(self, ids: Tensor, batch: Batch | None) -> Tensor:
        """Return the indices of the tokens' slots on this rank; see ``ExpertExchange``."""
        return self._exchange.select(  # type: ignore[attr-defined,no-any-return]
            self._given(ids), batch
        )

    def sends_quantized(self, input_format: str, batch: Batch) -> bool:
        """Return whether the step's tokens are sent in the experts' input format."""
        sends = getattr(self._exchange, "sends_quantized", None)
        return sends is not None and bool(sends(input_format, batch))

    def dispatch_quantized(
        self, x: Quantized, ids: Tensor, weights: Tensor, batch: Batch
    ) -> tuple[Quantized, Tensor, Tensor]:
        """Send tokens in the experts' input format; see ``dispatch``."""
        return self._exchange.dispatch_quantized(  # type: ignore[attr-defined,no-any-return]
            x, self._given(ids), weights, batch
        )

    def _given(self, ids: Tensor) -> Tensor:
        """Return the ids that the exchange is given: slots, or experts that it replaces itself."""
        return ids if self._taken else self.slots_of(ids)

    def slots_of(self, ids: Tensor) -> Tensor:
        """Return the slots that tokens use.

        Args:
            ids: chosen experts, int64 or int32 [T, K]; -1 for none.

        Returns:
            int64 [T, K]; -1 for none.
        """
        if self._ways == 1:
            return torch.take(self._slot_of, ids.long())
        way = ids.sum(-1, keepdim=True) & (self._ways - 1)
        return torch.take(self._slot_of, torch.add(way, ids, alpha=self._ways))


def slot_table(slots: Sequence[int], experts: int, ways: int) -> list[int]:
    """Return the slot of expert e in way w at index e * ways + w.

    The last ``ways`` elements, which negative indices reach, are -1: the slot of expert -1.
    """
    copies: list[list[int]] = [[] for _ in range(experts)]
    for slot, expert in enumerate(slots):
        copies[expert].append(slot)
    found = [held[way % len(held)] for held in copies for way in range(ways)]
    return found + [-1] * ways
