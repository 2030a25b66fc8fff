"""KV pages by their bytes, and a tier that keeps them in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence as Seq
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glowplug.core.errors import GlowplugError
from glowplug.core.step.pages import Transfer


def as_pages(tensors: Mapping[str, Tensor], num_pages: int) -> dict[str, Tensor]:
    """Return views of ``tensors`` as pages: uint8 [num_pages, bytes of a page].

    Args:
        tensors: contiguous tensors [num_pages * n, ...].
        num_pages: number of pages.
    """
    return {
        name: tensor.reshape(num_pages, -1).view(torch.uint8) for name, tensor in tensors.items()
    }


class HostTier:
    """The ``protocols.PageTier`` that keeps pages in host memory, pinned if the pool is on a GPU.

    Copies run on the current stream, so they are in order with the steps, and the host waits for
    none of them. Neighbouring pages in neighbouring slots are copied together.

    Args:
        pages: the pool by pages, as ``TieredCache.open_tier`` receives it.
        slots: number of pages that the tier holds.

    Raises:
        GlowplugError: the memory cannot be pinned.
    """

    def __init__(self, pages: Mapping[str, Tensor], slots: int) -> None:
        self._pages = dict(pages)
        self._pinned: list[Tensor] = []
        self._slots = {
            # NOTE: the operating system allocates memory of np.zeros when it is first used, or when
            # it is pinned; torch's own pinned memory is rounded up to a power of two
            name: torch.from_numpy(np.zeros((slots, tensor.shape[1]), np.uint8))
            for name, tensor in self._pages.items()
        }
        for name, tensor in self._pages.items():
            if tensor.is_cuda:
                self._pin(self._slots[name])

    def copy(self, transfers: Seq[Transfer]) -> None:
        """Copy pages one transfer after another; see ``protocols.PageTier``."""
        for transfer in transfers:
            for page, slot, count in runs(transfer.pages, transfer.slots):
                for name, pool in self._pages.items():
                    in_pool = pool[page : page + count]
                    in_tier = self._slots[name][slot : slot + count]
                    if transfer.back:
                        in_pool.copy_(in_tier, non_blocking=True)
                    else:
                        in_tier.copy_(in_pool, non_blocking=True)

    def close(self) -> None:
        """Wait for the copies and free the memory. Idempotent."""
        if self._pinned:
            torch.cuda.synchronize()
        for tensor in self._pinned:
            _runtime().cudaHostUnregister(tensor.data_ptr())
        self._pinned = []
        self._slots = {}
        self._pages = {}

    def _pin(self, tensor: Tensor) -> None:
        """Pin a tensor's memory, so that the device copies it while the host goes on."""
        failed = int(_runtime().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
        if failed:
            self.close()
            raise GlowplugError(
                f"{tensor.nbytes} bytes of host memory for a tier of the KV cache cannot be pinned "
                f"(CUDA error {failed}). Fix: a smaller tier, or a higher limit of locked memory "
                "(ulimit -l, docker run --ulimit memlock=-1)"
            )
        self._pinned.append(tensor)


def _runtime() -> Any:
    """Return the functions of CUDA's runtime that torch exposes."""
    return torch.cuda.cudart()


def runs(pages: NDArray[np.int32], slots: NDArray[np.int32]) -> Iterator[tuple[int, int, int]]:
    """Yield (first page, first slot, number) of neighbouring pages in neighbouring slots."""
    if not len(pages):
        return
    ends = np.flatnonzero((np.diff(pages) != 1) | (np.diff(slots) != 1)) + 1
    starts = np.concatenate([[0], ends])
    counts = np.diff(np.concatenate([starts, [len(pages)]]))
    yield from zip(pages[starts].tolist(), slots[starts].tolist(), counts.tolist())
