"""The runtime of the speculative algorithm "prompt_copy"."""

from __future__ import annotations

import torch
from torch import Tensor

from glowplug.core.api import DraftShape, EnginePlan
from glowplug.core.protocols import Worker
from glowplug.core.speculation.token_drafts import TokenDrafts
from glowplug_ngram.plugin import PromptCopyOptions


class PromptCopy(TokenDrafts):
    """Drafts that continue as the row did after an earlier occurrence of its last tokens.

    The occurrence with the most tokens counts, and of several the latest. A row without one has no
    draft, and a row that ends soon after it has fewer.
    """

    ragged = True

    def __init__(self, options: PromptCopyOptions, plan: EnginePlan, worker: Worker) -> None:
        super().__init__(plan, worker)
        self._longest, self._shortest = options.longest, options.shortest

    def propose(self, tokens: Tensor, rows: Tensor, lengths: Tensor, shape: DraftShape) -> Tensor:
        text = tokens.index_select(0, rows)
        newest = lengths[:, None] - 1
        places = torch.arange(text.shape[1], device=text.device)
        matched = torch.zeros_like(text, dtype=torch.int64)
        equal = (places < newest).expand(text.shape)
        for back in range(self._longest):
            wanted = text.gather(1, (newest - back).clamp(min=0))
            # places - back is the place that is compared; roll wraps, hence the bound
            equal = equal & (text.roll(back, 1) == wanted) & (places >= back)
            matched += equal
        score = torch.where(matched >= self._shortest, matched * text.shape[1] + places, -1)
        best, found = score.max(1, keepdim=True)
        source = found + 1 + torch.arange(shape.steps, device=text.device)
        drafts = text.gather(1, source.minimum(newest)).long()
        return drafts.masked_fill((best < 0) | (source > newest), -1)
