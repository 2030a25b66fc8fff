"""Timing of a call that all ranks make together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from glowplug.core.protocols import Collectives

CALLS_PER_GRAPH = 16  #: calls captured in one graph
ROUNDS = 5  #: measured rounds of calls
WARM_CALLS = 3  #: calls before a capture
HOST_SECONDS = 0.03  #: time of one round on the CPU
HOST_CALLS = 3, 200  #: fewest and most calls of a round on the CPU
TICK = 1e-12  #: seconds of the unit in which ranks exchange times


class RankTimer:
    """Timing of calls on every rank of a group at once.

    Args:
        collectives: collectives through which the ranks wait for each other, and exchange times.
        device: device of this rank.
        captured: True: calls are replayed from CUDA graphs.
    """

    def __init__(self, collectives: Collectives, device: str, captured: bool) -> None:
        self._collectives = collectives
        self._device = device
        self._captured = captured

    def slowest(self, value: float) -> float:
        """Return the largest ``value`` of any rank, after every rank has called this method."""
        tick = int(min(value, 1e6) / TICK)
        return float(self._collectives.all_gather_numbers(np.array([tick])).max()) * TICK

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the seconds of one call: the median of rounds of calls on the slowest rank."""
        with torch.inference_mode():
            if self._device == "cpu":
                return self._on_host(call)
            return self._on_device(call)

    def _on_host(self, call: Callable[[], object]) -> float:
        """Return the seconds of a call that computes on the host.

        All ranks make the same number of calls, which follows from the slowest rank's first call.
        """
        call()
        fewest, most = HOST_CALLS
        first = self.slowest(self._rounds(call, 1))
        count = min(max(fewest, int(HOST_SECONDS / max(first, 1e-9))), most)
        found = [self.slowest(self._rounds(call, count)) for _ in range(ROUNDS)]
        return statistics.median(found)

    def _rounds(self, call: Callable[[], object], count: int) -> float:
        """Return the mean seconds of ``count`` calls, after all ranks have come here."""
        self.slowest(0.0)
        started = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - started) / count

    def _on_device(self, call: Callable[[], object]) -> float:
        """Return the seconds of a call on a CUDA device.

        A first round, which is not timed, lets the devices begin the timed one together.
        """
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(WARM_CALLS):
                call()
            side.synchronize()
            play = self._graph(call, side) if self._captured else several(call)
            found = []
            for _ in range(ROUNDS):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self.slowest(0.0)
                play()
                start.record()
                play()
                end.record()
                side.synchronize()
                found.append(self.slowest(start.elapsed_time(end) / 1e3))
        return statistics.median(found) / CALLS_PER_GRAPH

    def _graph(self, call: Callable[[], object], side: torch.cuda.Stream) -> Callable[[], object]:
        """Capture several calls and return the function that replays them."""
        graph = torch.cuda.CUDAGraph()
        self.slowest(0.0)  # all ranks capture the same calls in the same order
        # NOTE: NCCL's watchdog queries events in a thread of its own, which a capture of all
        # threads forbids
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            several(call)()
        return graph.replay


def several(call: Callable[[], object]) -> Callable[[], object]:
    """Return a function that makes CALLS_PER_GRAPH calls."""

    def calls() -> None:
        for _ in range(CALLS_PER_GRAPH):
            call()

    return calls
