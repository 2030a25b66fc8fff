"""Faults in ranks of ``glowplug serve`` while requests are decoded: message, exit status, processes
and device memory left behind, and the next start.

``python -m tests.e2e.served_faults --repeat 10 --output FILE`` runs every case that often on two
GPUs. The next start after a fault serves the next case. ``--only "stop*"`` runs some of the cases,
so that several programs can share the GPUs with ``--beside``.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from glowplug.entrypoints.bench.others.process_memory import QUERY, rows
from tests.support.waiting import LIMIT, until

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
WATCHDOG = 10.0  #: seconds, as given by --watchdog-timeout
START = 300.0  #: seconds after which a server counts as never ready
FAULTS = ("kill", "stop", "memory")
SAYS = {
    "kill": r"rank {rank} ended \(exit code -9\) in phase serve",
    "stop": r"rank {rank} has been silent for \d+ s \(phase serve\)",
    "memory": r"rank {rank} failed in phase serve: (OutOfMemoryError|RuntimeError): .*allocate",
}
MEMORY_RANK = 1  #: rank of the plugin's fault
#: options with which two ranks divide the embedded model's experts: as its quantization's blocks of
#: 128 channels cannot be divided, weights are dequantised
DIVIDED = ("--set", "quantization.use=block_fp8", "--set", "quantization.activations=none")
FAILED = 1  #: exit status of a server whose engine has ended
#: MiB of device memory that may still be in use, as other processes of the driver come and go
SPARE_MIB = 64


@dataclass(frozen=True)
class Case:
    fault: str
    rank: int

    def __str__(self) -> str:
        return f"{self.fault} of rank {self.rank}"


CASES = [Case(fault, rank) for fault in ("kill", "stop") for rank in range(RANKS)]
CASES.append(Case("memory", MEMORY_RANK))


class Server:
    """A ``glowplug serve`` process with several ranks, its output in a file.

    Args:
        folder: A folder for its output.
        words: Options of ``glowplug serve``.
        launcher: Words of the command line before "-m glowplug serve".
        environment: Variables to set.
    """

    def __init__(
        self, folder: Path, *words: str, launcher: Sequence[str] = (), **environment: str
    ) -> None:
        self.log = folder / "serve.log"
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.port = free_port()
        command = ["-m", "glowplug", "serve", "--port", str(self.port)]
        if "--model-path" not in words:
            command += ["--model", "embedded"]
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, *launcher, *command, *words],
                stdout=out,
                stderr=out,
                env={**os.environ, "PYTHONPATH": path, **environment},
                cwd=ROOT,
            )
        self.url = f"http://127.0.0.1:{self.port}"

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def ready(self) -> None:
        def answers() -> bool:
            assert self.process.poll() is None, self.text()[-3000:]
            try:
                return httpx.get(self.url + "/ready", timeout=5.0).status_code == 200
            except httpx.TransportError:
                return False

        until(answers, "the server is ready", START)

    def ask(self) -> str:
        """Return the answer to a question that the embedded model knows: "42"."""
        question = {"role": "user", "content": "What is 17 + 25?"}
        body = {"model": "embedded", "temperature": 0, "max_tokens": 16, "messages": [question]}
        found = httpx.post(self.url + "/v1/chat/completions", json=body, timeout=LIMIT).json()
        return str(found["choices"][0]["message"]["content"])

    def ranks(self) -> list[psutil.Process]:
        """Return the processes of this host's ranks, in order."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        found = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
        return sorted(found, key=lambda child: child.create_time())

    @contextmanager
    def decoding(self) -> Iterator[Stream]:
        """Run while a request is decoded, from its first token on."""
        stream = Stream(self.url)
        thread = threading.Thread(target=stream.read, daemon=True)
        thread.start()
        until(lambda: stream.chunks > 3 or stream.ended, "tokens arrive")
        assert not stream.ended, self.text()[-3000:]
        yield stream
        thread.join(LIMIT)

    def end(self, limit: float = LIMIT) -> int:
        """Wait for the end of the process and return its exit status."""
        return self.process.wait(limit)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class Stream:
    """The answer to a long request.

    Attributes:
        url: Address of the server.
        chunks: Number of chunks with text so far.
        ended: No more chunks come.
        text: What came.
    """

    url: str
    chunks: int = 0
    ended: bool = False
    text: str = ""

    def read(self) -> None:
        body = {
            "model": "embedded",
            "prompt": "Count from 1 to 900.",
            "max_tokens": 900,
            "ignore_eos": True,
            "stream": True,
        }
        try:
            with httpx.stream(
                "POST", self.url + "/v1/completions", json=body, timeout=LIMIT
            ) as got:
                for line in got.iter_lines():
                    self.text += line
                    self.chunks += line.startswith("data: {")
        except httpx.TransportError as error:
            self.text += repr(error)
        self.ended = True


