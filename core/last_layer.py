"""The last layer for the tokens that are sampled from, and no others.

Of a prompt's other tokens nothing reads what the last layer makes but its cache, which holds keys and values alone. So
a step with prompts in it runs all layers but one for all its tokens (``SampledLastLayer.trunk``), and the last as if
every row decoded one token (``SampledLastLayer.tail``). It saves a prompt all but 1 of its tokens in 1 of its layers:
3.6% of V2-Lite's arithmetic (27 layers), 1.6% of V3's (61).
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from glowplug.core.batch import Batch, Ends
from glowplug.core.offers import Mode

if TYPE_CHECKING:
    from torch import Tensor

STEP = 16  #: rows are filled up to a power of two below it, and to its multiples: what graphs decode, kernels know

Numbers = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class HostEnds:
    """What ``Ends`` says, on the host. ``tokens``, ``positions``, ``slots`` [E], ``pages`` [E, P]; the rows behind the
    first ``count`` are token 0 at position 0 of the scratch page."""

    count: int
    tokens: Numbers
    positions: Numbers
    slots: Numbers
    pages: Numbers

    @classmethod
    def of(cls, wanted: Numbers, token_row: Numbers, positions: Numbers, slots: Numbers, pages: Numbers) -> HostEnds:
        """Of the tokens ``wanted`` [N] of a flattened step: rows, positions and slots [T] of its tokens, pages [B, P]
        of its rows."""
        count, rows = len(wanted), filled(len(wanted))
        parts = [_fill(part, rows) for part in (wanted, positions[wanted], slots[wanted])]
        return cls(count, parts[0], parts[1], parts[2], _fill(pages[token_row[wanted]], rows))

    def parts(self) -> list[Numbers]:
        """For one copy to the device; ``on_device`` takes them back from there."""
        rows = len(self.tokens)
        return [self.tokens, self.positions, self.slots, self.positions + 1, np.arange(rows + 1, dtype=np.int32),
                self.pages.ravel()]

    def on_device(self, step: int, views: tuple[Tensor, ...]) -> Ends:
        rows, none = len(self.tokens), np.zeros(0, np.int32)
        batch = Batch(
            step=step, mode=Mode.DECODE, rows=np.zeros(rows, np.int32), epochs=np.zeros(rows, np.int64),
            num_decodes=rows, query_lens=np.ones(rows, np.int32), kv_lens=self.positions + 1,
            samples=np.ones(rows, np.bool_), prompt_ids=none, pages=self.pages)
        batch.positions, batch.slots = views[1].long(), views[2].long()
        batch.kv_lens_device, batch.query_starts = views[3], views[4]
        batch.page_table = views[5].view(self.pages.shape)
        return Ends(self.count, views[0].long(), batch)


def filled(count: int) -> int:
    """Rows that ``count`` of them are computed as."""
    return 1 << (count - 1).bit_length() if 0 < count <= STEP else -(-count // STEP) * STEP


def _fill(part: Numbers, rows: int) -> Numbers:
    found = np.zeros((rows, *part.shape[1:]), np.int32)
    found[: len(part)] = part
    return found
