"""Capture of the pieces of a step as CUDA graphs, all in one memory pool."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
#: most bytes of a piece's first run that the allocator may keep cached while the piece is captured
CACHED_BYTES_MAX = 1 << 30


#: streams whose recorders no longer exist, to be reused
_unused: dict[torch.device, list[torch.cuda.Stream]] = {}


def stream_for(owner: object, device: torch.device) -> torch.cuda.Stream:
    """Return a stream for captures that no other owner gets during the lifetime of ``owner``.

    NOTE: streams are reused instead of created each time. cuBLAS keeps a workspace of 32 MiB for
    each stream that has run a GEMM until the process ends, so every closed engine would leak one.
    Graphs hold the address of the workspace, so no two recorders may use the same stream at the
    same time.
    """
    unused = _unused.setdefault(device, [])
    stream = unused.pop() if unused else torch.cuda.Stream(device)
    weakref.finalize(owner, unused.append, stream)
    return stream


class CudaRecorder:
    """The ``decode_graph.GraphRecorder`` over CUDA graphs.

    Graphs of one recorder must be replayed one after another, on one stream.

    Attributes:
        stream: Stream of the captures.
        pool: Memory pool of the graphs' tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = stream_for(self, device)
        self.pool = torch.cuda.graph_pool_handle()
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def begin(self) -> torch.cuda.CUDAGraph:
        """Begin to capture a graph, which ``reset`` will free, and return it."""
        graph = torch.cuda.CUDAGraph()
        # NOTE: "thread_local", because other threads (a server's, NCCL's) may use the device
        # during the capture
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        self._graphs.add(graph)
        return graph

    def reset(self) -> None:
        """Free all graphs, also those that objects in reference cycles still hold.

        None may be replayed afterwards. NCCL closes a communicator only when every graph with one
        of its operations has been freed, and waits without a limit.
        """
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()

    def record(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            # NOTE: on the stream of the capture, because cuBLAS keeps one workspace per stream and
            # graphs hold its address
            work()
            make_room()
            graph, results = self._capture(work)
        current.wait_stream(self.stream)
        graph.replay()
        return graph.replay, results

    def _capture(self, work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        graph = self.begin()
        try:
            results = work()
        except BaseException:
            try:
                graph.capture_end()
            except RuntimeError:
                pass  # the capture is already invalid; the exception above is its cause
            raise
        graph.capture_end()
        return graph, results

    def loosen(self, results: T) -> T:
        return map_tensors(alias, results)  # type: ignore[no-any-return]


def make_room() -> None:
    """Release the allocator's cached memory before a capture, if too much is cached.

    A piece's first run, before its capture, may have left cached blocks that the graphs' pool
    cannot use.
    """
    if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > CACHED_BYTES_MAX:
        torch.cuda.empty_cache()


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return ``value`` with ``change`` applied to every tensor.

    ``value`` is a tensor, or tuples, lists and dataclasses of them; other values are returned as
    is.
    """
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
    """Return a tensor over the memory of ``tensor`` that does not keep this memory allocated."""
    if tensor.numel() == 0:
        return tensor
    memory: Tensor = torch.as_tensor(_Memory(tensor), device=tensor.device)
    size = tensor.dtype.itemsize
    whole = memory[: len(memory) // size * size].view(tensor.dtype)
    return whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
