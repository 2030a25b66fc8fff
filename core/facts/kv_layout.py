"""The layout of the KV cache, which the attention backend declares. Plan zone: no torch."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

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
        name: name of the tensor, unique within a layer.
        shape: shape of one token's entry, for example (512,) for a latent or (heads, 128) for keys.
        dtype: dtype of its elements, a key of ``DTYPE_BYTES``.
        layers: numbers of the layers that have it, in the KV pool; None: all.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    layers: tuple[int, ...] | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's entry in one layer."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def in_layer(self, layer: int) -> bool:
        """Return whether the layer of this number has the entry."""
        return self.layers is None or layer in self.layers

    def __str__(self) -> str:
        where = "" if self.layers is None else f" in layers {list(self.layers)}"
        return f"{self.name} {list(self.shape)} {self.dtype}{where}"


@dataclass(frozen=True)
class KVLayout:
    """The tensors that layers cache for each token.

    Attributes:
        layers: number of layers in the KV pool: the model's, then those of a draft
            (``Sizes.draft_layers``).
        page_size: tokens per page.
        entries: the tensors; each belongs to all layers or to those that it names.
    """

    layers: int
    page_size: int
    entries: tuple[KVEntry, ...]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in the cache over all layers."""
        return sum(
            entry.token_bytes * (self.layers if entry.layers is None else len(entry.layers))
            for entry in self.entries
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of cache over all layers."""
        return self.token_bytes * self.page_size

    def of_layer(self, layer: int) -> tuple[KVEntry, ...]:
        """Return the entries of the layer of this number."""
        return tuple(entry for entry in self.entries if entry.in_layer(layer))

    def __str__(self) -> str:
        entries = ", ".join(map(str, self.entries))
        return (
            f"{self.layers} layers with pages of {self.page_size} tokens of {entries}: "
            f"{self.token_bytes} bytes per token"
        )


def entry_faults(layout: KVLayout) -> list[str]:
    """Return the reasons why no KV pool can be made of a layout's entries, one clause each."""
    faults = [fault for entry in layout.entries for fault in _faults(entry, layout.layers)]
    for layer in range(layout.layers):
        names = [entry.name for entry in layout.of_layer(layer)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            return [*faults, f"layer {layer} has two entries {twice[0]!r}"]
    return faults if layout.entries else ["there are none"]


def _faults(entry: KVEntry, layers: int) -> Iterator[str]:
    """Yield the faults of one entry of a pool with this number of layers."""
    if entry.dtype not in DTYPE_BYTES:
        close = difflib.get_close_matches(entry.dtype.replace("fp", "float"), DTYPE_BYTES, 1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        yield f"{entry.name} has the unknown dtype {entry.dtype!r}{hint}"
    if min(entry.shape, default=1) < 1:
        yield f"{entry.name} has the shape {list(entry.shape)}"
    outside = [one for one in entry.layers or () if not 0 <= one < layers]
    if outside:
        yield f"{entry.name} is of layer {outside[0]} of {layers}"


@dataclass(frozen=True)
class KVContext:
    """The data from which a backend's KV entries follow.

    Attributes:
        model: the model's facts.
        dtype: dtype of the KV cache, ``attention.kv_dtype``.
        heads: key heads of a rank.
        layers: number of layers in the KV pool: the model's, then those of a draft.
        options: the backend's own parsed options.
    """

    model: ModelFacts
    dtype: str
    heads: int
    layers: int
    options: Any = None


#: function from a ``KVContext`` to the tensors that layers cache for each token
KVEntries = Callable[[KVContext], tuple[KVEntry, ...]]


def latent_entries(context: KVContext) -> tuple[KVEntry, ...]:
    """Return the cache entries of latent attention: one, ``kv``, which all heads share.

    The entry holds the latent and the rotated key.
    """
    model = context.model
    return (KVEntry("kv", (model.kv_lora_rank + model.qk_rope_head_dim,), context.dtype),)


def head_entries(context: KVContext) -> tuple[KVEntry, ...]:
    """Return the cache entries of per-head attention: ``k`` and ``v``.

    Each is [key heads of a rank, elements of a head].
    """
    shape = (context.heads, context.model.head_dim)
    return (KVEntry("k", shape, context.dtype), KVEntry("v", shape, context.dtype))


#: attention kind -> entries of backends that declare none
USUAL_ENTRIES: dict[str, KVEntries] = {"mla": latent_entries, "mha": head_entries}


def local_heads(heads: int, ranks: int) -> int:
    """Return the number of key heads that a rank holds.

    With fewer heads than ranks, the number is 1, and several ranks hold the same head.
    """
    return max(1, -(-heads // ranks))
