"""Hidden states at the ends of pages, for rows that start after a cached prefix."""

from __future__ import annotations

import torch
from torch import Tensor

from glowplug.core.step.batch import Accepted, Batch
from glowplug.core.step.to_device import kv_slots_at
from glowplug.plugins.speculative.shared.drafting import gained_positions, gained_sources


class PageEnds:
    """The target's hidden state of the last token of each page.

    A row that starts after a cached prefix continues the state of the prefix's last page.

    Args:
        pages: Number of pages of the KV pool; page 0 is the scratch page.
        hidden: Size of a hidden state.
        page_size: Tokens per page.
        dtype: Dtype in which the states are kept.
        device: Device on which the states are kept.
    """

    def __init__(
        self, pages: int, hidden: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.states = torch.zeros(pages, hidden, dtype=dtype, device=device)
        self._page_size = page_size

    def keep(self, batch: Batch, accepted: Accepted, hidden: Tensor) -> None:
        """Store the states of the tokens that end a page.

        All other states are written to the scratch page's entry, and those of rejected branches of
        a tree as well. The states of rejected drafts of a chain are overwritten before use.

        Args:
            batch: The target's step.
            accepted: The tokens sampled in the step.
            hidden: The target's hidden states, [T, hidden].
        """
        pages = self._ended(batch.positions, batch.kv_slots)
        if accepted.path is not None:
            count = accepted.path.numel()
            pages = torch.cat([self._gained(batch, accepted).view(-1), pages[count:]])
            hidden = torch.cat([hidden[gained_sources(batch, accepted).view(-1)], hidden[count:]])
        self.states.index_copy_(0, pages, hidden.to(self.states.dtype))

    def keep_on_host(self, batch: Batch, hidden: Tensor) -> None:
        """Do the work of :meth:`keep` for chains whose tensors the host can read."""
        size = self._page_size
        positions: list[int] = batch.positions.tolist()
        places = [at for at, position in enumerate(positions) if (position + 1) % size == 0]
        if places:
            pages = [int(batch.kv_slots[place]) // size for place in places]
            self.states[pages] = hidden[places].to(self.states.dtype)

    def _gained(self, batch: Batch, accepted: Accepted) -> Tensor:
        """Return the pages that the gained tokens of trees end, int64 [D, W]; 0 for all others."""
        decodes = batch.num_decodes
        positions = gained_positions(batch, accepted)
        slots = kv_slots_at(batch.page_table[:decodes], positions, self._page_size)
        places = torch.arange(positions.shape[1], device=positions.device)
        gained = places < accepted.counts[:decodes, None]
        return self._ended(positions, slots).masked_fill(~gained, 0)

    def _ended(self, positions: Tensor, kv_slots: Tensor) -> Tensor:
        """Return the pages of ``kv_slots`` that ``positions`` end, int64; 0 for all others."""
        pages = kv_slots.div(self._page_size, rounding_mode="floor")
        return pages.masked_fill(positions % self._page_size != self._page_size - 1, 0)
