"""The runtime of the speculative algorithm "lines"."""

from __future__ import annotations

import torch
from torch import Tensor

from glowplug.core.api import DraftShape, EnginePlan
from glowplug.core.protocols import Worker
from glowplug.core.speculation.token_drafts import TokenDrafts
from glowplug_lines.plugin import LinesOptions


class Lines(TokenDrafts):
    """Drafts that copy the line above, from the present column on.

    Behind the end of that line, and in a text of one line, the last token is repeated.
    """

    def __init__(self, options: LinesOptions, plan: EnginePlan, worker: Worker) -> None:
        super().__init__(plan, worker)
        self._newline = options.newline

    def propose(self, tokens: Tensor, rows: Tensor, lengths: Tensor, shape: DraftShape) -> Tensor:
        text = tokens.index_select(0, rows)
        places = torch.arange(text.shape[1], device=text.device)
        ends = (text == self._newline) & (places < lengths[:, None])
        end = torch.where(ends, places, -1).amax(1)
        start = torch.where(ends & (places < end[:, None]), places, -1).amax(1) + 1
        column = lengths - 1 - end
        source = (start + column)[:, None] + torch.arange(shape.steps, device=text.device)
        newest = lengths[:, None] - 1
        source = torch.where(source <= end[:, None], source, newest)
        return text.gather(1, source).long()
