"""The KV pool: one tensor per layer and entry of the attention backend's layout."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from glowplug.core.facts.kv_layout import KVLayout

#: torch dtype by the name in layouts and plans
TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "uint8": torch.uint8,
}


class KVPool:
    """The cache tensors ``[num_pages * page_size, *entry.shape]``.

    Page 0 is the scratch page: padding rows write there.

    NOTE: the tensors are filled with zeros, because an uninitialised cache can contain NaN, and
    0 * NaN in a masked product is still NaN.

    Attributes:
        layout: the layout of the entries.
        num_pages: number of pages, the scratch page included.
        layers: tensor by name of the entry, for each layer.
    """

    def __init__(self, layout: KVLayout, num_pages: int, device: str) -> None:
        self.layout = layout
        self.num_pages = num_pages
        tokens = num_pages * layout.page_size
        self.layers: tuple[Mapping[str, torch.Tensor], ...] = tuple(
            {
                entry.name: _zeros((tokens, *entry.shape), TORCH_DTYPES[entry.dtype], device)
                for entry in layout.of_layer(layer)
            }
            for layer in range(layout.layers)
        )

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for layer in self.layers for t in layer.values())


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # NOTE: np.zeros gets untouched pages of the operating system: a large pool costs time and
    # memory only for the pages in use.
    return (
        torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8))
        .view(dtype)
        .view(shape)
    )
