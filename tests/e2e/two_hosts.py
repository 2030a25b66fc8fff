"""Two hosts as two network namespaces joined by a veth pair, and one engine across them.

``python -m tests.e2e.two_hosts --output docs/benchmarks/two-hosts.json`` runs every case. Needs
root and iproute2.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DIST_TIMEOUT = 10.0  #: seconds, as given by --dist-timeout
SETTLE = 4.0  #: seconds beyond it for processes to end on a busy machine
START = 180.0  #: seconds for the engine to be ready
# NOTE: in namespaces of our own, where no other process uses them
PORT, STORE, RAY = 30000, 29500, 6379
ENGINE = (
    "--tp",
    "2",
    "--dist-timeout",
    str(DIST_TIMEOUT),
    "--max-total-tokens",
    "2048",
    "--context-length",
    "512",
)
ASK = """
from openai import OpenAI
client = OpenAI(base_url="http://10.91.0.1:{port}/v1", api_key="none")
said = client.chat.completions.create(model="embedded", temperature=0, max_tokens=16,
                                      messages=[{{"role": "user", "content": "What is 17 + 25?"}}])
print(said.choices[0].message.content)
"""
READY = """
import sys, urllib.request
urllib.request.urlopen("http://10.91.0.1:{port}/ready", timeout=5)
"""


def cannot() -> str:
    """Return why namespaces cannot be made here; "" when they can."""
    if shutil.which("ip") is None:
        return "iproute2 is not installed"
    name = f"gp{uuid.uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"ip netns add: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return ""


class Hosts:
    """The two namespaces and the processes started in them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._started = folder, []  # type: tuple[Path, list[Started]]
        self.scratch = Path(
            tempfile.mkdtemp(prefix="ray")
        )  # NOTE: a short name: Ray puts sockets into it, 107 bytes
        tag = uuid.uuid4().hex[:6]
        self.names, self.links = (f"gpa{tag}", f"gpb{tag}"), (f"va{tag}", f"vb{tag}")

    def __enter__(self) -> Hosts:
        for name in self.names:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            self.links[0],
            "netns",
            self.names[0],
            "type",
            "veth",
            "peer",
            "name",
            self.links[1],
            "netns",
            self.names[1],
        )
        for host, (name, link) in enumerate(zip(self.names, self.links, strict=True)):
            ip("-n", name, "addr", "add", f"10.91.0.{host + 1}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *exc: object) -> None:
        for one in self._started:
            one.kill()
        for name in self.names:
            for pid in subprocess.run(
                ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
            ).stdout.split():
                with _gone():
                    os.kill(int(pid), signal.SIGKILL)
            ip("netns", "del", name)
        shutil.rmtree(self.scratch, ignore_errors=True)

    def start(self, host: int, *words: str, **environment: str) -> Started:
        one = Started(
            self.names[host], self.folder / f"{len(self._started)}.log", words, environment
        )
        self._started.append(one)
        return one

    def run(self, host: int, *words: str, timeout: float = 120.0, **environment: str) -> str:
        """Return the output of a command that must succeed."""
        done = subprocess.run(
            ["ip", "netns", "exec", self.names[host], *words],
            capture_output=True,
            text=True,
            timeout=timeout,
            env=_environment(environment),
            cwd=ROOT,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stdout}\n{done.stderr}")
        return done.stdout

    def cut(self) -> None:
        ip("-n", self.names[1], "link", "set", self.links[1], "down")

    def engine_pids(self, host: int, launcher: bool = False) -> set[int]:
        """Return the engine's processes on a host without Ray's own; PyTorch's launcher only on
        request.
        """
        found = set()
        for pid in subprocess.run(
            ["ip", "netns", "pids", self.names[host]], capture_output=True, text=True, check=True
        ).stdout.split():
            with _gone():
                words = Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if re.search(r"glowplug serve|spawn_main|RankActor", words) and (
                    launcher or "torch.distributed.run" not in words
                ):
                    found.add(int(pid))
        return found


class Started:
    """A process in a namespace, its output in a file."""

    def __init__(
        self, namespace: str, log: Path, words: Sequence[str], environment: dict[str, str]
    ) -> None:
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", namespace, *words],
                stdout=out,
                stderr=out,
                env=_environment(environment),
                cwd=ROOT,
            )

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def _gone() -> Iterator[None]:
    """Ignore errors of a process that has just ended."""
    try:
        yield
    except (FileNotFoundError, ProcessLookupError):
        return


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _environment(more: dict[str, str]) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **more}


# ---- one engine across both ----------------------------------------------------------------------


def serve_words(*more: str) -> list[str]:
    return ["-m", "glowplug", "serve", *ENGINE, "--host", "10.91.0.1", "--port", str(PORT), *more]


def start_flags(hosts: Hosts, *more: str) -> tuple[Started, Started]:
    """Start the same command on both hosts."""
    first, second = (
        hosts.start(
            host,
            sys.executable,
            *serve_words(
                "--nnodes",
                "2",
                "--node-rank",
                str(host),
                "--dist-init-addr",
                f"10.91.0.1:{STORE}",
                *(more if host else ()),
            ),
        )
        for host in (0, 1)
    )
    return first, second


def start_torchrun(hosts: Hosts) -> tuple[Started, Started]:
    first, second = (
        hosts.start(
            host,
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "2",
            "--node-rank",
            str(host),
            "--nproc-per-node",
            "1",
            "--master-addr",
            "10.91.0.1",
            "--master-port",
            str(STORE),
            *serve_words(),
        )
        for host in (0, 1)
    )
    return first, second


