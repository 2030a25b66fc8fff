"""A draft's head over the frequent tokens, given by a file or counted while serving."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from glowplug.core.errors import GlowplugError
from glowplug.core.layers.embedding import LmHead
from glowplug.core.layers.subset_head import SubsetHead
from glowplug.core.protocols import Collectives
from glowplug.core.step.batch import Accepted, Batch
from glowplug.plugins.speculative.draft_vocabulary import read_ids

#: steps between two choices of the counted tokens; a choice reads and writes the chosen rows of the
#: head once, no more bytes than a few draft passes read
REFRESH_STEPS = 256


def check_head(draft: Any) -> None:
    """Check that the head of a draft model can be reduced to frequent tokens.

    Raises:
        GlowplugError: the model has no head that is core's.
    """
    if not isinstance(getattr(draft, "head", None), LmHead):
        raise GlowplugError(
            f"speculative.draft_vocabulary needs a draft with a head of core's; "
            f"{type(draft).__name__} has none. Leave the option out"
        )


class FrequentTokens:
    """The tokens that drafts choose from, and their head.

    Args:
        head: The whole head, after its weights are loaded.
        choice: Number of tokens that are counted while serving, or a file of ids.
        collectives: Rank 0 reads the file for all ranks.
        leads: True on rank 0.
        spare: Row of the sequence table that only padding uses; its tokens are not counted.
    """

    def __init__(
        self, head: LmHead, choice: int | str, collectives: Collectives, leads: bool, spare: int
    ) -> None:
        self._vocab = head.shard.full
        self._parts = head.shard.parts
        self._part_size = -(-self._vocab // self._parts)
        self._spare = spare
        self._steps = 0
        self._counts: Tensor | None = None
        device = head.linear.dense().device
        if isinstance(choice, int):
            places = self._parts * self._part_size
            self._counts = torch.zeros(places, dtype=torch.int64, device=device)
            self.head = SubsetHead(head, -(-choice // self._parts))
            self._choose()
        else:
            own = json.dumps(read_ids(choice)).encode() if leads else None
            ids = self._by_part(json.loads(collectives.broadcast_bytes(own)))
            self.head = SubsetHead(head, len(ids[0]))
            self.head.choose(torch.tensor(ids, device=device))

    def _by_part(self, ids: list[int]) -> list[list[int]]:
        """Return the ids in each rank's slice, padded with -1 to the same number."""
        slices: list[list[int]] = [[] for _ in range(self._parts)]
        for id in sorted(ids):
            slices[id // self._part_size].append(id)
        quota = max(len(part) for part in slices)
        return [part + [-1] * (quota - len(part)) for part in slices]

    def count(self, batch: Batch, accepted: Accepted) -> None:
        """Count the tokens of a step's prompts, and those that its rows gained, on the device."""
        if self._counts is None:
            return
        tokens = accepted.tokens
        places = torch.arange(tokens.shape[1], device=tokens.device)
        gained = (places < accepted.counts[:, None]) & (batch.row_ids != self._spare)[:, None]
        self._counts.index_add_(0, tokens.reshape(-1), gained.view(-1).long())
        if batch.num_decodes < batch.num_rows:
            prompts = batch.input_ids[batch.decode_tokens :]
            self._counts.index_add_(0, prompts, torch.ones_like(prompts))

    def step(self) -> None:
        """Choose the tokens anew in every ``REFRESH_STEPS``-th call; outside captured pieces."""
        if self._counts is None:
            return
        self._steps += 1
        if self._steps % REFRESH_STEPS == 0:
            self._choose()

    def _choose(self) -> None:
        """Choose the most frequent tokens of each rank's slice; of equal counts the lower ids.

        Tokenizers number tokens roughly by their frequency in the tokenizer's training text.
        """
        assert self._counts is not None
        ids = torch.arange(len(self._counts), device=self._counts.device)
        order = self._counts * len(ids) + (len(ids) - 1 - ids)
        order = order.masked_fill(ids >= self._vocab, -1).view(self._parts, -1)
        best = order.topk(self.head.quota, 1)
        first = torch.arange(0, len(ids), self._part_size, device=ids.device)
        chosen = best.indices + first[:, None]
        self.head.choose(chosen.masked_fill(best.values < 0, -1))
