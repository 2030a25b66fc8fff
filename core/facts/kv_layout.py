"""The shape of the KV cache, stated by the attention backend. Imports without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
    """One tensor a layer keeps: ``shape`` of one token's entry, for example (512,) latent or
    (heads, 128) keys.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def token_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class KVLayout:
    """Entries kept for each token in each of ``layers`` layers, in pages of ``page_size`` tokens."""

    layers: int
    page_size: int
    entries: tuple[KVEntry, ...]

    @property
    def token_bytes(self) -> int:
        """Bytes one token costs over all layers."""
        return self.layers * sum(entry.token_bytes for entry in self.entries)

    @property
    def page_bytes(self) -> int:
        return self.token_bytes * self.page_size
