"""Measurement of the memory that a rank really holds, to be compared with the plan's budget."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch


class Gauge(Protocol):
    """A reader of memory counts, in bytes.

    Held memory is that of live tensors; claimed memory is what the allocator has taken from the
    device.
    """

    #: True: the gauge measures peaks and the device's free memory
    measures: bool

    def held(self) -> int:
        """Return the bytes of live tensors."""
        ...

    def most(self) -> int:
        """Return the peak of ``held`` since ``restart``."""
        ...

    def claimed(self) -> int:
        """Return the bytes that the allocator has taken from the device."""
        ...

    def most_claimed(self) -> int:
        """Return the peak of ``claimed`` since ``restart``."""
        ...

    def restart(self) -> None:
        """Start the measurement of peaks anew."""
        ...

    def settle(self) -> None:
        """Wait for the device and release claimed memory that is not held."""
        ...

    def device(self) -> tuple[int, int]:
        """Return (free, total) bytes of the device; other processes' memory is not free."""
        ...


class CudaGauge:
    """The counts of CUDA and of torch's caching allocator."""

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
    """The resident set size of this process; 0 where /proc is missing.

    Untouched pages do not count, and peaks are not known.
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
    """Return the gauge for a torch device string."""
    return CudaGauge(device) if device.startswith("cuda") else HostGauge()


def memory_now(gauge: Gauge) -> dict[str, int]:
    """Return this process's memory in bytes, as the ``memory`` control message reports it.

    Returns:
        ``host``: the resident set; on the device ``device_held``: live tensors, ``device_claimed``:
            the allocator's memory, and ``device_used``: all memory in use, other processes'
            included.
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
    """Measured bytes by budget line.

    Attributes:
        lines: bytes measured before the port opens.
        again: second measurements of some lines, taken once the KV pool has its full size.
    """

    def __init__(self, gauge: Gauge) -> None:
        self.gauge = gauge
        self._last = gauge.held()
        self.lines: dict[str, int] = {}
        self.again: dict[str, int] = {}

    def mark(self, line: str) -> None:
        """Add the held bytes gained since the last mark to ``line``."""
        now = self.gauge.held()
        self.lines[line] = max(0, self.lines.get(line, 0) + now - self._last)
        self._last = now

    def move(self, line: str, other: str, size: int) -> None:
        """Move ``size`` bytes from ``line`` to ``other``."""
        self.lines[line] = self.lines.get(line, 0) - size
        self.lines[other] = self.lines.get(other, 0) + size

    @contextmanager
    def peak(self, line: str) -> Iterator[None]:
        """Measure the peak of held bytes in the context, beyond those held before, as ``line``."""
        before = self.gauge.held()
        self.gauge.restart()
        yield
        self.gauge.settle()
        into = self.again if line in self.lines else self.lines
        into[line] = max(0, self.gauge.most() - before)
        self._last = self.gauge.held()

    @contextmanager
    def taking(self, line: str) -> Iterator[None]:
        """Measure the fall of the device's free memory within the context, as ``line``.

        The memory counts whichever library or process took it.
        """
        self.gauge.settle()
        before, _ = self.gauge.device()
        yield
        self.gauge.settle()
        into = self.again if line in self.lines else self.lines
        into[line] = max(0, before - self.gauge.device()[0])
        self._last = self.gauge.held()

    @property
    def outside(self) -> int:
        """Bytes of the device outside torch's allocator.

        These are the CUDA context, kernels, libraries' own memory, and other processes.
        """
        free, total = self.gauge.device()
        return max(0, total - free - self.gauge.claimed())