def start_ray(hosts: Hosts) -> tuple[Started, Started]:
    """Start the driver on host 0 with Ray running on both hosts; the second of the pair is Ray on
    host 1.
    """
    ray, temporary = str(Path(sys.executable).with_name("ray")), str(hosts.scratch)
    usual = (
        "--num-cpus",
        "1",
        "--disable-usage-stats",
        "--object-store-memory",
        "100000000",
        "--block",
    )
    quiet = {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
    head = hosts.start(
        0,
        ray,
        "start",
        "--head",
        "--node-ip-address",
        "10.91.0.1",
        "--port",
        str(RAY),
        "--temp-dir",
        temporary,
        "--include-dashboard",
        "false",
        *usual,
        **quiet,
    )
    _until(head, "Ray runtime started")
    second = hosts.start(
        1,
        ray,
        "start",
        "--address",
        f"10.91.0.1:{RAY}",
        "--node-ip-address",
        "10.91.0.2",
        *usual,
        **quiet,
    )
    _until(second, "Ray runtime started")
    first = hosts.start(
        0,
        sys.executable,
        *serve_words(
            "--nnodes",
            "2",
            "--distributed-executor-backend",
            "ray",
            "--dist-init-addr",
            f"10.91.0.1:{RAY}",
        ),
        **quiet,
    )
    return first, second


def _until(one: Started, said: str) -> None:
    deadline = time.monotonic() + START
    while said not in one.text():
        if time.monotonic() > deadline or one.process.poll() is not None:
            raise RuntimeError(f"not started: {one.text()[-2000:]}")
        time.sleep(0.2)


STARTS = {"flags": start_flags, "torchrun": start_torchrun, "ray": start_ray}


def ready(hosts: Hosts, first: Started) -> None:
    deadline = time.monotonic() + START
    while time.monotonic() < deadline and first.process.poll() is None:
        try:
            hosts.run(0, sys.executable, "-c", READY.format(port=PORT), timeout=20)
            return
        except (RuntimeError, subprocess.TimeoutExpired):
            time.sleep(0.5)
    raise RuntimeError(f"not ready: {first.text()[-3000:]}")


@dataclass
class Outcome:
    """The result of a fault.

    Attributes:
        seconds: From the fault until the engine's processes had ended on host 0 and on host 1.
        launcher: Until PyTorch's launcher, which watches them at its own pace, had ended too.
    """

    answer: str
    seconds: tuple[float | None, float | None]
    launcher: tuple[float | None, float | None]
    said: tuple[str, str]

    def wrong(self, fault: str, way: str) -> list[str]:
        found = [] if "42" in self.answer else [f"answered {self.answer!r}"]
        for host, seconds in enumerate(self.seconds):
            if seconds is None or seconds > DIST_TIMEOUT + SETTLE:
                found.append(f"host {host} ended after {seconds} s")
        for host in (
            WITNESS[fault] if way != "ray" else [host for host in WITNESS[fault] if host == 0]
        ):
            other = f"host {1 - host}" if way != "ray" else "rank [01]"
            if not re.search(rf"engine has stopped: .*{other}", self.said[host]):
                found.append(f"host {host} said {self.said[host]!r}")
        return found


#: fault -> hosts that remain to report it
WITNESS = {"kill host 0": [1], "kill host 1": [0], "cut the link": [0, 1]}


def run(way: str, fault: str, folder: Path) -> Outcome:
    """Run an engine across two hosts: one answer, then ``fault``, then both ends."""
    with Hosts(folder) as hosts:
        first, second = STARTS[way](hosts)
        ready(hosts, first)
        answer = hosts.run(0, sys.executable, "-c", ASK.format(port=PORT)).strip()
        began = time.monotonic()
        if fault == "cut the link":
            hosts.cut()
        else:
            for pid in hosts.engine_pids(int(fault[-1]), launcher=True):
                with _gone():
                    os.kill(pid, signal.SIGKILL)
        seconds = _ends(hosts, began, launcher=False)
        return Outcome(
            answer, seconds, _ends(hosts, began, launcher=True), (_reason(first), _reason(second))
        )


def _ends(hosts: Hosts, began: float, launcher: bool) -> tuple[float | None, float | None]:
    found: list[float | None] = [None, None]
    while None in found and time.monotonic() - began < 4 * DIST_TIMEOUT:
        for host in (0, 1):
            if found[host] is None and not hosts.engine_pids(host, launcher):
                found[host] = round(time.monotonic() - began, 1)
        time.sleep(0.1)
    return found[0], found[1]


def _reason(one: Started) -> str:
    lines = [
        line
        for line in one.text().splitlines()
        if "the engine has stopped" in line or "PlanRefused" in line
    ]
    return lines[-1].partition("] ")[2][:300] if lines else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--ways", nargs="+", default=list(STARTS), choices=list(STARTS))
    args = parser.parse_args()
    import torch

    rows: list[dict[str, Any]] = []
    about = {
        "command": "python -m tests.e2e.two_hosts " + " ".join(sys.argv[1:]),
        "date": datetime.date.today().isoformat(),
        "model": "embedded, tp 2, one rank a host, CPU",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "dist_timeout_seconds": DIST_TIMEOUT,
    }
    for way in args.ways:
        for fault in WITNESS:
            with tempfile.TemporaryDirectory() as folder:
                outcome = run(way, fault, Path(folder))
            rows.append(
                {
                    "way": way,
                    "fault": fault,
                    "answer": outcome.answer,
                    "seconds_to_end": {f"host {host}": outcome.seconds[host] for host in (0, 1)},
                    **(
                        {
                            "launcher_seconds_to_end": {
                                f"host {host}": outcome.launcher[host] for host in (0, 1)
                            }
                        }
                        if way == "torchrun"
                        else {}
                    ),
                    "said": {f"host {host}": outcome.said[host] for host in WITNESS[fault]},
                    "wrong": outcome.wrong(fault, way),
                }
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            args.output.write_text(json.dumps({**about, "cases": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
