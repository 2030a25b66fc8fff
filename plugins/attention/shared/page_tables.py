"""Tensors that captured kernels read and each step makes anew, in places that stay."""

from __future__ import annotations

import torch
from torch import Tensor

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.byte_costs import SHOWN, DecodingRows
from glowplug.core.protocols import Limits


class SlotBuffers:
    """Small tensors belong to the graph's slot that they were made for. Page tables over smaller
    pages, which are large where contexts are long, all lie in one place: each step and each pass of
    a draft is planned, then run, before the next one is planned (``AttentionBackend.plan_step``),
    on one stream.
    """

    def __init__(self) -> None:
        self._kept: dict[object, tuple[Tensor, ...]] = {}
        self._room = torch.empty(0, dtype=torch.int32)
        self._own: dict[object, Tensor] = {}

    def reserve(self, size: int, device: torch.device) -> None:
        """Room for tables of ``size`` bytes. It stays where it is while it is large enough."""
        if size > self._room.nbytes:
            self._room = torch.empty(-(-size // SHOWN), dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of tables held."""
        return self._room.nbytes + sum(own.nbytes for own in self._own.values())

    def keep(self, slot: object | None, made: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """``made``, or with a slot the tensors that it was first given, holding the same numbers."""
        if slot is None:
            return made
        kept = self._kept.setdefault(slot, made)
        if kept is not made:
            for to, new in zip(kept, made, strict=True):
                to.copy_(new)
        return kept

    def shifted(
        self, slot: object | None, table: Tensor, lens: Tensor, first: int, page_size: int
    ) -> tuple[Tensor, Tensor]:
        """A cache whose first positions hold nothing, for kernels that read every position of pages
        of one token.

        table int32 [R, P] and lens int32 [R] -> slots int32 [R, P * page_size - first] and the
        lengths behind ``first``; valid until the next table is made.
        """
        rows = table.shape[0]
        count = table.shape[1] * page_size - first
        place = self._place(slot, rows * (count + 1), table.device)
        slots = place[: rows * count].view(rows, count)
        behind = place[rows * count :]
        positions = torch.arange(first, first + count, device=table.device)
        columns = positions.div(page_size, rounding_mode="floor")
        # NOTE: written where it stays, in int32: whole tables of int64 in between took ten times as
        # much.
        torch.gather(table * page_size, 1, columns.expand(rows, -1), out=slots)
        slots += (positions % page_size).int()
        torch.sub(lens, first, out=behind)
        return slots, behind.clamp_(min=0)

    def in_parts(self, slot: object | None, table: Tensor, parts: int) -> Tensor:
        """The same cache in smaller pages: table int32 [R, P] -> int32 [R, P * parts]; valid until
        the next table.
        """
        place = self._place(slot, table.numel() * parts, table.device)
        torch.add(
            table.unsqueeze(-1) * parts,
            torch.arange(parts, dtype=torch.int32, device=table.device),
            out=place.view(*table.shape, parts),
        )
        return place.view(table.shape[0], -1)

    def _place(self, slot: object | None, count: int, device: torch.device) -> Tensor:
        """int32 [count] in the room, or apart from it where that is too small: the slot's own, or a
        new one.
        """
        if count <= len(self._room):
            return self._room[:count]
        if slot is None:
            return torch.empty(count, dtype=torch.int32, device=device)
        if slot not in self._own:
            self._own[slot] = torch.empty(count, dtype=torch.int32, device=device)
        return self._own[slot]


def decoding_rows(limits: Limits, plan: EnginePlan, heads: int) -> DecodingRows:
    """The most that decoding rows may come to, ``heads`` of them on this rank."""
    sizes = plan.sizes
    return DecodingRows(
        limits.rows, limits.context, sizes.page_size, sizes.width, heads, sizes.draft_layers > 0
    )
