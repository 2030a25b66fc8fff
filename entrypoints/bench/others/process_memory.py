"""Device memory of this process and those it started, as the driver counts it for each process.

What the driver counts holds the context, graphs and libraries too, and leaves out others on the
card.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

QUERY = ("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")


class ProcessMemory:
    """Reads it. ``missing``: why there is none to read, in words; "" while there is."""

    def __init__(self, command: tuple[str, ...] = QUERY) -> None:
        self._command = command
        self.missing = ""

    def bytes(self) -> int | None:
        """None when the driver does not tell, from then on: figures of two kinds must not be
        compared.
        """
        if self.missing:
            return None
        try:
            return self._read()
        except (OSError, subprocess.SubprocessError, LookupError) as error:
            self.missing = str(error)
        return None

    def _read(self) -> int:
        """LookupError, OSError or SubprocessError where it cannot be read."""
        if shutil.which(self._command[0]) is None:
            raise LookupError(f"there is no {self._command[0]}")
        done = subprocess.run(self._command, capture_output=True, text=True, timeout=20, check=True)
        mine = family(os.getpid())
        found = [used for pid, used in rows(done.stdout) if pid in mine]
        if not found:
            raise LookupError(
                "the driver lists none of this process's ids, as in a container with ids of its own"
            )
        known = [used for used in found if used is not None]
        if len(known) < len(found):
            raise LookupError("the driver does not say how much a process uses")
        return sum(known)


def rows(text: str) -> list[tuple[int, int | None]]:
    """(process id, bytes) of each line "id, MiB"; None where the driver says "[N/A]"."""
    found = []
    for line in text.splitlines():
        pid, _, used = (part.strip() for part in line.partition(","))
        if pid.isdigit():
            found.append((int(pid), int(used) << 20 if used.isdigit() else None))
    return found


def family(pid: int) -> set[int]:
    """``pid`` and every process below it; ``pid`` alone where /proc is missing."""
    children: dict[int, list[int]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            children[int(stat.read_text().rpartition(")")[2].split()[1])].append(
                int(stat.parent.name)
            )
        except (OSError, ValueError, IndexError):
            continue  # it has ended
    found = set()
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += children[one]
    return found
