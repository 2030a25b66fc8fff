"""Tokens gained without drafts, kept until a draft model writes their cache entries together."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glowplug.core.plugin.byte_costs import PENDING_TOKENS
from glowplug.core.step.batch import Batch
from glowplug.kernels.speculation import pending_entries_reference
from glowplug.kernels.speculation.pending_entries_reference import Pending


class PendingTokens:
    """The newest tokens of the rows in recent steps without drafts.

    Writing an entry reads the draft's input projection, 0.2 GB in DeepSeek-V3: as long as no token
    is drafted, the entries of many steps are written at once. They must be written before drafts
    attend to them, and before any of the rows' pages changes its owner, that is, before a step of
    other rows.

    Args:
        hidden: Size of a hidden state.
        dtype: Dtype of hidden states.
        device: Device of the tokens.
    """

    def __init__(self, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        self._kept = Pending(
            torch.zeros(3, PENDING_TOKENS, dtype=torch.int64, device=device),
            torch.zeros(PENDING_TOKENS, hidden, dtype=dtype, device=device),
        )
        self._all = torch.arange(PENDING_TOKENS, device=device)
        self._rows: NDArray[np.int32] | None = None  # rows whose tokens are kept
        self._steps = 0  # steps of these rows

    def fit(self, rows: int) -> bool:
        """Return whether tokens of more than one step of ``rows`` rows can be kept."""
        return 2 * rows <= PENDING_TOKENS

    def due(self, batch: Batch, keeps: bool) -> bool:
        """Return whether the kept entries must be written before the step ``batch``.

        ``keeps``: the step's newest tokens are to be kept as well.
        """
        if self._rows is None:
            return False
        full = self._steps == PENDING_TOKENS // len(self._rows)
        return full or not keeps or not np.array_equal(self._rows, batch.rows)

    def keep(
        self, rows: Tensor, last: Tensor, states: Tensor, positions: Tensor, kv_slots: Tensor
    ) -> None:
        """Keep the newest tokens of a step; device work only.

        Arguments as in ``pending_entries_reference.keep_newest``.
        """
        keep = pending_entries_reference.keep_newest
        if rows.is_cuda:
            from glowplug.kernels.speculation.pending_entries import keep_newest as keep
        keep(self._kept, rows, last, states, positions, kv_slots)

    def count(self, batch: Batch) -> None:
        """Count a step whose newest tokens are kept."""
        if self._rows is None:
            self._rows = batch.rows.copy()
        self._steps += 1

    def entries(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the arguments of ``DraftExtend.call`` for the kept tokens.

        Places that hold no token of these steps have KV slot 0, which is in the scratch page.
        """
        assert self._rows is not None, "no token is kept"
        count = PENDING_TOKENS // len(self._rows) * len(self._rows)
        tokens, positions, kv_slots = self._kept.tokens[:, :count]
        return tokens, positions, kv_slots, self._kept.hidden[:count], self._all[:count]

    def clear(self) -> None:
        """Forget the kept tokens, whose entries have been written."""
        self._kept.tokens[2].zero_()
        self._rows = None
        self._steps = 0
