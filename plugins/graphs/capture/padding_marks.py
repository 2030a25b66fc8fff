"""Marks of the padding in a captured step of several groups of ranks.

All groups replay a graph of the same size, so the rows after the live rows of each group are
padding. Layers replace the expert ids of marked tokens by -1, so that no expert computes them.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glowplug.core.step.batch import Batch, Padding
from glowplug.plugins.graphs.capture.staging import Staging


def mark_bytes(rows: int, width: int, groups: int) -> int:
    """Return the bytes of the marks of a graph; see ``PaddingMarks``."""
    return (1 + groups) * rows * (width + 1)


class PaddingMarks:
    """The padding marks of one graph, in device memory at a fixed address.

    Args:
        rows: rows of the padded batch in each group.
        width: tokens of a row in the step.
        groups: number of groups.
        device: torch device.
        staging: host buffers of at least ``mark_bytes`` bytes.

    Attributes:
        step: marks of the step's tokens.
        drafts: marks of the tokens of a draft's pass, one for each row.
    """

    def __init__(
        self, rows: int, width: int, groups: int, device: torch.device, staging: Staging
    ) -> None:
        self._staging = staging
        self._groups = groups
        self._numbers = np.arange(rows)
        self._lengths = [rows * width, rows * width * groups, rows, rows * groups]
        size = mark_bytes(rows, width, groups)
        self._memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self._live: tuple[int, ...] = ()  # live rows of this group, then of each group
        own, gathered, draft_own, draft_gathered = (
            part.view(torch.bool)[:, None] for part in self._parts(self._memory)
        )
        self.step = Padding(own, gathered)
        self.drafts = Padding(draft_own, draft_gathered)

    def _parts(self, memory: Tensor) -> tuple[Tensor, ...]:
        """Split ``memory`` into marks of the step and of the drafts.

        Both come as the marks of this group, then those of all groups.
        """
        return torch.split(memory, self._lengths)

    def fill(self, batch: Batch) -> None:
        """Mark the rows after those of ``batch`` and, for every group, after the group's rows.

        If the groups have not agreed on a step (in a self-test), each has as many rows as
        ``batch``. Marks that have not changed since the last call are not copied again.
        """
        own = batch.num_rows
        agreed = batch.agreed.group_decodes if batch.agreed is not None else ()
        live = (own, *(agreed or (own,) * self._groups))
        if live == self._live:
            return
        self._live = live
        behind: NDArray[np.bool_] = self._numbers >= np.array(live)[:, None]
        number = self._staging.take()
        staged = self._staging.buffers[number][: len(self._memory)]
        for part, marks in zip(self._parts(staged), (behind[:1], behind[1:]) * 2):
            places = part.numpy().reshape(*marks.shape, -1)
            places[:] = marks[:, :, None]
        self._staging.copy(number, staged, self._memory)
