"""Faults in ranks, one case at a time: the engine's message, the time until it ends, and resources
that it leaves behind.

``python -m tests.e2e.rank_faults --repeat 10 --output docs/benchmarks/faults.json`` runs every case
that often.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from glowplug import LLM, SamplingParams
from glowplug.core.errors import EngineDead
from tests.support.forked_ranks import rank_processes
from tests.support.tiny import write_config
from tests.support.waiting import until

#: seconds, as configured; on a busy machine a rank's heartbeats may be late by some seconds
WATCHDOG = 10.0
#: seconds from fault to end
PROMISED = {
    "kill": 3.0,
    "error": 3.0,
    "memory": 3.0,
    "stop": WATCHDOG + 3.0,
    "hang": WATCHDOG + 3.0,
}
RANKS = 2


class Moment(NamedTuple):
    """The moment of a fault.

    Attributes:
        component: slot of the component that fails.
        at: number of its call that fails.
        phase: phase that the reason names.
        options: its other options.
    """

    component: str
    at: int
    phase: str
    options: Mapping[str, Any] = {}


GRAPHS = {"batch_sizes": [1, 2, 3]}
MOMENTS = {
    "load": Moment("weights", 5, "weights"),
    "kv allocation": Moment("sampling", 1, "kv", {"method": "reserve"}),
    "capture": Moment("graphs", 3, "capture", GRAPHS),
    "first step": Moment("sampling", 1, "self-test"),
    "mid-decode": Moment("sampling", 25, "serve"),
    "mid-replay": Moment("graphs", 25, "serve", {**GRAPHS, "pieces": "replayed"}),
}
SAYS = {
    "kill": r"rank {rank} ended \(exit code -9\) in phase {phase}",
    "stop": r"rank {rank} has been silent for \d+ s \(phase {phase}\)",
    "error": r"rank {rank} failed in phase {phase}: .*RuntimeError.*injected",
    "memory": r"rank {rank} failed in phase {phase}: .*injected: out of memory",
    "hang": r"rank {rank} failed in phase {phase}: its loop has stood still for \d+ s, in "
    r"Countdown._act of",
}


@dataclass(frozen=True)
class Case:
    fault: str
    moment: str
    rank: int

    def __str__(self) -> str:
        return f"{self.fault} in {self.moment} of rank {self.rank}"


CASES = [
    Case(fault, moment, rank)
    for fault in ("kill", "stop", "error", "memory")
    for moment in MOMENTS
    if fault != "memory" or moment != "load"
    for rank in range(RANKS)
]
HANGS = [Case("hang", "mid-decode", rank) for rank in range(RANKS)]


@dataclass
class Outcome:
    """The result of a case.

    Attributes:
        said: The error at the caller.
        seconds: Time from the fault to that error.
        leaks: Resources left a moment later.
    """

    said: str
    seconds: float
    leaks: list[str]

    def wrong(self, case: Case) -> list[str]:
        """Return the deviations of the message and of the resources left behind from the
        promise.
        """
        found = [f"leak: {leak}" for leak in self.leaks]
        wanted = SAYS[case.fault].format(rank=case.rank, phase=MOMENTS[case.moment].phase)
        if not re.search(wanted, self.said):
            found.append(f"said {self.said[:300]!r}, expected {wanted!r}")
        return found

    def late(self, case: Case) -> list[str]:
        """Return the delay beyond the promised time, which holds for a machine that is not busy."""
        return [f"took {self.seconds:.1f} s"] if self.seconds > PROMISED[case.fault] else []


def run(case: Case, folder: Path, watchdog: float = WATCHDOG) -> Outcome:
    """Run one engine of two ranks that fails as in ``case``. ``folder`` is a fresh one;
    ``watchdog`` is in seconds.
    """
    moment = MOMENTS[case.moment]
    note = folder / "note.json"
    faulty = {
        "use": "faulty",
        "fault": case.fault,
        "rank": case.rank,
        "at": moment.at,
        "note": str(note),
        **moment.options,
    }
    config: dict[str, Any] = {"weights": {"use": "random"}, moment.component: faulty}
    children, meeting = rank_processes(), tempfile.tempdir
    tempfile.tempdir = str(folder)
    try:
        said = _fail(folder, config, watchdog)
    finally:
        tempfile.tempdir = meeting
    ended = time.monotonic()
    noted = (
        json.loads(note.read_text())
        if note.exists()
        else {"time": ended, "ports": [], "shared": []}
    )
    leaks = _left(children, noted)
    leaks += [str(path) for path in folder.glob("glowplug-*")]
    return Outcome(said, ended - noted["time"], leaks)


def _fail(folder: Path, config: dict[str, Any], watchdog: float) -> str:
    llm = None
    try:
        llm = LLM(
            model=str(write_config(folder / "model", "v3")),
            plugins=["tests.e2e.fault_plugin"],
            skip_tokenizer=True,
            device="cpu",
            context_length=128,
            memory={"kv_tokens": 1024},
            parallel=[{"use": "tensor", "size": RANKS}],
            collectives={"timeout": 60.0},
            executor={"use": "multiprocess", "watchdog": watchdog, "threads": 1},
            **config,
        )
        llm.generate(
            [[5, 6, 7]] * 3, SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        )
    except EngineDead as error:
        return str(error)
    finally:
        if llm is not None:
            llm.close()
    return "nothing: the engine went on"


def _left(children: set[psutil.Process], noted: dict[str, Any]) -> list[str]:
    """Return processes, ports and shared memory of the ranks that are still there."""
    try:
        until(lambda: not [*_there(children, noted)], "nothing is left", limit=20.0)
    except AssertionError:
        return list(_there(children, noted))
    return []


def _there(children: set[psutil.Process], noted: dict[str, Any]) -> Iterator[str]:
    yield from (f"process {child.pid}" for child in rank_processes() - children)
    yield from (
        f"shared memory {name}" for name in noted["shared"] if Path("/dev/shm", name).exists()
    )
    yield from _taken(noted["ports"])


def _taken(ports: list[int]) -> list[str]:
    found = []
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                found.append(f"port {port}")
    return found


# ---- all cases -----------------------------------------------------------------------------------


def rounds(cases: list[Case], repeat: int) -> Iterator[list[dict[str, Any]]]:
    """Run every case ``repeat`` times, in rounds; after each round yield the counts, the slowest
    end and the errors by case.
    """
    rows = [
        {
            "fault": case.fault,
            "moment": case.moment,
            "rank": case.rank,
            "runs": 0,
            "as_promised": 0,
            "slowest_end_seconds": 0.0,
            "promised_seconds": PROMISED[case.fault],
            "leaks": 0,
            "wrong": [],
        }
        for case in cases
    ]
    for _ in range(repeat):
        for case, row in zip(cases, rows, strict=True):
            with tempfile.TemporaryDirectory() as folder:
                outcome = run(case, Path(folder))
            wrong = outcome.wrong(case) + outcome.late(case)
            row["runs"] += 1
            row["as_promised"] += not wrong
            row["slowest_end_seconds"] = max(row["slowest_end_seconds"], round(outcome.seconds, 2))
            row["leaks"] += len(outcome.leaks)
            row["wrong"] += wrong
            print(f"{case}: {outcome.seconds:.1f} s {wrong or ''}", file=sys.stderr, flush=True)
        yield rows


def total(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        **{key: sum(row[key] for row in rows) for key in ("runs", "as_promised", "leaks")},
        "cases": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    import torch

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout
    about = {
        "command": "python -m tests.e2e.rank_faults " + " ".join(sys.argv[1:]),
        "date": datetime.date.today().isoformat(),
        "commit": commit.strip(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "cores": len(psutil.Process().cpu_affinity()),
        "engine": "multiprocess, tp 2, random tiny V3, CPU",
        "watchdog_seconds": WATCHDOG,
    }
    for rows in rounds([*CASES, *HANGS], args.repeat):
        args.output.write_text(json.dumps({**about, **total(rows)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
