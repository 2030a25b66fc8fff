"""Persistent buffers for tensors that every step recomputes and captured kernels read."""

from __future__ import annotations

import torch
from torch import Tensor

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.byte_costs import NUMBER_BYTES, DecodingRows
from glowplug.core.protocols import Limits


class GraphBuffers:
    """Persistent device buffers: small ones for each captured graph, one page table shared by all.

    Small tensors belong to the captured graph for which they were created. Page tables rewritten
    for smaller pages are large when contexts are long, so all of them share one buffer. Sharing is
    safe because each step and each draft pass is planned and then run before the next one is
    planned (``AttentionBackend.plan_step``), on one stream.
    """

    def __init__(self) -> None:
        self._kept: dict[object, tuple[Tensor, ...]] = {}
        self._room = torch.empty(0, dtype=torch.int32)
        self._own: dict[object, Tensor] = {}

    def reserve(self, size: int, device: torch.device) -> None:
        """Make the shared page-table buffer at least ``size`` bytes large.

        A buffer that is large enough already is kept, at its address.
        """
        if size > self._room.nbytes:
            self._room = torch.empty(-(-size // NUMBER_BYTES), dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        """Size of all buffers held for page tables, shared or of one graph, in bytes."""
        return self._room.nbytes + sum(own.nbytes for own in self._own.values())

    def keep(self, graph: object | None, made: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the tensors ``made``, copied into persistent memory for a captured graph.

        Args:
            graph: Key of the captured graph; None: the step is eager.
            made: Newly computed tensors.

        Returns:
            ``made`` itself in an eager step; otherwise the tensors of the graph's first call,
            overwritten with the values of ``made``.
        """
        if graph is None:
            return made
        kept = self._kept.setdefault(graph, made)
        if kept is not made:
            for to, new in zip(kept, made, strict=True):
                to.copy_(new)
        return kept

    def shifted(
        self, graph: object | None, table: Tensor, lens: Tensor, first: int, page_size: int
    ) -> tuple[Tensor, Tensor]:
        """Return a page table of one-token pages from position ``first`` on, and its row lengths.

        Kernels that cannot skip positions use this table for caches whose positions before
        ``first`` are empty. The result is valid until the next table is made.

        Args:
            graph: Key of the captured graph; None: the step is eager.
            table: Page table, int32 [R, P].
            lens: Row lengths in tokens, int32 [R].
            first: First position that holds an entry.
            page_size: Number of tokens per page of ``table``.

        Returns:
            KV slots int32 [R, P * page_size - first] and row lengths counted from ``first``, int32
            [R].
        """
        rows = table.shape[0]
        count = table.shape[1] * page_size - first
        place = self._place(graph, rows * (count + 1), table.device)
        kv_slots = place[: rows * count].view(rows, count)
        behind = place[rows * count :]
        positions = torch.arange(first, first + count, device=table.device)
        columns = positions.div(page_size, rounding_mode="floor")
        # NOTE: written in place, in int32: intermediate int64 tables took ten times as long.
        torch.gather(table * page_size, 1, columns.expand(rows, -1), out=kv_slots)
        kv_slots += (positions % page_size).int()
        torch.sub(lens, first, out=behind)
        return kv_slots, behind.clamp_(min=0)

    def small_pages(self, graph: object | None, table: Tensor, split: int) -> Tensor:
        """Return ``table`` rewritten for the same cache divided into smaller pages.

        The result is valid until the next table is made.

        Args:
            graph: Key of the captured graph; None: the step is eager.
            table: Page table, int32 [R, P].
            split: Number of smaller pages per page of ``table``.

        Returns:
            int32 [R, P * split].
        """
        place = self._place(graph, table.numel() * split, table.device)
        torch.add(
            table.unsqueeze(-1) * split,
            torch.arange(split, dtype=torch.int32, device=table.device),
            out=place.view(*table.shape, split),
        )
        return place.view(table.shape[0], -1)

    def _place(self, graph: object | None, count: int, device: torch.device) -> Tensor:
        """Return an int32 [count] buffer in which to write a page table.

        This is the shared buffer if it is large enough; otherwise the own buffer of ``graph``, or a
        new one in an eager step (``graph`` is None).
        """
        if count <= len(self._room):
            return self._room[:count]
        if graph is None:
            return torch.empty(count, dtype=torch.int32, device=device)
        if graph not in self._own:
            self._own[graph] = torch.empty(count, dtype=torch.int32, device=device)
        return self._own[graph]


def decoding_rows(limits: Limits, plan: EnginePlan, heads: int) -> DecodingRows:
    """Return the largest decode step within ``limits``, with ``heads`` heads on this rank."""
    sizes = plan.sizes
    drafts = sizes.draft_extends and not plan.draft_choices
    return DecodingRows(limits.rows, limits.context, sizes.page_size, sizes.width, heads, drafts)
