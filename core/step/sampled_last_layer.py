"""The last layer run for the sampled tokens only.

The last layer's output is needed only for tokens whose logits are sampled. Of all other tokens of a
prompt only keys and values are cached. So a step with prompts runs all layers but the last for all
its tokens (``SampledLastLayer.trunk``), and the last layer as if every row decoded one token
(``SampledLastLayer.tail``). The last layer thus computes 1 token of a prompt instead of all, which
saves 3.6% of V2-Lite's arithmetic (27 layers) and 1.6% of V3's (61).
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

#: row counts are padded to a power of two up to this number and to its multiples above, because
#: kernels are compiled for the row counts of captured graphs already
ROW_MULTIPLE = 16

Numbers = NDArray[np.int32]
Wide = NDArray[np.int64]
T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True, eq=False)
class HostEnds:
    """The contents of ``Ends`` on the host.

    The padding rows behind the first ``count`` are token 0 at position 0 of the scratch page.

    Attributes:
        count: number of sampled tokens.
        tokens: int64 [E], indices among the step's tokens.
        positions: int64 [E].
        kv_slots: int64 [E], KV slots.
        pages: int32 [E, P], page numbers.
    """

    count: int
    tokens: Wide
    positions: Wide
    kv_slots: Wide
    pages: Numbers

    @classmethod
    def of(
        cls, wanted: Wide, token_row: Numbers, positions: Numbers, kv_slots: Numbers, pages: Numbers
    ) -> HostEnds:
        """Return the ``HostEnds`` of the tokens ``wanted`` of a flattened step.

        Args:
            wanted: int64 [N], indices of tokens.
            token_row: int32 [T], row of each token.
            positions: int32 [T].
            kv_slots: int32 [T], KV slots.
            pages: int32 [B, P], page numbers of each row.
        """
        count = len(wanted)
        rows = filled(len(wanted))
        parts = [
            _fill(part.astype(np.int64), rows)
            for part in (wanted, positions[wanted], kv_slots[wanted])
        ]
        return cls(count, parts[0], parts[1], parts[2], _fill(pages[token_row[wanted]], rows))

    def parts(self) -> list[NDArray[Any]]:
        """Return the arrays to send to the device in one copy; ``on_device`` takes their copies."""
        rows = len(self.tokens)
        return [
            self.tokens,
            self.positions,
            self.kv_slots,
            self._lengths,
            np.arange(rows + 1, dtype=np.int32),
            self.pages.ravel(),
        ]

    @property
    def _lengths(self) -> Numbers:
        return (self.positions + 1).astype(np.int32)

    def on_device(self, step: int, views: tuple[Tensor, ...]) -> Ends:
        """Return the ``Ends`` made of the device tensors ``views``, which are copies of ``parts``.

        ``step``: number of the step.
        """
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
        batch.positions, batch.kv_slots, batch.kv_lens_device, batch.query_starts = views[1:5]
        batch.page_table = views[5].view(self.pages.shape)
        return Ends(self.count, views[0], batch)


def filled(count: int) -> int:
    """Return E, the number of rows for ``count`` sampled tokens, padding rows included."""
    if 0 < count <= ROW_MULTIPLE:
        return 1 << (count - 1).bit_length()
    return -(-count // ROW_MULTIPLE) * ROW_MULTIPLE


def _fill(part: NDArray[T], rows: int) -> NDArray[T]:
    found = np.zeros((rows, *part.shape[1:]), part.dtype)
    found[: len(part)] = part
    return found
