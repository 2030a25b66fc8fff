"""One engine of two processes that see one GPU each, as two hosts do: they exchange over NCCL and
sockets, replay captured steps, and end together. Also the launchers on one host.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from tests.e2e.served_faults import DIVIDED, FAILED, Server, free_port
from tests.support.waiting import until

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
#: NCCL may use neither peer memory nor memory that the processes of a host share
APART = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
TP = ("--tp", "2", "--device", "cuda", "--context-length", "1024", "--dist-timeout", "30")
TP += ("--plan", "full", *DIVIDED)
LAYOUTS = {
    "tp": (),
    "tp ep": ("--ep-size", "2"),
    "tp ep dp": ("--ep-size", "2", "--enable-dp-attention", "--dp-size", "2"),
    "tp nextn": ("--speculative-algorithm", "NEXTN"),
}


@pytest.fixture(autouse=True)
def devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")


@contextmanager
def hosts(way: str, folder: Path, more: Sequence[str] = ()) -> Iterator[tuple[Server, Server]]:
    """Run one engine over two processes, host 0 first. ``way``: "flags" or "torchrun"."""
    meeting = free_port()
    with ExitStack() as stack:
        pair = []
        for host in (0, 1):
            place = folder / f"host{host}"
            place.mkdir()
            words: tuple[str, ...] = ("--nnodes", "2", "--node-rank", str(host))
            launcher: tuple[str, ...] = ()
            if way == "flags":
                words += ("--dist-init-addr", f"127.0.0.1:{meeting}")
            else:
                launcher = ("-m", "torch.distributed.run", *words, "--nproc-per-node", "1")
                launcher += ("--master-addr", "127.0.0.1", "--master-port", str(meeting))
                words = ()
            server = Server(
                place,
                *TP,
                *words,
                *more,
                launcher=launcher,
                CUDA_VISIBLE_DEVICES=str(host),
                **APART,
            )
            stack.callback(end, server)
            pair.append(server)
        yield pair[0], pair[1]


def end(server: Server) -> None:
    """Kill the server, and its ranks if they are left."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(server.process.pid).children(recursive=True):
            child.kill()
    server.kill()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_hosts_answer_with_graphs_and_end_together(layout: str, tmp_path: Path) -> None:
    with hosts("flags", tmp_path, LAYOUTS[layout]) as (first, second):
        first.ready()
        assert "42" in first.ask()
        assert re.search(r"capture: .*graphs take [1-9]", first.text()), "steps were not captured"
        assert "nccl" in first.text(), "the plan names the collectives"
        first.process.terminate()
        assert (first.end(), second.end()) == (0, 0)


def test_torchrun_starts_two_hosts(tmp_path: Path) -> None:
    with hosts("torchrun", tmp_path) as (first, second):
        first.ready()
        assert "42" in first.ask()
        first.process.terminate()
        for server in (first, second):
            server.end()
        assert "the engine has stopped" not in first.text() + second.text()


def test_torchrun_starts_the_ranks_of_one_host(tmp_path: Path) -> None:
    """Both see both GPUs, and exchange through each other's memory."""
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    launcher += ("--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    server = Server(tmp_path, *TP, launcher=launcher)
    try:
        server.ready()
        assert "42" in server.ask()
        assert "peer_memory" in server.text() and "exchange by NCCL alone" not in server.text()
    finally:
        end(server)


def test_ray_starts_the_ranks_of_one_host(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    server = Server(tmp_path, *TP, "--distributed-executor-backend", "ray")
    try:
        server.ready()
        assert "42" in server.ask()
        server.process.terminate()
        assert server.end() == 0
    finally:
        end(server)


@pytest.mark.parametrize("fault", ["rank", "host"])
def test_the_other_host_ends_and_names_the_lost_one(fault: str, tmp_path: Path) -> None:
    """Rank 0 waits for rank 1 in a replayed exchange of NCCL, which has no time limit."""
    with hosts("flags", tmp_path) as (first, second):
        first.ready()
        with first.decoding():
            (rank,) = second.ranks()
            if fault == "host":
                second.process.kill()  # its rank ends with it
            else:
                rank.kill()
            assert first.end() == FAILED
        second.process.wait()
        said = r"rank 1 ended \(exit code -9\)" if fault == "rank" else r"host 1 \(rank 1\)"
        assert re.search(rf"the engine has stopped: .*{said}", first.text())
        until(lambda: not rank.is_running(), "the rank has ended")
