"""How many bytes this rank really holds, so that the plan's budget can be compared with the truth."""
from __future__ import annotations

from pathlib import Path

import torch


def held_bytes(device: str) -> int:
    """Bytes in use: the CUDA allocator's count, or the resident set on the CPU (0 where /proc is missing)."""
    if device.startswith("cuda"):
        return int(torch.cuda.memory_allocated(device))
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * 4096


class MemoryMeter:
    """Bytes gained between marks, by budget line."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._last = held_bytes(device)
        self.lines: dict[str, int] = {}

    def mark(self, line: str) -> None:
        """What was gained since the last mark belongs to ``line``."""
        now = held_bytes(self._device)
        self.lines[line] = max(0, now - self._last)
        self._last = now
