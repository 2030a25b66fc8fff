"""Collectives over real process groups: ranks as threads (2 and 4) and as processes (2)."""

from __future__ import annotations

import multiprocessing
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.distributed import HashStore, TCPStore

from glowplug.core.errors import CollectiveError
from glowplug.core.facts.mesh import coordinates
from glowplug.core.protocols import Collectives, Worker
from glowplug.core.testing.harness.plans import bare_plan
from glowplug.core.testing.suites.parallel import CollectivesSuite, RankedCollectivesSuite
from glowplug.plugins.collectives.rendezvous import bind_nccl, interface_of
from glowplug.plugins.collectives.torch_distributed import GlooOptions, NcclOptions
from glowplug.plugins.collectives.torch_distributed_runtime import Gloo, Nccl
from tests.support.waiting import LIMIT

pytestmark = pytest.mark.usefixtures("quick_switches")


def gloo(
    rank: int, mesh: dict[str, int], rendezvous: str = "", store: Any = None, timeout: float = 20.0
) -> Gloo:
    ranks = mesh.get("tp", 1) * mesh.get("pp", 1)
    worker = Worker(
        rank=rank, ranks=ranks, coordinates=coordinates(rank, mesh), rendezvous=rendezvous
    )
    return Gloo(GlooOptions(timeout=timeout), replace(bare_plan(), mesh=mesh), worker, store)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class Threads(RankedCollectivesSuite):
    """Ranks are threads over one store in memory."""

    def open(self, rank: int, mesh: dict[str, int], store: HashStore) -> Collectives:
        return gloo(rank, mesh, store=store)

    def run(
        self, body: Callable[[Collectives, int], Any], mesh: Mapping[str, int] | None = None
    ) -> list[Any]:
        over, store = dict(mesh or {"tp": self.ranks}), HashStore()

        def one(rank: int) -> Any:
            held = self.open(rank, over, store)
            try:
                return body(held, rank)
            finally:
                held.close()

        with ThreadPoolExecutor(self.ranks) as pool:
            return list(pool.map(one, range(self.ranks)))


class OnDevice:
    """``Collectives`` of CPU tensors by way of a device: the suite's tensors travel over NCCL."""

    def __init__(self, held: Nccl, device: str) -> None:
        self._held, self._device = held, device

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._held, name)

        def moved(*given: Any) -> Any:
            if not given or not isinstance(given[0], torch.Tensor):
                return method(*given)
            return method(given[0].to(self._device), *given[1:]).cpu()

        return moved


class TestTwoThreads(Threads):
    ranks = 2


class TestFourThreads(Threads):
    ranks = 4


@pytest.mark.gpu
class TestTwoDevices(Threads):
    """Each rank is a thread with a device of its own."""

    ranks = 2

    @pytest.fixture(autouse=True)
    def devices(self) -> None:
        if torch.cuda.device_count() < self.ranks:
            pytest.skip(f"needs {self.ranks} devices")

    def open(self, rank: int, mesh: dict[str, int], store: HashStore) -> Collectives:
        device = f"cuda:{rank}"
        worker = Worker(
            rank=rank, ranks=self.ranks, device=device, coordinates=coordinates(rank, mesh)
        )
        held = Nccl(NcclOptions(timeout=60), replace(bare_plan(), mesh=mesh), worker, store)
        return cast(Collectives, OnDevice(held, device))


@pytest.mark.gpu
class TestFourDevices(TestTwoDevices):
    ranks = 4


class TestOneRank(CollectivesSuite):
    def make(self) -> Gloo:
        return gloo(0, {}, store=HashStore())


def in_threads(ranks: int, work: Callable[[int], Any]) -> list[Any]:
    """Run ``work`` on ranks in threads, and return the results or the CollectiveErrors raised, by
    rank.
    """

    def one(rank: int) -> Any:
        try:
            return work(rank)
        except CollectiveError as error:
            return error

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_ranks_meet_at_an_address(scheme: str, tmp_path: Path) -> None:
    address = f"file://{tmp_path}/ranks" if scheme == "file" else f"tcp://127.0.0.1:{free_port()}"

    def work(rank: int) -> float:
        held = gloo(rank, {"tp": 2}, address)
        return float(held.all_reduce(torch.tensor([rank + 1.0]), "tp"))

    assert in_threads(2, work) == [3.0, 3.0]


