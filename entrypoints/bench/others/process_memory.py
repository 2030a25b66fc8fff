"""Device memory of this process and its descendants, as the driver counts it per process.

The driver's count includes the CUDA context, graphs and libraries, and excludes other users of the
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
    """Reader of the device memory of this process and its descendants, as the driver counts it.

    Attributes:
        missing: reason why the count is not available; "" while it is available.
    """

    def __init__(self, command: tuple[str, ...] = QUERY) -> None:
        self._command = command
        self.missing = ""

    def bytes(self) -> int | None:
        """Return the device bytes in use, or None if the driver does not report them.

        After the first failure the result stays None, so that figures of two kinds are never
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
        """Return the driver's count of device bytes in use by this process and its descendants.

        Raises:
            LookupError: the command is missing or does not report this process.
            OSError: the command could not be started.
            SubprocessError: the command failed.
        """
        if shutil.which(self._command[0]) is None:
            raise LookupError(f"{self._command[0]} is not installed")
        done = subprocess.run(self._command, capture_output=True, text=True, timeout=20, check=True)
        mine = family(os.getpid())
        found = [used for pid, used in rows(done.stdout) if pid in mine]
        if not found:
            raise LookupError(
                "the driver lists none of this process's ids, as in a container with its own PIDs"
            )
        known = [used for used in found if used is not None]
        if len(known) < len(found):
            raise LookupError("the driver does not report the memory of each process")
        return sum(known)


def rows(text: str) -> list[tuple[int, int | None]]:
    """Return (process id, bytes) of each line "id, MiB"; bytes are None for the value "[N/A]"."""
    found = []
    for line in text.splitlines():
        pid, _, used = (part.strip() for part in line.partition(","))
        if pid.isdigit():
            found.append((int(pid), int(used) << 20 if used.isdigit() else None))
    return found


def family(pid: int) -> set[int]:
    """Return the ids of process ``pid`` and its descendants; ``pid`` alone if /proc is missing."""
    children: dict[int, list[int]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            children[int(stat.read_text().rpartition(")")[2].split()[1])].append(
                int(stat.parent.name)
            )
        except (OSError, ValueError, IndexError):
            continue  # the process has ended
    found = set()
    waiting = [pid]
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            waiting += children[current]
    return found
