"""The layout of the KV cache, which the attention backend declares. Plan zone: no torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from glowplug.core.facts.model_facts import ModelFacts

#: bytes of an element by dtype name
DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


@dataclass(frozen=True)
class KVEntry:
    """One tensor of a layer's KV cache.

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
        """Bytes of one token in the cache over all layers."""
        return self.layers * sum(entry.token_bytes for entry in self.entries)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of cache over all layers."""
        return self.token_bytes * self.page_size


#: function from (facts, dtype of the KV cache, key heads of a rank) to the tensors that a layer
#: caches for each token
KVEntries = Callable[[ModelFacts, str, int], tuple[KVEntry, ...]]


def latent_entries(model: ModelFacts, dtype: str, heads: int) -> tuple[KVEntry, ...]:
    """Return the cache entries of latent attention: one, ``kv``, which all heads share.

    The entry holds the latent and the rotated key.
    """
    return (KVEntry("kv", (model.kv_lora_rank + model.qk_rope_head_dim,), dtype),)


def head_entries(model: ModelFacts, dtype: str, heads: int) -> tuple[KVEntry, ...]:
    """Return the cache entries of per-head attention: ``k`` and ``v``.

    Each is [key heads of a rank, elements of a head].
    """
    shape = (heads, model.head_dim)
    return (KVEntry("k", shape, dtype), KVEntry("v", shape, dtype))


#: attention kind -> entries of backends that declare none
USUAL_ENTRIES: dict[str, KVEntries] = {"mla": latent_entries, "mha": head_entries}


def local_heads(heads: int, ranks: int) -> int:
    """Return the number of key heads that a rank holds.

    With fewer heads than ranks, the number is 1, and several ranks hold the same head.
    """
    return max(1, -(-heads // ranks))
