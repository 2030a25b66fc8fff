"""The layout of the KV cache, which the attention backend declares. Plan zone: no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

#: bytes of an element by dtype name
DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}


@dataclass(frozen=True)
class KVEntry:
    """One tensor that a layer caches.

    Attributes:
        name: name of the tensor.
        shape: shape of one token's entry, for example (512,) for a latent or (heads, 128) for keys.
        dtype: torch's name of the dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's entry."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class KVLayout:
    """The tensors that every layer caches for each token.

    Attributes:
        layers: number of layers with a cache.
        page_size: tokens per page.
        entries: the tensors of one layer.
    """

    layers: int
    page_size: int
    entries: tuple[KVEntry, ...]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers."""
        return self.layers * sum(entry.token_bytes for entry in self.entries)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return self.token_bytes * self.page_size
