"""The time of one call on its device, with nothing of it left in the cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

FLUSHED = 96 << 20  #: bytes written between calls: more than the second-level cache holds
IN_A_GRAPH = 10
REPLAYS = 7
#: on the CPU a call is repeated for so long and at least so often
HOST_SECONDS = 0.05
HOST_RUNS = 5


def seconds(call: Callable[[], Any], device: str) -> tuple[float, bool]:
    """(median seconds of a call, was it captured in a graph).

    On a GPU ten calls are replayed from a graph, each behind a write that flushes the cache, and
    the same graph without
    the calls is taken off: launch costs of the host do not count. What cannot be captured is timed
    between events.
    """
    if not device.startswith("cuda"):
        return _host(call), False
    with torch.inference_mode():
        try:
            return _replayed(call), True
        except (
            RuntimeError
        ):  # it waits for the device, or allocates in a way that a capture forbids
            torch.cuda.synchronize()
            return _between_events(call), False


def _host(call: Callable[[], Any]) -> float:
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
    flush = torch.empty(FLUSHED, dtype=torch.int8, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    with_calls = _graph(lambda: (flush.zero_(), call()), side)
    without = _graph(flush.zero_, side)
    return max(0.0, _replay(with_calls) - _replay(without)) / IN_A_GRAPH


def _graph(body: Callable[[], Any], stream: Any) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(IN_A_GRAPH):
            body()
    return graph


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    """Median seconds of a replay."""
    graph.replay()
    return statistics.median(_timed(graph.replay) for _ in range(REPLAYS))


def _between_events(call: Callable[[], Any]) -> float:
    flush = torch.empty(FLUSHED, dtype=torch.int8, device="cuda")
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
