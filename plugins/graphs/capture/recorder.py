"""Pieces of a step as CUDA graphs, all over one memory pool."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
MOST_CACHED = (
    1 << 30
)  #: bytes that the allocator may keep of a piece's first run while the piece is captured


_unused: dict[torch.device, list[torch.cuda.Stream]] = {}  #: streams whose recorders are gone


def stream_for(owner: object, device: torch.device) -> torch.cuda.Stream:
    """One to capture on that nobody else has while ``owner`` lives.

    NOTE: not a new one each time. cuBLAS keeps 32 MiB for each stream that has multiplied until the
    process ends, so that every engine that has gone would leave them behind; and graphs hold their
    address, so that no two recorders may have the same stream at a time.
    """
    unused = _unused.setdefault(device, [])
    stream = unused.pop() if unused else torch.cuda.Stream(device)
    weakref.finalize(owner, unused.append, stream)
    return stream


class CudaRecorder:
    """See ``slot.Recorder``. Graphs of one recorder must be replayed one after another, on one
    stream.

    Attributes:
        stream, pool: that it captures on, and where the graphs' tensors lie.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = stream_for(self, device)
        self.pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            # NOTE: on the stream of the capture, since cuBLAS keeps a workspace for each stream,
            # and graphs its address
            work()
            make_room()
            graph, results = self._capture(work)
        current.wait_stream(self.stream)
        graph.replay()
        return graph.replay, results

    def _capture(self, work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        graph = torch.cuda.CUDAGraph()
        # NOTE: "thread_local", because other threads (a server's, NCCL's) may use the device
        # meanwhile
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        try:
            results = work()
        except BaseException:
            try:
                graph.capture_end()
            except RuntimeError:
                pass  # the capture is already invalid, and the reason why is on its way up
            raise
        graph.capture_end()
        return graph, results

    def loosen(self, results: T) -> T:
        return map_tensors(alias, results)  # type: ignore[no-any-return]


def make_room() -> None:
    """Between a piece's first run, which may have left memory behind that the graphs' pool cannot
    take, and its capture."""
    if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > MOST_CACHED:
        torch.cuda.empty_cache()


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """``value`` with every tensor in it changed; tensors, tuples, lists and dataclasses of them."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        parts = [map_tensors(change, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [map_tensors(change, part) for part in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            f.name: map_tensors(change, getattr(value, f.name)) for f in dataclasses.fields(value)
        }
        return dataclasses.replace(value, **fields)
    return value


class _Memory:
    """A tensor's storage as the CUDA array interface describes it."""

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.__cuda_array_interface__ = {
            "shape": (storage.nbytes(),),
            "typestr": "|u1",
            "data": (storage.data_ptr(), False),
            "version": 3,
        }


def alias(tensor: Tensor) -> Tensor:
    """The same memory without keeping it allocated."""
    if tensor.numel() == 0:
        return tensor
    memory: Tensor = torch.as_tensor(_Memory(tensor), device=tensor.device)
    size = tensor.dtype.itemsize
    whole = memory[: len(memory) // size * size].view(tensor.dtype)
    return whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
