"""An output head over some tokens of the vocabulary, whose rows are copies of a whole head's."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from glowplug.core.layers.embedding import LmHead
from glowplug.core.protocols import VocabularySlices


class SubsetHead:
    """Logits of C chosen tokens: a head that reads C rows of the weight instead of all.

    Every rank of a head that is split over ranks keeps rows of its own slice, equally many; a rank
    whose slice has fewer chosen tokens pads with rows whose logits are -inf.

    Args:
        head: The whole head, after its weights are loaded.
        quota: Rows that each rank keeps.

    Attributes:
        quota: Rows that each rank keeps.
        slices: Division of the chosen tokens among ranks; None if a rank has all of them.
        ids: Chosen token ids, int64 [ranks * quota], in the order of the logits; 0 for padding.
    """

    def __init__(self, head: LmHead, quota: int) -> None:
        self._shard = head.shard
        self._linear = head.linear
        whole = head.linear.dense()
        self._rows = whole.new_empty(quota, whole.shape[1])
        self._bias = torch.zeros(quota, device=whole.device)
        count = quota * self._shard.parts
        self._own = self._shard.start // -(-self._shard.full // self._shard.parts)
        self.slices: VocabularySlices | None = None
        if head.slices is not None:
            part = replace(self._shard, start=self._own * quota, size=quota, full=count)
            self.slices = VocabularySlices(part, head.slices.collectives)
        self.ids = torch.zeros(count, dtype=torch.int64, device=whole.device)
        self.quota = quota

    def choose(self, ids: Tensor) -> None:
        """Copy the rows of the tokens ``ids`` from the whole head, without waiting for the device.

        Args:
            ids: int64 [ranks, quota], tokens of each rank's slice; -1 for padding. The argument is
                the same on all ranks.
        """
        known = ids >= 0
        self.ids.copy_(ids.clamp(min=0).view(-1))
        own = self._own
        # NOTE: a quantised weight is dequantised here, and not kept
        whole = self._linear.dense()
        local = (ids[own] - self._shard.start).clamp(min=0, max=len(whole) - 1)
        torch.index_select(whole, 0, local, out=self._rows)
        self._bias.copy_(torch.zeros_like(self._bias).masked_fill_(~known[own], float("-inf")))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits of ``ids``, float32 [N, ranks * quota].

        ``hidden``: hidden states, [N, hidden].
        """
        logits = self.sliced_logits(hidden)
        return logits if self.slices is None else self.slices.gather(logits)

    def sliced_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of this rank's rows, float32 [N, quota], of hidden [N, hidden]."""
        if hidden.is_cuda and hidden.dtype != torch.float32:
            logits = torch.mm(hidden, self._rows.t(), out_dtype=torch.float32)
        else:
            logits = torch.mm(hidden, self._rows.t()).float()
        return logits + self._bias
