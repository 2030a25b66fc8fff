"""The last layer for the tokens that are sampled from, and no others.

Of a prompt's other tokens nothing reads what the last layer makes but its cache, which holds keys
and values alone. So a step with prompts in it runs all layers but one for all its tokens
(``SampledLastLayer.trunk``), and the last as if every row decoded one token
(``SampledLastLayer.tail``). It saves a prompt all but 1 of its tokens in 1 of its layers:
3.6% of V2-Lite's arithmetic (27 layers), 1.6% of V3's (61).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from glowplug.core.plugin.offers import Mode
from glowplug.core.step.batch import Batch, Ends

if TYPE_CHECKING:
    from torch import Tensor

#: rows are filled up to a power of two below it, and to its multiples: what graphs decode, kernels
#: know
STEP = 16

Numbers = NDArray[np.int32]
Wide = NDArray[np.int64]
T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True, eq=False)
class HostEnds:
    """What ``Ends`` says, on the host. ``tokens``, ``positions``, ``slots`` [E], ``pages`` [E, P];
    the rows behind the first ``count`` are token 0 at position 0 of the scratch page."""

    count: int
    tokens: Wide
    positions: Wide
    slots: Wide
    pages: Numbers

    @classmethod
    def of(
        cls, wanted: Wide, token_row: Numbers, positions: Numbers, slots: Numbers, pages: Numbers
    ) -> HostEnds:
        """Of the tokens ``wanted`` [N] of a flattened step: rows, positions and slots [T] of its
        tokens, pages [B, P] of its rows."""
        count = len(wanted)
        rows = filled(len(wanted))
        parts = [
            _fill(part.astype(np.int64), rows)
            for part in (wanted, positions[wanted], slots[wanted])
        ]
        return cls(count, parts[0], parts[1], parts[2], _fill(pages[token_row[wanted]], rows))

    def parts(self) -> list[NDArray[Any]]:
        """For one copy to the device; ``on_device`` takes them back from there."""
        rows = len(self.tokens)
        return [
            self.tokens,
            self.positions,
            self.slots,
            self._lengths,
            np.arange(rows + 1, dtype=np.int32),
            self.pages.ravel(),
        ]

    @property
    def _lengths(self) -> Numbers:
        return (self.positions + 1).astype(np.int32)

    def on_device(self, step: int, views: tuple[Tensor, ...]) -> Ends:
        rows = len(self.tokens)
        none = np.zeros(0, np.int32)
        batch = Batch(
            step=step,
            mode=Mode.DECODE,
            rows=np.zeros(rows, np.int32),
            epochs=np.zeros(rows, np.int64),
            num_decodes=rows,
            query_lens=np.ones(rows, np.int32),
            kv_lens=self._lengths,
            samples=np.ones(rows, np.bool_),
            prompt_ids=none,
            pages=self.pages,
        )
        batch.positions, batch.slots, batch.kv_lens_device, batch.query_starts = views[1:5]
        batch.page_table = views[5].view(self.pages.shape)
        return Ends(self.count, views[0], batch)


def filled(count: int) -> int:
    """Rows that ``count`` of them are computed as."""
    return 1 << (count - 1).bit_length() if 0 < count <= STEP else -(-count // STEP) * STEP


def _fill(part: NDArray[T], rows: int) -> NDArray[T]:
    found = np.zeros((rows, *part.shape[1:]), part.dtype)
    found[: len(part)] = part
    return found
