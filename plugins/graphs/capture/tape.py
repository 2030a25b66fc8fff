"""Capture of a forward pass as CUDA graphs, in the memory pool shared by all other graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from glowplug.plugins.graphs.capture.recorder import CudaRecorder, alias, make_room, map_tensors

T = TypeVar("T")


class CudaTape:
    """The ``prefill_graph.Tape`` over CUDA graphs.

    The graphs must be replayed on the same stream as all other graphs of the pool.
    """

    def __init__(self, recorder: CudaRecorder) -> None:
        self._new_graph = recorder.new_graph
        self._stream = recorder.stream
        self._pool = recorder.pool
        # graphs of the pass being captured; None between captures
        self._graphs: list[torch.cuda.CUDAGraph] | None = None

    def record(self, work: Callable[[], T]) -> tuple[list[Callable[[], None]], T]:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
            make_room()
            graphs, results = self._capture(work)
        current.wait_stream(self._stream)
        return [graph.replay for graph in graphs], results

    def _capture(self, work: Callable[[], T]) -> tuple[list[torch.cuda.CUDAGraph], T]:
        graphs: list[torch.cuda.CUDAGraph] = []
        self._graphs = graphs
        try:
            self._begin(graphs)
            results = work()
            graphs[-1].capture_end()
        except BaseException:
            try:
                graphs[-1].capture_end()
            except RuntimeError:
                pass  # the capture is already invalid; the exception above is its cause
            raise
        finally:
            self._graphs = None
        return graphs, map_tensors(alias, results)

    def _begin(self, graphs: list[torch.cuda.CUDAGraph]) -> None:
        graphs.append(self._new_graph())
        # NOTE: "thread_local", because other threads (a server's, NCCL's) may use the device
        # during the capture
        graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def split(self, rows: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if self._graphs is None:
            return None
        self._graphs[-1].capture_end()
        kept = tuple(alias(part) for part in rows)
        self._begin(self._graphs)
        return kept
