"""How many bytes this rank really holds, so that the plan's budget can be compared with the truth."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch


class Gauge(Protocol):
    """Reads memory, in bytes. ``held``: what live tensors take; ``claimed``: what the allocator has
    from the device.
    """

    measures: bool  #: peaks are known, and what is left of the device

    def held(self) -> int: ...

    def most(self) -> int:
        """Most held since ``restart``."""
        ...

    def claimed(self) -> int: ...

    def most_claimed(self) -> int:
        """Most claimed since ``restart``."""
        ...

    def restart(self) -> None: ...

    def settle(self) -> None:
        """Wait for the device and give back what is claimed and not held."""
        ...

    def device(self) -> tuple[int, int]:
        """(free, total) of the device, whoever holds the rest."""
        ...


class CudaGauge:
    """CUDA's and torch's own counts."""

    measures = True

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def held(self) -> int:
        return int(torch.cuda.memory_allocated(self._device))

    def most(self) -> int:
        return int(torch.cuda.max_memory_allocated(self._device))

    def claimed(self) -> int:
        return int(torch.cuda.memory_reserved(self._device))

    def most_claimed(self) -> int:
        return int(torch.cuda.max_memory_reserved(self._device))

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def device(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self._device)
        return int(free), int(total)


class HostGauge:
    """The resident set; 0 where /proc is missing. Untouched pages do not count, and there are no
    peaks.
    """

    measures = False

    def held(self) -> int:
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            return 0
        return pages * 4096

    most = claimed = most_claimed = held

    def restart(self) -> None:
        pass

    settle = restart

    def device(self) -> tuple[int, int]:
        return 0, 0


def gauge_of(device: str) -> Gauge:
    return CudaGauge(device) if device.startswith("cuda") else HostGauge()


def memory_now(gauge: Gauge) -> dict[str, int]:
    """Bytes: this process's resident set; on its device what tensors take, the allocator has, and
    everybody uses.
    """
    free, total = gauge.device()
    device = (gauge.held(), gauge.claimed()) if gauge.measures else (0, 0)
    return {
        "host": HostGauge().held(),
        "device_held": device[0],
        "device_claimed": device[1],
        "device_used": total - free,
    }


class MemoryMeter:
    """Bytes by budget line. ``lines``: as measured before the port opens; ``again``: the same a
    second time, of lines that are measured under the conditions of service too."""

    def __init__(self, gauge: Gauge) -> None:
        self.gauge = gauge
        self._last = gauge.held()
        self.lines: dict[str, int] = {}
        self.again: dict[str, int] = {}

    def mark(self, line: str) -> None:
        """What was gained since the last mark belongs to ``line``."""
        now = self.gauge.held()
        self.lines[line] = max(0, self.lines.get(line, 0) + now - self._last)
        self._last = now

    def move(self, line: str, other: str, size: int) -> None:
        """``size`` bytes that were counted as ``line``'s are ``other``'s."""
        self.lines[line] = self.lines.get(line, 0) - size
        self.lines[other] = self.lines.get(other, 0) + size

    @contextmanager
    def peak(self, line: str) -> Iterator[None]:
        """The most that was held meanwhile, beyond what was held before, is ``line``'s."""
        before = self.gauge.held()
        self.gauge.restart()
        yield
        self.gauge.settle()
        into = self.again if line in self.lines else self.lines
        into[line] = max(0, self.gauge.most() - before)
        self._last = self.gauge.held()

    @contextmanager
    def taking(self, line: str) -> Iterator[None]:
        """What the device has less of afterwards, whoever took it, is ``line``'s."""
        self.gauge.settle()
        before, _ = self.gauge.device()
        yield
        self.gauge.settle()
        into = self.again if line in self.lines else self.lines
        into[line] = max(0, before - self.gauge.device()[0])
        self._last = self.gauge.held()

    @property
    def outside(self) -> int:
        """Bytes of the device that torch's allocator does not hold: the CUDA context, kernels,
        libraries' own memory, and other processes."""
        free, total = self.gauge.device()
        return max(0, total - free - self.gauge.claimed())
