"""Exchange of tokens with the ranks of their experts, through the memory of peers' GPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from glowplug.core.protocols import Quantized
from glowplug.kernels.collectives.buffer_sizes import WORD_BYTES, token_words
from glowplug.kernels.collectives.expert_combine import combine
from glowplug.kernels.collectives.expert_dispatch import dispatch
from glowplug.kernels.collectives.push import PeerBuffers
from glowplug.kernels.formats.fp8_block import FP8_INPUT
from glowplug.plugins.collectives.peer_sizes import BufferSize


def expert_buffer_size(hidden: int, topk: int, rows: int, element: int) -> BufferSize:
    """Return the size of the buffers of one direction of the exchange; a tile is a token.

    Args:
        hidden: hidden size.
        topk: most experts of a token.
        rows: most tokens of a rank in a dtype of two bytes. The plan counts their memory, so wider
            tokens are fewer.
        element: bytes of an element of the activations.
    """
    planned = rows * token_words(hidden * WORD_BYTES, topk)
    tile = token_words(hidden * element, topk)
    return BufferSize(planned // tile * tile, tile)


class PeerExpertRows:
    """The ``ExpertRows`` of a group of GPUs with access to each other's memory.

    Args:
        there: buffers of ``dispatch``; a tile is a token.
        back: buffers of ``combine``, of the same size.
    """

    formats = frozenset({FP8_INPUT})

    def __init__(self, there: PeerBuffers, back: PeerBuffers) -> None:
        self._there = there
        self._back = back
        self.rows = there.capacity // there.tile

    def dispatch(
        self, x: Tensor | Quantized, ids: Tensor, weights: Tensor, rows: int, held: int, within: int
    ) -> tuple[Tensor | Quantized, Tensor, Tensor]:
        values, scales = (x, None) if isinstance(x, Tensor) else x
        found = dispatch(
            values, ids, weights, rows, held, self._there, scales=scales, within=within
        )
        sent = found.x if scales is None else Quantized(found.x, found.scales)
        return sent, found.ids, found.weights

    def combine(
        self,
        y: Tensor,
        local: Tensor,
        ids: Tensor,
        held: int,
        within: int,
        beside: Tensor | None = None,
        exact: bool = False,
    ) -> Tensor:
        dtype = torch.float32 if exact else y.dtype
        return combine(y, local, ids, held, self._back, within=within, beside=beside, dtype=dtype)
