"""Ranks of one host exchange small host data through shared memory, and notice lost peers there."""

from __future__ import annotations

import multiprocessing
import random
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.distributed import FileStore, HashStore

from glowplug.core.errors import CollectiveError
from glowplug.plugins.collectives import local_links, shared_words
from glowplug.plugins.collectives.local_links import LocalLinks
from glowplug.plugins.collectives.shared_exchange import (
    BROADCAST_BYTES,
    RING,
    VALUES_MAX,
    SharedExchange,
    words_of,
)
from glowplug.plugins.collectives.shared_words import (
    FIRST,
    NUMBERS,
    SharedWords,
    can_share,
    make_memory,
    write,
)
from tests.support.waiting import LIMIT

pytestmark = pytest.mark.usefixtures("quick_switches")
ROUNDS = 3 * RING


@pytest.fixture(autouse=True)
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share memory also among ranks that outnumber this machine's cores."""
    monkeypatch.setattr(local_links, "can_share", lambda ranks: True)


def on_ranks(ranks: int, work: Callable[[LocalLinks, int], Any], timeout: float = LIMIT) -> Any:
    """Return the result or CollectiveError of ``work`` on each rank, all of them threads."""
    store = HashStore()

    def one(rank: int) -> Any:
        links = LocalLinks(rank, ranks, store, timeout)
        assert links._shared is not None
        try:
            return work(links, rank)
        except CollectiveError as error:
            return error
        finally:
            links.close()

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))


def message(number: int) -> bytes:
    """Return bytes of a length that fits the shared memory for most numbers."""
    return random.Random(number).randbytes((0, 1, 7, 500, BROADCAST_BYTES, 5000)[number % 6])


@pytest.mark.parametrize("ranks", [2, 3, 8, 16])
@pytest.mark.parametrize("number", [FIRST - 1, NUMBERS + FIRST - 5])
def test_every_rank_reads_every_exchange(ranks: int, number: int) -> None:
    """Ranks pause at random, so that each of them is the last one at some exchanges; ``number``
    is that of the exchange before the first, so that numbers also start over.
    """

    def work(links: LocalLinks, rank: int) -> None:
        held = links._shared
        assert held is not None
        held._gathers = held._broadcasts = number
        if rank:
            write(held._seen[rank : rank + 1], np.zeros(1, np.uint32), number)
        links.gather(b"")
        pauses = random.Random(rank)
        for turn in range(ROUNDS):
            time.sleep(pauses.choice((0.0, 0.0, 0.002)))
            sent = message(turn)
            assert links.broadcast(sent if rank == 0 else None) == sent
            count = 1 + turn % (VALUES_MAX + 1)  # the last one is too many for the shared memory
            values = np.arange(count) * -(1 << 40) + 100 * turn
            found = links.gather_numbers(values + rank)
            assert (found == values + np.arange(ranks)[:, None]).all()

    assert on_ranks(ranks, work) == [None] * ranks


def test_rank_0_waits_for_the_slowest_reader() -> None:
    """No broadcast is overwritten before every rank has read it."""
    ahead: list[int] = []
    read = threading.Event()

    def work(links: LocalLinks, rank: int) -> list[bytes]:
        if rank == 0:
            for turn in range(3 * RING):
                links.broadcast(b"%d" % turn)
                ahead.append(turn)
                if turn == RING - 1:
                    threading.Timer(0.2, read.set).start()
            return []
        if rank == 1:
            assert read.wait(LIMIT)
            time.sleep(0.1)
            assert len(ahead) == RING, "rank 0 went further than the memory holds"
        return [links.broadcast(None) for _ in range(3 * RING)]

    wanted = [b"%d" % turn for turn in range(3 * RING)]
    assert on_ranks(3, work) == [[], wanted, wanted]


@pytest.mark.parametrize("waits", [0, 1])
@pytest.mark.parametrize("operation", ["all_gather_numbers", "broadcast_bytes"])
def test_a_rank_that_ends_is_named_at_once(operation: str, waits: int) -> None:
    """The timeout would be 20 minutes."""

    def work(links: LocalLinks, rank: int) -> None:
        if rank != waits:
            return
        for _ in range(RING + 1):  # rank 0 may go on until the memory is full
            if operation == "all_gather_numbers":
                links.gather_numbers(np.zeros(2, np.int64))
            else:
                links.broadcast(b"turn" if rank == 0 else None)

    error = on_ranks(2, work, timeout=20 * LIMIT)[waits]
    assert isinstance(error, CollectiveError)
    assert f"{operation} failed on rank {waits} of 2: rank {1 - waits} has ended" in str(error)


