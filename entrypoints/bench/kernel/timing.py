"""Timing of one call on its device, with a cold L2 cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

FLUSH_BYTES = 96 << 20  #: bytes written between calls to flush the L2 cache: more than it holds
CALLS_PER_GRAPH = 10  #: calls captured in one graph
REPLAYS = 7  #: measured replays of a graph
HOST_SECONDS = 0.05  #: least time for which a call is repeated on the CPU
HOST_RUNS = 5  #: fewest repetitions of a call on the CPU


def seconds(call: Callable[[], Any], device: str) -> tuple[float, bool]:
    """Measure the time of one call.

    On a GPU, ten calls are replayed from a CUDA graph, each after a write that flushes the cache;
    the time of the same graph without the calls is subtracted. Launch costs of the host therefore
    do not count. A call that cannot be captured is timed between CUDA events.

    Returns:
        (median seconds of a call, True if it was captured in a graph).
    """
    if not device.startswith("cuda"):
        return _host(call), False
    with torch.inference_mode():
        try:
            return _replayed(call), True
        # The call synchronises, or allocates in a way that capture forbids.
        except RuntimeError:
            torch.cuda.synchronize()
            return _between_events(call), False


def _host(call: Callable[[], Any]) -> float:
    """Return the median seconds of a call that computes on the host."""
    spent: list[float] = []
    with torch.inference_mode():
        call()
        end = time.perf_counter() + HOST_SECONDS
        while len(spent) < HOST_RUNS or time.perf_counter() < end:
            started = time.perf_counter()
            call()
            spent.append(time.perf_counter() - started)
    return statistics.median(spent)


def _replayed(call: Callable[[], Any]) -> float:
    """Return the seconds of a call in a CUDA graph; the flushes between calls do not count."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    with_calls = _graph(lambda: (flush.zero_(), call()), side)
    without = _graph(flush.zero_, side)
    return max(0.0, _replay(with_calls) - _replay(without)) / CALLS_PER_GRAPH


def _graph(body: Callable[[], Any], stream: Any) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS_PER_GRAPH):
            body()
    return graph


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    """Return the median seconds of one replay of ``graph``."""
    graph.replay()
    return statistics.median(_timed(graph.replay) for _ in range(REPLAYS))


def _between_events(call: Callable[[], Any]) -> float:
    """Return the median seconds of a call between two CUDA events."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    call()
    found = []
    for _ in range(REPLAYS):
        flush.zero_()
        found.append(_timed(call))
    return statistics.median(found)


def _timed(call: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
