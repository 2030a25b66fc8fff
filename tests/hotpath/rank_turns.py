"""Host time that several ranks of one host add to a step: rank 0's broadcast of the turn, and the
agreement of groups on the step.

``python -m tests.hotpath.rank_turns --output docs/benchmarks/rank-turns.json`` measures both over
shared memory and over sockets:

- "calls": the time in the two calls on rank 0 and on another rank when the other ranks' data are
  there already, in one process. Nothing waits, so the number of cores does not matter.
- "turns": among processes, the time of both calls on rank 0 from the start of a turn to its end,
  and the processor time of a turn on rank 0. Includes waiting for ranks that have no core.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from torch.distributed import FileStore, HashStore

from glowplug.core.step.messages import Turn, encode_turn
from glowplug.plugins.collectives import local_links
from glowplug.plugins.collectives.local_links import LocalLinks
from glowplug.plugins.collectives.shared_words import write

RANKS = (2, 4, 8)
WAYS = ("shared memory", "sockets")
CALLS = 2000
TURNS = 1000
FIRST_TURNS = 50  #: turns that are not measured
TURN = encode_turn(Turn(1.0, [], False))  #: the broadcast of a turn without new requests
VALUES = np.array([1, 64, 64, 64], np.int64)  #: a rank's part of the agreement


def links_of(way: str, rank: int, ranks: int, store: Any) -> LocalLinks:
    local_links.can_share = lambda ranks: way == "shared memory"
    return LocalLinks(rank, ranks, store, 60.0)


def timed(work: Callable[[], Any]) -> float:
    """Return the microseconds that ``work`` takes."""
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e6


def calls(way: str, ranks: int) -> dict[str, float]:
    """Return the microseconds of each call with all data there, by name."""
    store = HashStore()
    with ThreadPoolExecutor(ranks) as pool:
        links = list(pool.map(lambda rank: links_of(way, rank, ranks, store), range(ranks)))
    found: dict[str, list[float]] = {"broadcast, rank 0": [], "broadcast, rank 1": []}
    agreements = found["agreement, rank 0"] = []
    for _ in range(CALLS):
        found["broadcast, rank 0"].append(timed(partial(links[0].broadcast, TURN)))
        found["broadcast, rank 1"].append(timed(partial(links[1].broadcast, None)))
        for other in links[2:]:
            other.broadcast(None)
        for other in links[1:]:
            give(other)
        agreements.append(timed(partial(links[0].gather_numbers, VALUES)))
        if way == "sockets":
            for other in links[1:]:
                other._receive(0, "all_gather_numbers")
    for one in links:
        one.close()
    return {name: round(median(values), 1) for name, values in found.items()}


def give(links: LocalLinks) -> None:
    """Give the agreement a rank's values without waiting for those of the others."""
    held = links._shared
    if held is None:
        links._send(0, VALUES.tobytes(), "all_gather_numbers")
        return
    held._gathers = held._gathers + 1
    place = held._values[held._gathers % 2][held._rank]
    write(place[: 2 * len(VALUES)], VALUES.view(np.uint32), held._gathers)


def rank_main(way: str, rank: int, ranks: int, path: str, pipe: Any) -> None:
    links = links_of(way, rank, ranks, FileStore(path, ranks))
    found = []
    began = 0.0
    for turn in range(TURNS):
        if turn == FIRST_TURNS:
            began = time.process_time()
        found.append(timed(partial(one_turn, links, rank)))
    spent = (time.process_time() - began) / (TURNS - FIRST_TURNS) * 1e6
    pipe.send_bytes(json.dumps([median(found[FIRST_TURNS:]), spent]).encode())
    links.close()


def one_turn(links: LocalLinks, rank: int) -> None:
    links.broadcast(TURN if rank == 0 else None)
    links.gather_numbers(VALUES)


def turns(way: str, ranks: int) -> dict[str, float]:
    """Return the median microseconds of a turn on rank 0 among processes."""
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            spawn.Process(target=rank_main, args=(way, rank, ranks, f"{folder}/store", theirs))
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        wall, processor = json.loads(pipes[0][0].recv_bytes())
        for process in processes:
            process.join()
    return {"turn": round(wall, 1), "processor": round(processor, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout
    rows = [
        {"ranks": ranks, "way": way, "calls_us": calls(way, ranks), "turns_us": turns(way, ranks)}
        for ranks in RANKS
        for way in WAYS
    ]
    about = {
        "command": "python -m tests.hotpath.rank_turns " + " ".join(sys.argv[1:]),
        "date": datetime.date.today().isoformat(),
        "commit": commit.strip(),
        "versions": {"python": platform.python_version()},
        "host": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "what": " ".join((__doc__ or "").split()),
    }
    output.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
