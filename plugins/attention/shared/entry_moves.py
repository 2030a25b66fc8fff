"""Moves of cache entries, ``AttentionBackend.move_entries``, in Triton, numpy or torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  #: by bytes


class EntryMoves(Protocol):
    """The moves of entries in one KV pool."""

    def reserve(self, kv: Sequence[Mapping[str, Tensor]]) -> None:
        """Bind the KV pool ``kv``, which is ``Limits.kv``."""
        ...

    def run(self, sources: Tensor, targets: Tensor, layers: range) -> None:
        """Move entries as ``AttentionBackend.move_entries`` does."""
        ...


def entry_moves(device: torch.device) -> EntryMoves:
    """Return moves by a Triton kernel on a GPU, otherwise in numpy."""
    return TritonEntryMoves() if device.type == "cuda" else TorchEntryMoves()


class TritonEntryMoves:
    """Moves of all layers in one launch.

    NOTE: its table of 24 bytes per cache tensor is too small to count in
    ``AttentionOffers.reserves``.
    """

    def reserve(self, kv: Sequence[Mapping[str, Tensor]]) -> None:
        from glowplug.kernels.paged import move_entries

        self._table = move_entries.EntryTable(kv)
        self._move = move_entries.move_entries

    def run(self, sources: Tensor, targets: Tensor, layers: range) -> None:
        self._move(self._table, sources.contiguous(), targets.contiguous(), layers)


class TorchEntryMoves:
    """Moves in numpy on the CPU and in torch on a GPU, layer by layer.

    All entries of a layer are read before any is written. The result is that of moves in ascending
    order, because a later source is not an earlier target.
    """

    def __init__(self) -> None:
        self._device: list[list[Tensor]] = []
        self._host: list[list[NDArray[Any]]] = []

    def reserve(self, kv: Sequence[Mapping[str, Tensor]]) -> None:
        self._device = [[x.view(INTEGERS[x.itemsize]) for x in layer.values()] for layer in kv]
        self._host = [[x.numpy() for x in layer if x.is_cpu] for layer in self._device]

    def run(self, sources: Tensor, targets: Tensor, layers: range) -> None:
        if sources.is_cpu:
            self._run_on_host(sources.numpy(), targets.numpy(), layers)
            return
        # entries that stay are read and written, too: the host does not know which these are
        for layer in layers:
            for pool in self._device[layer]:
                pool.index_copy_(0, targets.flatten(), pool.index_select(0, sources.flatten()))

    def _run_on_host(
        self, sources: NDArray[np.int64], targets: NDArray[np.int64], layers: range
    ) -> None:
        moved = sources != targets
        if not moved.any():
            return
        read, written = sources[moved], targets[moved]
        for layer in layers:
            for pool in self._host[layer]:
                pool[written] = pool[read]
