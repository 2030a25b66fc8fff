"""Exchange of tokens between ranks: to the ranks of their experts and back.

The ranks of a group hold the same tokens, so each rank contributes its own slice of them and every
token is sent once. All slices are as long as those of the busiest group; padding rows are zeros
with ids of -1. S is the number of rows of a slice, and K the number of experts of a token.

NOTE: slices are summed in float32 and in order of rank. A backend's ``reduce_scatter`` may be a
ring, whose order of summation depends on a row's position in the buffer, so that a token's bits
would depend on the other tokens of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from glowplug.core.protocols import Collectives, Quantized
from glowplug.core.step.batch import Batch
from glowplug.kernels.collectives.token_rows import (
    as_numbers,
    from_row_bytes,
    pack,
    row_bytes,
    unpack,
)
from glowplug.kernels.formats.fp8_block import FP8_INPUT
from glowplug.kernels.launch.sums import add_up

#: tokens of a group in a step from which on the all-gather sends FP8 rows. To pack and unpack them
#: takes five small launches, about 8 us; half the bytes of 512 tokens of 7,168 numbers save 10 us
#: at 350 GB/s (by arithmetic, not yet timed)
FP8_ROWS_TOKENS = 512


@dataclass(frozen=True)
class Layout:
    """A rank's place in the expert parallelism of one layer.

    Attributes:
        tp: Number of tensor-parallel ranks.
        ep: (this rank's index, number of ranks) along the axis "ep".
        group: (this rank's index, number of ranks) in its group, along the axis "attn_tp".
        experts: Number of routed experts of the layer.
    """

    tp: int
    ep: tuple[int, int]
    group: tuple[int, int]
    experts: int

    @property
    def held(self) -> int:
        """Number of experts that a rank holds.

        All shares are equal: the rank with index i along "ep" holds share i of the experts.
        """
        return self.experts // self.ep[1]


class Exchange:
    """Base class of the exchanges, which send tokens to the ranks of their experts and back.

    It divides a group's tokens among the ranks of the group, counts tokens per expert, and gathers
    the results.

    Attributes:
        load: Number of tokens that chose each expert, int64 [experts]; None if not counted.
        masks_padding: True: the exchange itself leaves padding tokens out.
    """

    load: Tensor | None = None
    masks_padding = True

    def __init__(
        self, layout: Layout, collectives: Collectives, device: str, count_load: bool
    ) -> None:
        self._layout = layout
        self._collectives = collectives
        self._rank_ids: Callable[..., Tensor] | None = None
        if device.startswith("cuda"):
            from glowplug.kernels.collectives.expert_ids import rank_ids

            self._rank_ids = rank_ids
        self._slots: tuple[Tensor, int] | None = None
        if count_load:
            # NOTE: ids of -1 are counted, too, in an extra first element: this needs neither a
            # mask nor a wait for the device
            self._counts = torch.zeros(layout.experts + 1, dtype=torch.int64, device=device)
            self._one = torch.ones(1, dtype=torch.int64, device=device)
            self.load = self._counts[1:]

    def take_slots(self, table: Tensor, ways: int) -> bool:
        """Replace experts by slots from now on, in the kernel that selects and counts them.

        Args:
            table: as ``slot_table`` returns it, int64.
            ways: number of ways.

        Returns:
            False without such a kernel: the caller replaces them.
        """
        if self._rank_ids is None:
            return False
        self._slots = table, ways
        return True

    def _own(self, tokens: int, most: int) -> tuple[int, slice]:
        """Return the slice of its group's tokens that this rank handles, and its padded length S.

        Args:
            tokens: Number of tokens of this group.
            most: Number of tokens of the group with the most.

        Returns:
            (S, the slice).
        """
        index, size = self._layout.group
        rows = -(-most // size)
        return rows, slice(min(index * rows, tokens), min((index + 1) * rows, tokens))

    def _slice(self, tokens: int, batch: Batch) -> slice:
        """Return the slice of a group's tokens that this rank handles, and set ``_rows`` to S."""
        most = tokens if batch.agreed is None else batch.agreed.tokens
        assert tokens <= most, f"{tokens} tokens in a step agreed to have {most}"
        self._rows, part = self._own(tokens, most)
        return part

    def _take(
        self, x: Tensor, ids: Tensor, weights: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's slice of its group's tokens, padded to S rows (see :meth:`_own`).

        Padding tokens of a captured step get ids of -1. The experts of the slice's tokens are added
        to the load counts.
        """
        part = self._slice(x.shape[0], batch)
        x = x[part]
        ids = self._chosen(ids, batch, part)[part]
        weights = weights[part]
        missing = self._rows - x.shape[0]
        if not missing:
            return x, ids, weights
        fill = (0, 0, 0, missing)
        return F.pad(x, fill), F.pad(ids, fill, value=-1), F.pad(weights, fill)

    def _count(self, ids: Tensor) -> None:
        """Add the tokens' chosen experts, ``ids``, to the load counts."""
        if self.load is not None:
            chosen = ids.flatten() + 1
            self._counts.scatter_add_(0, chosen, self._one.expand_as(chosen))

    def _chosen(self, ids: Tensor, batch: Batch | None, part: slice) -> Tensor:
        """Return ids without those of padding tokens, and count the experts of ``part``.

        Args:
            ids: Chosen experts of the group's tokens, int [T, K].
            batch: The step; None: no token is padding.
            part: The tokens whose experts this rank counts.
        """
        return self._converted(ids, 0, self._layout.experts, batch, part, self._slots)

    def _local(self, ids: Tensor) -> Tensor:
        """Return the index of each expert id within this rank's share; -1 for other experts."""
        held = self._layout.held
        return self._converted(ids, self._layout.ep[0] * held, held)

    def _converted(
        self,
        ids: Tensor,
        first: int,
        held: int,
        batch: Batch | None = None,
        part: slice = slice(0, 0),
        slots: tuple[Tensor, int] | None = None,
    ) -> Tensor:
        """Return the indices of ids among ``held`` experts from ``first`` on; -1 for others.

        Experts of the tokens ``part`` are added to the load counts. With ``slots``, a table and its
        number of ways, ids are first replaced by slots.
        """
        marks = None if batch is None else batch.padding
        padding = None if marks is None else marks.own
        counts = self.load if part.stop > part.start else None
        if self._rank_ids is not None:
            return self._rank_ids(ids, first, held, padding, counts, part, slots)
        if padding is not None:
            ids = ids.masked_fill(padding, -1)
        if counts is not None:
            self._count(ids[part])
        local = ids - first
        return local.masked_fill_((ids < 0) | (local < 0) | (local >= held), -1)

    def _sum_slices(self, slices: Tensor, axis: str) -> Tensor:
        """Return the sum over ``axis`` of this rank's slice, float32 [S, hidden].

        ``slices``: one slice for each rank of the axis, [ranks, S, hidden].
        """
        exact = getattr(self._collectives, "reduce_scatter_exact", None)
        if exact is not None:
            return exact(slices, axis)  # type: ignore[no-any-return]
        return add_up(self._collectives.all_to_all(slices, axis))

    def _finish(
        self, own: Tensor, tokens: int, partial: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Gather the layer's results for the tokens of the whole group from its ranks.

        Args:
            own: The complete sums of this rank's slice, float32 [S, hidden].
            tokens: Number of tokens of the group.
            partial: This rank's partial sums of the whole group, to be added; [tokens, hidden] or
                None.
            dtype: Dtype of the result.

        Returns:
            [tokens, hidden].
        """
        if partial is not None:
            ranks = self._layout.group[1]
            hidden = partial.shape[1]
            slices = F.pad(partial, (0, 0, 0, ranks * self._rows - tokens)).view(
                ranks, self._rows, hidden
            )
            own = self._sum_slices(slices, "attn_tp") + own
        return self._collectives.all_gather(own.to(dtype), "attn_tp")[:tokens]


class AllGatherExchange(Exchange):
    """Exchange by all-gather: ranks receive all tokens and compute those routed to their experts.

    This exchange supports every split of the experts and has fixed shapes.

    Attributes:
        stays: True: a group has all ranks, so every rank has all tokens.
    """

    def __init__(
        self, layout: Layout, collectives: Collectives, device: str, count_load: bool
    ) -> None:
        super().__init__(layout, collectives, device, count_load)
        self.stays = layout.group[1] == layout.tp

    def select(self, ids: Tensor, batch: Batch | None) -> Tensor:
        """Return the ids of this rank's experts within its share; -1 for experts of other ranks.

        ``ids``: chosen experts of all tokens, int [T, K].
        """
        held = self._layout.held
        part = self._own(len(ids), len(ids))[1]
        return self._converted(ids, self._layout.ep[0] * held, held, batch, part, self._slots)

    def dispatch(
        self, x: Tensor, ids: Tensor, weights: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.stays:
            return x, self.select(ids, batch), weights
        self._tokens = x.shape[0]
        packed = pack(*self._take(x, ids, weights, batch))
        gathered = self._collectives.all_gather(as_numbers(packed), "tp").view(torch.uint8)
        every, ids, weights = unpack(gathered, ids.shape[1], x.dtype)
        return every, self._local(ids), weights

    def sends_quantized(self, input_format: str, batch: Batch) -> bool:
        """Return whether the step's tokens are sent in the experts' input format, block FP8.

        The result is equal on all ranks.
        """
        tokens = batch.num_tokens if batch.agreed is None else batch.agreed.tokens
        large = tokens >= FP8_ROWS_TOKENS
        return large and not self.stays and input_format == FP8_INPUT

    def dispatch_quantized(
        self, x: Quantized, ids: Tensor, weights: Tensor, batch: Batch
    ) -> tuple[Quantized, Tensor, Tensor]:
        """Send tokens as E4M3 values and scales; see ``dispatch``.

        A token's values and scales depend on its row alone, so they are those that the experts
        would compute from the tokens sent in 16 bits.
        """
        assert x.scales is not None, "E4M3 values have scales"
        rows = row_bytes(x.values, x.scales)
        sent, ids, weights = AllGatherExchange.dispatch(self, rows, ids, weights, batch)
        return Quantized(*from_row_bytes(sent, x.values.shape[1])), ids, weights

    def combine(self, y: Tensor, partial: Tensor | None = None) -> Tensor:
        if self.stays:
            return self._collectives.all_reduce(y if partial is None else y.add_(partial), "tp")
        own = self._sum_slices(y.view(self._layout.tp, self._rows, y.shape[1]), "tp")
        return self._finish(own, self._tokens, partial, y.dtype)


class StaticAllToAllExchange(Exchange):
    """Exchange by all-to-all in a buffer of fixed shape, with one row per token and rank.

    Each token is sent to the ranks that hold one of its experts. Each expert must be whole on one
    rank.
    """

    def __init__(
        self, layout: Layout, collectives: Collectives, device: str, count_load: bool
    ) -> None:
        super().__init__(layout, collectives, device, count_load)
        self._shares = torch.arange(layout.ep[1], device=device).view(-1, 1, 1)

    def _by_share(self, ids: Tensor) -> Tensor:
        """Return the index of each expert within each share, [shares, T, K]; -1 outside it.

        A share consists of the experts that one rank holds; its number is the rank's index along
        "ep".
        """
        local = ids - self._shares * self._layout.held
        return local.masked_fill_((local < 0) | (local >= self._layout.held), -1)

    def dispatch(
        self, x: Tensor, ids: Tensor, weights: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._tokens = x.shape[0]
        x, ids, weights = self._take(x, ids, weights, batch)
        local = self._by_share(ids)
        sent = x.masked_fill((local < 0).all(-1, keepdim=True), 0)
        packed = pack(sent, local, weights.expand(local.shape))
        return unpack(
            self._collectives.all_to_all(packed, "ep").flatten(0, 1), ids.shape[1], x.dtype
        )

    def combine(self, y: Tensor, partial: Tensor | None = None) -> Tensor:
        own = self._sum_slices(y.view(self._layout.ep[1], self._rows, y.shape[1]), "ep")
        return self._finish(own, self._tokens, partial, y.dtype)


class AllToAllExchange(StaticAllToAllExchange):
    """Exchange by all-to-all that sends each token only to ranks with one of its experts.

    The host reads how many rows each rank sends, so the exchange cannot be captured in a graph.
    """

    def dispatch(
        self, x: Tensor, ids: Tensor, weights: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._tokens = x.shape[0]
        x, ids, weights = self._take(x, ids, weights, batch)
        local = self._by_share(ids)
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
        # no row occurs twice in a part, so every row is summed in order of rank
        for source, part in zip(*parts, strict=True):
            own.index_add_(0, source, part)
        return self._finish(own, self._tokens, partial, y.dtype)
