"""Tensors that captured kernels read and each step makes anew: a graph's slot keeps them in one place."""
from __future__ import annotations

import torch
from torch import Tensor

from glowplug.core.placement import slots_at


class SlotBuffers:
    """For each slot the tensors that it was first given; later ones are copied into them."""

    def __init__(self) -> None:
        self._kept: dict[object, tuple[Tensor, ...]] = {}

    def keep(self, slot: object | None, made: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """``made``, or with a slot its own tensors holding the same numbers."""
        if slot is None:
            return made
        kept = self._kept.setdefault(slot, made)
        if kept is not made:
            for to, new in zip(kept, made, strict=True):
                to.copy_(new)
        return kept


def shifted(table: Tensor, lens: Tensor, first: int, page_size: int) -> tuple[Tensor, Tensor]:
    """A cache whose first positions hold nothing, for kernels that read every position of pages of one token.

    table int32 [R, P] and lens int32 [R] -> slots int32 [R, P * page_size - first] and the lengths behind ``first``.
    """
    positions = torch.arange(first, table.shape[1] * page_size, device=table.device)
    slots = slots_at(table, positions.expand(table.shape[0], -1), page_size)
    return slots.int(), (lens - first).clamp_(min=0)


def in_parts(table: Tensor, parts: int) -> Tensor:
    """The same cache in smaller pages: table int32 [R, P] -> int32 [R, P * parts]."""
    smaller = table.unsqueeze(-1) * parts + torch.arange(parts, dtype=torch.int32, device=table.device)
    return smaller.view(table.shape[0], -1)
