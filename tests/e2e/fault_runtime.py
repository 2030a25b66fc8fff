"""The runtime of the faulty components in a rank."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from glowplug.plugins.sampling.torch_sampler import TorchSamplerOptions
from glowplug.plugins.sampling.torch_sampler_runtime import TorchSampler
from glowplug.plugins.weights.random import RandomOptions
from glowplug.plugins.weights.random_runtime import RandomSource
from tests.plugins.replaying_runtime import Replaying


class Countdown:
    """Triggers the fault of ``options`` at the call with its number in its rank, and first writes
    down time and place.
    """

    def __init__(self, options: Any, rank: int) -> None:
        self._options, self._mine, self._calls = options, options.rank == rank, 0

    def __call__(self) -> None:
        self._calls += 1
        if self._mine and self._calls == self._options.at and self._options.fault != "none":
            self._note()
            self._act(self._options.fault)

    def _note(self) -> None:
        sockets = psutil.Process().net_connections(kind="tcp")
        ports = [socket.laddr.port for socket in sockets if socket.status == psutil.CONN_LISTEN]
        shared = sorted(
            set(re.findall(r"/dev/shm/(\S+)$", Path("/proc/self/maps").read_text(), re.MULTILINE))
        )
        Path(self._options.note).write_text(
            json.dumps(
                {"time": time.monotonic(), "pid": os.getpid(), "ports": ports, "shared": shared}
            )
        )

    def _act(self, fault: str) -> None:
        if fault == "error":
            raise RuntimeError("injected")
        if fault == "memory":
            raise torch.OutOfMemoryError("injected: out of memory")
        if fault == "hang":
            time.sleep(3600)
        os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)


class FaultySource(RandomSource):
    def __init__(self, options: Any, plan: Any, worker: Any) -> None:
        super().__init__(RandomOptions(seed=options.seed), plan, worker)
        self._countdown = Countdown(options, worker.rank)
        self._pause = options.pause if options.rank == worker.rank else 0.0

    def read(self, target: Any) -> Any:
        self._countdown()
        time.sleep(self._pause)
        return super().read(target)


class FaultySampler(TorchSampler):
    def __init__(self, options: Any, plan: Any, worker: Any) -> None:
        super().__init__(TorchSamplerOptions(), plan, worker)
        self._countdown = Countdown(options, worker.rank)
        self._method = options.method

    def reserve(self, limits: Any) -> None:
        self._count("reserve")
        super().reserve(limits)

    def sample(self, *given: Any, **more: Any) -> Any:
        self._count("sample")
        return super().sample(*given, **more)

    def _count(self, method: str) -> None:
        if method == self._method:
            self._countdown()


class FaultyGraphs(Replaying):
    """A fault in a replayed piece occurs while the other ranks wait in the piece's exchanges."""

    def __init__(self, options: Any, plan: Any, worker: Any) -> None:
        super().__init__(options, plan, worker)
        countdown = Countdown(options, worker.rank)
        record = self.functions.record

        def counted(work: Callable[[], Any]) -> Any:
            if options.pieces == "captured":
                countdown()
            replay, results = record(work)

            def run() -> None:
                if options.pieces == "replayed":
                    countdown()
                replay()

            return run, results

        self.functions.record = counted  # type: ignore[method-assign]