@dataclass
class Outcome:
    """The result of a case.

    Attributes:
        status: Exit status of the server.
        said: Its message on the end of the engine.
        seconds: Time from the fault to the end of the process.
        stream: What the client of the running request got.
        left: Processes and device memory left behind.
        again: The answer of the next start.
        status_again: Exit status of that one after SIGTERM; None: it serves the next case instead.
    """

    status: int
    said: str
    seconds: float
    stream: str
    left: list[str] = field(default_factory=list)
    again: str = ""
    status_again: int | None = -1

    def wrong(self, case: Case) -> list[str]:
        """Return the deviations from what is promised."""
        found = list(self.left)
        wanted = SAYS[case.fault].format(rank=case.rank)
        if not re.search(wanted, self.said):
            found.append(f"said {self.said[:500]!r}, expected {wanted!r}")
        if self.status != FAILED:
            found.append(f"exit status {self.status}")
        if "[DONE]" in self.stream or '"finish_reason":"stop"' in self.stream:
            found.append("a request ended as if it were complete")
        if "42" not in self.again or self.status_again not in (0, None):
            found.append(f"next start: {self.again!r}, exit status {self.status_again}")
        return found


def words_of(device: str, watchdog: float = WATCHDOG, fault: str = "") -> tuple[str, ...]:
    """Return the options of a server; ``fault``: the one that it is started for."""
    words = ["--tp", str(RANKS), "--device", device, "--context-length", "1024"]
    words += ["--watchdog-timeout", f"{watchdog:g}", *DIVIDED, "--max-total-tokens", "4096"]
    if fault == "memory":
        words += ["--plugin", "tests.e2e.memory_plugin"]
    return tuple(words)


@contextmanager
def serving(folder: Path, words: Sequence[str]) -> Iterator[Server]:
    """Run a server that is ready, with its output in ``folder``, and kill it at the end."""
    folder.mkdir()
    server = Server(folder, *words)
    try:
        server.ready()
        yield server
    finally:
        server.kill()


def run(case: Case, folder: Path, device: str, watchdog: float = WATCHDOG) -> Outcome:
    """Run a server whose rank fails as in ``case``, and then another one."""
    used = device_memory() if device == "cuda" else []
    with serving(folder / "first", words_of(device, watchdog, case.fault)) as server:
        outcome = fail(server, case, used)
    with serving(folder / "next", words_of(device, watchdog)) as server:
        outcome.again = server.ask()
        outcome.status_again = stopped(server)
    return outcome


def fail(server: Server, case: Case, used: list[int] | None) -> Outcome:
    """Let a rank of a server fail while a request is decoded, and return what came of it.

    Args:
        server: A server that is ready.
        case: The fault.
        used: MiB in use on each GPU before the server was started; empty without GPUs; None: other
            programs use the GPUs, too.
    """
    processes = server.ranks()
    assert len(processes) == RANKS
    if used is None:
        assert held_by(processes), "the driver does not report the memory of the ranks' processes"
    began = time.monotonic()
    with server.decoding() as stream:
        if case.fault != "memory":
            name = "SIGKILL" if case.fault == "kill" else "SIGSTOP"
            began = time.monotonic()
            processes[case.rank].send_signal(getattr(signal, name))
        status = server.end()
    outcome = Outcome(status, reason(server), time.monotonic() - began, stream.text)
    server.kill()
    outcome.left = left(processes, used)
    return outcome