def test_ranks_meet_in_an_agents_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is set up as by torchrun: the agent hosts it, and no rank opens the port."""
    agent = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(agent.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert in_threads(2, lambda rank: gloo(rank, {"tp": 2}, "env://").broadcast_bytes(b"hi")) == [
        b"hi",
        b"hi",
    ]


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        CollectiveError, match=r"rank 0 of 3 waited 0.3 s for ranks \[1, 2\] to start"
    ):
        gloo(0, {"tp": 3}, f"file://{tmp_path}/ranks", timeout=0.3)


@pytest.mark.parametrize("address", ["", "udp://host:1", "tcp://host"])
def test_an_address_of_no_kind_is_refused(address: str) -> None:
    with pytest.raises(CollectiveError, match="has no rendezvous"):
        gloo(0, {"tp": 2}, address)


def test_an_address_where_nothing_listens_is_an_error() -> None:
    with pytest.raises(CollectiveError, match="could not reach the rendezvous tcp://"):
        gloo(1, {"tp": 2}, f"tcp://127.0.0.1:{free_port()}", timeout=0.5)


def test_nccl_connects_hosts_over_the_interface_that_leads_to_host_0() -> None:
    address = "tcp://127.0.0.1:29500/0?held"
    for given, before, after in (
        (None, {}, "=lo"),
        ("ib0", {}, "=ib0"),
        ("ib0", {"NCCL_SOCKET_IFNAME": "eth"}, "eth"),
    ):
        environment = dict(before)
        bind_nccl(given, address, environment)
        assert environment == {"NCCL_SOCKET_IFNAME": after}
    assert interface_of("127.0.0.1") == "lo" and interface_of("192.0.2.77") is None


def test_a_peer_that_goes_ends_the_operation_at_once() -> None:
    """The error names the peer and does not wait for the timeout."""
    store = HashStore()

    def work(rank: int) -> float:
        held = gloo(rank, {"tp": 2}, store=store, timeout=20 * LIMIT)
        if rank == 1:
            held.close()
            return 0.0
        held.all_reduce(torch.ones(4), "tp")
        return 1.0

    found = in_threads(2, work)[0]
    assert isinstance(found, CollectiveError)
    assert "all_reduce over tp failed on rank 0 of 2" in str(found)


def test_a_peer_that_does_not_answer_ends_the_operation_in_time() -> None:
    store, ended = HashStore(), threading.Event()

    def work(rank: int) -> bool:
        held = gloo(rank, {"tp": 2}, store=store, timeout=2.0)
        if rank == 1:
            return ended.wait(LIMIT)
        try:
            held.all_gather_numbers(np.zeros(1, np.int64))
        finally:
            ended.set()
        return False

    found, silent = in_threads(2, work)
    assert isinstance(found, CollectiveError) and silent is True, (
        "the operation ended while its peer was alive and silent"
    )
    assert "timed out after 2 s waiting for rank 1" in str(found)
    assert "all_gather_numbers failed on rank 0" in str(found)


def process_rank(rank: int, address: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    held = gloo(rank, {"tp": 2}, address)
    made = [
        held.all_reduce(torch.full((3,), rank + 1.0), "tp").tolist(),
        held.all_gather(torch.tensor([rank]), "tp").tolist(),
        held.broadcast_bytes(b"from 0" if rank == 0 else None),
    ]
    pipe.send_bytes(repr(made).encode())
    held.close()


def test_ranks_may_be_processes(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(2)]
    processes = [
        spawn.Process(target=process_rank, args=(rank, f"file://{tmp_path}/ranks", theirs))
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    try:
        for ours, _ in pipes:
            assert ours.poll(60), "a rank did not answer"
            assert ours.recv_bytes().decode() == repr([[3.0] * 3, [0, 1], b"from 0"])
    finally:
        for process in processes:
            process.join(20)
            process.kill()
    assert [process.exitcode for process in processes] == [0, 0]
