"""Time of kernels, measured in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def microseconds(calls: Sequence[Callable[[], object]], repeats: int = 3) -> float:
    """Return the mean time of one of ``calls`` in microseconds, measured in a CUDA graph.

    The graph runs all calls once. The time is that of the fastest of ``repeats`` replays.
    """
    torch.cuda.synchronize()  # kernels may read an alignment before they wait for earlier kernels
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times: list[float] = []
    for _ in range(repeats):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return min(times)
