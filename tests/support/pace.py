"""The current speed of plain Python on this machine, so that bounds in seconds hold on machines
that share their cores.

A bound is written for the machine of ``IDLE_SECONDS``; on a slower one, and beside other processes,
it grows by :func:`slowness` and by nothing else. The module imports only the standard library,
because tests also run it in other processes.
"""

from __future__ import annotations

import json
import resource
import subprocess
import time
from collections.abc import Mapping, Sequence

#: of one :func:`yardstick` where the bounds were written: a core of a shared server, Python 3.11
IDLE_SECONDS = 0.09


class _Item:
    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size


def yardstick() -> float:
    """Return the processor seconds of a fixed piece of work: small objects, dicts, attribute reads,
    sorting, JSON.
    """
    start = time.process_time()
    for number in range(300):
        items = [_Item(f"{number}.{i}", i * 7919 % 101) for i in range(200)]
        found = {
            item.name: item.size for item in items if isinstance(item, _Item) and item.size > 3
        }
        order = sorted(found, key=lambda name: (found[name], name))
        json.loads(json.dumps({name: found[name] for name in order}))
    return time.process_time() - start


def child(
    command: Sequence[str], environment: Mapping[str, str]
) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run a command to its end, and return its output and its processor seconds, waiting not
    included.

    No other child of this process may end meanwhile.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=dict(environment)
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def slowness(yardsticks: Sequence[float]) -> float:
    """Return the factor of a bound, at least 1. ``yardsticks`` are taken around and between the
    timed work.
    """
    return max(1.0, sum(yardsticks) / len(yardsticks) / IDLE_SECONDS)