def test_what_a_rank_wrote_before_its_end_is_read() -> None:
    written = threading.Event()

    def work(links: LocalLinks, rank: int) -> bytes:
        if rank == 0:
            links.broadcast(b"stop")
            written.set()
            return b""
        assert written.wait(LIMIT)
        time.sleep(0.05)  # rank 0 has closed its connection
        return links.broadcast(None)

    assert on_ranks(2, work) == [b"", b"stop"]


def test_a_silent_rank_is_named_after_the_timeout() -> None:
    done = threading.Event()

    def work(links: LocalLinks, rank: int) -> None:
        if rank == 1:
            assert done.wait(LIMIT)
            return
        try:
            links.gather_numbers(np.zeros(2, np.int64))
        finally:
            done.set()

    found = on_ranks(2, work, timeout=0.3)
    assert "timed out after 0.3 s waiting for rank 1" in str(found[0])


def test_a_stale_word_is_not_read() -> None:
    """A reader that sees only some of the words of an exchange goes on waiting."""
    file = make_memory(words_of(2))
    ranks = [
        SharedExchange(SharedWords(file, words_of(2)), rank, 2, 0.1, _nobody) for rank in (0, 1)
    ]
    ranks[0].send(b"12345678")
    place = ranks[0]._ring[FIRST % RING]
    whole = int(place[2])
    place[2] = 0x3535_3535  # an exchange of number 0
    threading.Timer(0.05, lambda: place.__setitem__(2, whole)).start()
    assert ranks[1].receive() == b"12345678"


def _nobody() -> None:
    return None


def process_rank(rank: int, ranks: int, path: str, pipe: Any) -> None:
    local_links.can_share = lambda ranks: True
    links = LocalLinks(rank, ranks, FileStore(path, ranks), LIMIT)
    found = [
        (links.broadcast(message(turn) if rank == 0 else None) == message(turn))
        and links.gather_numbers(np.array([turn, rank]))[:, 1].tolist() == list(range(ranks))
        for turn in range(ROUNDS)
    ]
    pipe.send_bytes(repr((all(found), links._shared is not None)).encode())
    links.close()


def test_processes_share_the_memory(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(3)]
    processes = [
        spawn.Process(target=process_rank, args=(rank, 3, str(tmp_path / "store"), theirs))
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    try:
        for ours, _ in pipes:
            assert ours.poll(LIMIT), "a rank did not answer"
            assert ours.recv_bytes() == b"(True, True)"
    finally:
        for process in processes:
            process.join(20)
            process.kill()


def test_ranks_that_outnumber_the_cores_use_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would keep each other from running."""
    for cores, shares in ((2, False), (3, True)):
        monkeypatch.setattr(shared_words, "usable_cores", lambda cores=cores: cores)
        assert can_share(2) is shares


def test_a_machine_whose_system_calls_are_unknown_uses_sockets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_links, "can_share", lambda ranks: False)
    store = HashStore()

    def one(rank: int) -> Any:
        links = LocalLinks(rank, 2, store, LIMIT)
        assert links._shared is None
        try:
            return links.broadcast(b"hi" if rank == 0 else None), links.gather_numbers(
                np.array([rank, 5])
            ).tolist()
        finally:
            links.close()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(one, range(2))) == [(b"hi", [[0, 5], [1, 5]])] * 2


def test_sockets_leave_no_files_behind() -> None:
    """The listening address disappears once every rank is connected, and memory has no name."""
    with socket.socket(socket.AF_UNIX) as probe, pytest.raises(OSError):
        store = HashStore()
        with ThreadPoolExecutor(2) as pool:
            links = list(pool.map(lambda rank: LocalLinks(rank, 2, store, LIMIT), range(2)))
        for one in links:
            one.close()
        probe.connect(store.get(local_links.KEY).decode())
