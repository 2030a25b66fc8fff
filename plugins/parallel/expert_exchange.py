"""How tokens reach the ranks of their experts and come back.

Ranks of one group hold the same tokens, so each brings its own slice of them and every token
travels once. Slices are as long as the busiest group's, with padding rows of zeros and ids of -1. S
rows a slice, K experts a token.

NOTE: slices are added up here, in float32 and in order of rank, instead of by the backend's
reduce-scatter: a ring adds in an order that depends on where in the buffer a row lies, so a token's
bits would depend on its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from glowplug.core.protocols import Collectives
from glowplug.core.step.batch import Batch
from glowplug.kernels.launch.sums import add_up


@dataclass(frozen=True)
class Layout:
    """A rank's place: (index, size) along "ep" and along its group ("attn_tp"); ``experts`` of the
    layer.
    """

    tp: int
    ep: tuple[int, int]
    group: tuple[int, int]
    experts: int

    @property
    def held(self) -> int:
        """Experts of each share."""
        return self.experts // self.ep[1]


class Exchange:
    """What the exchanges have in common: slices of a group's tokens, load counts, the way back into
    the group.
    """

    load: Tensor | None = None

    def __init__(
        self, layout: Layout, collectives: Collectives, device: str, count_load: bool
    ) -> None:
        self._layout = layout
        self._collectives = collectives
        if count_load:
            # NOTE: ids of -1 are counted too, in front of the experts' own counts: no mask, no wait
            # for the device
            self._counts = torch.zeros(layout.experts + 1, dtype=torch.int64, device=device)
            self._one = torch.ones(1, dtype=torch.int64, device=device)
            self.load = self._counts[1:]

    def _own(self, tokens: int, most: int) -> tuple[int, slice]:
        """Rows of a slice when the busiest group has ``most`` tokens, and which of the ``tokens``
        here are in ours.
        """
        index, size = self._layout.group
        rows = -(-most // size)
        return rows, slice(min(index * rows, tokens), min((index + 1) * rows, tokens))

    def _take(
        self, x: Tensor, ids: Tensor, weights: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's slice of its group's tokens, padded to S rows; counts it."""
        tokens = x.shape[0]
        most = tokens if batch.agreed is None else batch.agreed.tokens
        assert tokens <= most, f"{tokens} tokens in a step agreed to have {most}"
        self._rows, part = self._own(tokens, most)
        x = x[part]
        ids = ids[part]
        weights = weights[part]
        self._count(ids)
        missing = self._rows - x.shape[0]
        if not missing:
            return x, ids, weights
        fill = (0, 0, 0, missing)
        return F.pad(x, fill), F.pad(ids, fill, value=-1), F.pad(weights, fill)

    def _count(self, ids: Tensor) -> None:
        if self.load is not None:
            chosen = ids.flatten() + 1
            self._counts.scatter_add_(0, chosen, self._one.expand_as(chosen))

    def _local(self, ids: Tensor, share: int | Tensor) -> Tensor:
        """Expert numbers within ``share``; -1 where the expert belongs to another."""
        local = ids - share * self._layout.held
        return local.masked_fill_((local < 0) | (local >= self._layout.held), -1)

    def _finish(
        self, own: Tensor, tokens: int, partial: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """own float32 [S, hidden], complete -> [tokens, hidden] of the whole group, ``partial``
        added.
        """
        if partial is not None:
            ranks = self._layout.group[1]
            hidden = partial.shape[1]
            slices = F.pad(partial, (0, 0, 0, ranks * self._rows - tokens)).view(
                ranks, self._rows, hidden
            )
            own = add_up(self._collectives.all_to_all(slices, "attn_tp")) + own
        return self._collectives.all_gather(own.to(dtype), "attn_tp")[:tokens]


class AllGatherExchange(Exchange):
    """Every rank gets every token and works on those that chose its experts. Any split, fixed
    shapes.

    Where a group is all ranks, each has every token already: nothing is gathered, and one sum ends
    it.
    """

    def dispatch(
        self, x: Tensor, ids: Tensor, weights: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._tokens = x.shape[0]
        own = self._layout.ep[0]
        if self._layout.group[1] == self._layout.tp:
            self._count(ids[self._own(self._tokens, self._tokens)[1]])
            return x, self._local(ids, own), weights
        packed = pack(*self._take(x, ids, weights, batch))
        every, ids, weights = unpack(
            self._collectives.all_gather(packed, "tp"), ids.shape[1], x.dtype
        )
        return every, self._local(ids, own), weights

    def combine(self, y: Tensor, partial: Tensor | None = None) -> Tensor:
        if self._layout.group[1] == self._layout.tp:
            return self._collectives.all_reduce(y if partial is None else y.add_(partial), "tp")
        parts = self._collectives.all_to_all(y.view(self._layout.tp, self._rows, y.shape[1]), "tp")
        return self._finish(add_up(parts), self._tokens, partial, y.dtype)


class StaticAllToAllExchange(Exchange):
    """Each token to the ranks that hold one of its experts, in a buffer with a row of every token
    for every rank.

    Each expert must lie whole on one rank.
    """

    def __init__(
        self, layout: Layout, collectives: Collectives, device: str, count_load: bool
    ) -> None:
        super().__init__(layout, collectives, device, count_load)
        self._shares = torch.arange(layout.ep[1], device=device).view(-1, 1, 1)

    def dispatch(
        self, x: Tensor, ids: Tensor, weights: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._tokens = x.shape[0]
        x, ids, weights = self._take(x, ids, weights, batch)
        local = self._local(ids, self._shares)
        sent = x.masked_fill((local < 0).all(-1, keepdim=True), 0)
        packed = pack(sent, local, weights.expand(local.shape))
        return unpack(
            self._collectives.all_to_all(packed, "ep").flatten(0, 1), ids.shape[1], x.dtype
        )

    def combine(self, y: Tensor, partial: Tensor | None = None) -> Tensor:
        parts = self._collectives.all_to_all(
            y.view(self._layout.ep[1], self._rows, y.shape[1]), "ep"
        )
        return self._finish(add_up(parts), self._tokens, partial, y.dtype)


class AllToAllExchange(StaticAllToAllExchange):
    """The same with only the rows that are wanted. The host reads their number, so no graph
    captures it.
    """

    def dispatch(
        self, x: Tensor, ids: Tensor, weights: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._tokens = x.shape[0]
        x, ids, weights = self._take(x, ids, weights, batch)
        local = self._local(ids, self._shares)
        share, self._source = (local >= 0).any(-1).nonzero(as_tuple=True)
        counts = torch.bincount(share, minlength=len(local)).unsqueeze(1)
        self._received = self._collectives.all_to_all(counts, "ep").flatten().tolist()
        self._sent = counts.flatten().tolist()
        packed = pack(x[self._source], local[share, self._source], weights[self._source])
        arrived = self._collectives.all_to_all_rows(packed, self._sent, self._received, "ep")
        return unpack(arrived, ids.shape[1], x.dtype)

    def combine(self, y: Tensor, partial: Tensor | None = None) -> Tensor:
        back = self._collectives.all_to_all_rows(y, self._received, self._sent, "ep").float()
        own = back.new_zeros(self._rows, y.shape[1])
        parts = (torch.split(rows, self._sent) for rows in (self._source, back))
        for source, part in zip(
            *parts, strict=True
        ):  # no row twice in a part, so they add up in order of rank
            own.index_add_(0, source, part)
        return self._finish(own, self._tokens, partial, y.dtype)


def pack(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """x [..., hidden], ids int64 and weights float32 [..., K] as bytes [..., 8 K + hidden's], for
    one collective.
    """
    parts = (ids.int(), weights, x)
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1)


def unpack(packed: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes [M, ...] of tokens with ``width`` experts each -> x [M, hidden] in ``dtype``, ids,
    weights.
    """
    sizes = [4 * width, 4 * width, packed.shape[-1] - 8 * width]
    ids, weights, x = (part.contiguous() for part in torch.split(packed, sizes, dim=-1))
    return x.view(dtype), ids.view(torch.int32).long(), weights.view(torch.float32)