def stopped(server: Server) -> int:
    """Return the exit status of a server after SIGTERM."""
    server.process.terminate()
    return server.end()


def reason(server: Server) -> str:
    """Return the last line of the log that says why the engine has ended."""
    lines = [line for line in server.text().splitlines() if "the engine has stopped" in line]
    return lines[-1].partition("the engine has stopped: ")[2] if lines else server.text()[-500:]


def left(processes: list[psutil.Process], used: list[int] | None) -> list[str]:
    """Return the processes that run on, and the GPUs with more memory in use than before.

    With ``used`` None, memory is that of the processes alone.
    """

    def there() -> list[str]:
        found = [f"process {one.pid}" for one in processes if one.is_running()]
        if used is None:
            held = held_by(processes)
            return [*found, f"{held} MiB of the ranks"] if held else found
        for gpu, (before, now) in enumerate(zip(used, device_memory() if used else [])):
            if now > before + SPARE_MIB:
                found.append(f"GPU {gpu}: {now - before} MiB")
        return found

    try:
        until(lambda: not there(), "nothing is left", limit=30.0)
    except AssertionError:
        return there()
    return []


def device_memory() -> list[int]:
    """Return the MiB in use on each visible GPU, of all processes."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command += ["-i", visible]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [int(line) for line in done.stdout.split()]


def held_by(processes: list[psutil.Process]) -> int:
    """Return the MiB of device memory that the driver counts for processes."""
    done = subprocess.run(QUERY, capture_output=True, text=True, check=True)
    own = {one.pid for one in processes}
    return sum((used or 0) >> 20 for pid, used in rows(done.stdout) if pid in own)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="names of cases to run")
    parser.add_argument(
        "--beside",
        action="store_true",
        help="other programs use the GPUs: judge the memory of the ranks' processes alone",
    )
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    import torch

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    about = {
        "command": "python -m tests.e2e.served_faults " + " ".join(sys.argv[1:]),
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "devices": devices or ["CPU"],
        "engine": f"glowplug serve --model embedded --tp {RANKS}, requests being decoded",
        "watchdog_seconds": WATCHDOG,
    }
    found = {
        case: {"case": str(case), "runs": 0, "as_promised": 0, "slowest_end_seconds": 0.0}
        | {"wrong": []}
        for case in CASES
        if fnmatch.fnmatchcase(str(case), args.only)
    }
    for case, outcome in outcomes(list(found) * args.repeat, args.device, args.beside):
        _add(found[case], case, outcome)
        record = {**about, "cases": list(found.values())}
        args.output.write_text(json.dumps(record, indent=1) + "\n")


def outcomes(cases: Sequence[Case], device: str, beside: bool) -> Iterator[tuple[Case, Outcome]]:
    """Yield the outcome of each case.

    The server that is started after a fault serves the next case if its options are the same, else
    it is stopped. So a case costs one start, most of the time. ``beside``: other programs use the
    GPUs, too.
    """
    used = None if beside else device_memory() if device == "cuda" else []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        server: Server | None = None
        for number, (case, after) in enumerate(zip(cases, [*cases[1:], None])):
            words = words_of(device, fault=case.fault)
            if server is None:
                server = stack.enter_context(serving(folder / f"{number}", words))
            outcome = fail(server, case, used)
            words = words_of(device)
            server = stack.enter_context(serving(folder / f"{number}-next", words))
            outcome.again = server.ask()
            if after is not None and words_of(device, fault=after.fault) == words:
                outcome.status_again = None
            else:
                outcome.status_again = stopped(server)
                server = None
            yield case, outcome


def _add(row: dict[str, Any], case: Case, outcome: Outcome) -> None:
    """Add the outcome of a case to its row."""
    wrong = outcome.wrong(case)
    row["runs"] += 1
    row["as_promised"] += not wrong
    row["slowest_end_seconds"] = max(row["slowest_end_seconds"], round(outcome.seconds, 1))
    row["wrong"] += wrong
    print(f"{case}: {outcome.seconds:.1f} s {wrong or ''}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
