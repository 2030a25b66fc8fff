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
        self._recorder = recorder
        # graphs of the pass being captured; None between captures
        self._graphs: list[torch.cuda.CUDAGraph] | None = None

    def record(self, work: Callable[[], T]) -> tuple[list[Callable[[], None]], T]:
        current = torch.cuda.current_stream()
        stream = self._recorder.stream
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            work()
            make_room()
            graphs, results = self._capture(work)
        current.wait_stream(stream)
        return [graph.replay for graph in graphs], results

    def _capture(self, work: Callable[[], T]) -> tuple[list[torch.cuda.CUDAGraph], T]:
        graphs = [self._recorder.begin()]
        self._graphs = graphs
        try:
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

    def split(self, rows: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if self._graphs is None:
            return None
        self._graphs[-1].capture_end()
        kept = tuple(alias(part) for part in rows)
        self._graphs.append(self._recorder.begin())
        return kept
