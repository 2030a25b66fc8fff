"""Rendezvous of the ranks: the key-value store with which process groups are built."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable, MutableMapping
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

from torch.distributed import FileStore, PrefixStore, Store, TCPStore

from glowplug.core.errors import CollectiveError

SOCKET_INTERFACE = "NCCL_SOCKET_IFNAME"  #: NCCL's variable for the network interfaces to use
SIOCGIFADDR = 0x8915  #: Linux's request for the address of a network interface
POLL_SECONDS = 0.02  #: interval between checks for missing ranks


def open_store(address: str, rank: int, ranks: int, timeout: float) -> Store:
    """Open the rendezvous store at ``address``, over which ranks find each other.

    Args:
        address: "file://PATH", "tcp://HOST:PORT" (rank 0 listens), or "env://" (torchrun's
            environment variables). "tcp://HOST:PORT/PREFIX?held" is a store that another process
            runs, with PREFIX before all keys.
        rank: This rank.
        ranks: Number of ranks.
        timeout: Seconds to wait.

    Raises:
        CollectiveError: The store could not be opened in time, or the address is invalid.
    """
    place = urlsplit(address)
    try:
        if place.scheme == "file":
            return FileStore(address.removeprefix("file://"), ranks)
        if place.scheme == "tcp" and place.hostname and place.port:
            listens = rank == 0 and place.query != "held"
            store = TCPStore(
                place.hostname,
                place.port,
                ranks,
                listens,
                timedelta(seconds=timeout),
                wait_for_workers=False,
            )
            return PrefixStore(f"ranks {place.path[1:]}", store) if place.path else store
        if place.scheme == "env":
            return _environment_store(rank, ranks, timeout)
    except (RuntimeError, OSError, KeyError) as error:
        raise CollectiveError(
            f"rank {rank} of {ranks} could not reach the rendezvous {address}: {error}"
        ) from error
    raise CollectiveError(
        f"rank {rank} of {ranks} has no rendezvous: {address!r} is none of file://PATH, "
        "tcp://HOST:PORT, env://"
    )


def _environment_store(rank: int, ranks: int, timeout: float) -> Store:
    """Open the rendezvous store at MASTER_ADDR and MASTER_PORT, torchrun's variables.

    The torchrun agent may already run the store, and reuse it after a restart.
    """
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        ranks,
        rank == 0 and not hosted,
        timedelta(seconds=timeout),
        wait_for_workers=False,
    )
    return PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def await_ranks(
    store: Store,
    rank: int,
    ranks: int,
    timeout: float,
    what: str,
    ended: Callable[[], int | None] = lambda: None,
) -> None:
    """Wait until every rank has called this function with the same ``what``, such as "start".

    Args:
        store: The rendezvous store.
        rank: This rank.
        ranks: Number of ranks.
        timeout: Seconds to wait; infinity: no limit.
        what: Name of the wait, used once.
        ended: Returns a rank that has ended, or None.

    Raises:
        CollectiveError: Some ranks have not done so within ``timeout`` seconds, one of them has
            ended, or the store is lost.
    """
    deadline = time.monotonic() + timeout
    missing = list(range(ranks))
    try:
        store.set(f"{what} {rank}", "done")
        while missing := [other for other in missing if not store.check([f"{what} {other}"])]:
            if (gone := ended()) in missing:
                raise CollectiveError(
                    f"rank {rank} of {ranks} waited for rank {gone} to {what}, which has ended"
                )
            if time.monotonic() > deadline:
                raise CollectiveError(
                    f"rank {rank} of {ranks} waited {timeout:g} s for ranks {missing} to {what}"
                )
            time.sleep(POLL_SECONDS)
    except RuntimeError as error:
        raise CollectiveError(f"rank {rank} of {ranks} lost the rendezvous: {error}") from error


def own_address(address: str) -> str:
    """Return this host's address on the network route to the rendezvous store at ``address``.

    Return the loopback address if the store is a file, because all ranks are then on one host.
    """
    place = urlsplit(address)
    host = os.environ.get("MASTER_ADDR") if place.scheme == "env" else place.hostname
    if place.scheme == "file" or not host:
        return "127.0.0.1"
    family, kind, _, _, target = socket.getaddrinfo(host, place.port or 1, type=socket.SOCK_DGRAM)[
        0
    ]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # NOTE: sends nothing, but lets the kernel choose the route
        return str(probe.getsockname()[0])


def bind_nccl(
    interface: str | None, rendezvous: str, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Make NCCL reach the other hosts over the network interface that gloo uses.

    NCCL has only an environment variable for this. Without it, NCCL takes the first interface that
    is not a loopback, which may not lead to the other hosts. A value of the user takes precedence.

    Args:
        interface: Name of the interface; None: the one on the route to the rendezvous store.
        rendezvous: Address of the store.
        environment: The variables of this process.
    """
    name = interface or interface_of(own_address(rendezvous))
    if name is not None:
        environment.setdefault(SOCKET_INTERFACE, f"={name}")


def interface_of(address: str) -> str | None:
    """Return the name of this host's network interface with the IP ``address``; None: unknown."""
    for _, name in socket.if_nameindex():
        if address in _addresses(name):
            return name
    return None


def _addresses(interface: str) -> list[str]:
    """Return the main IPv4 address and the IPv6 addresses of a network interface."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(probe, SIOCGIFADDR, request)
            found.append(socket.inet_ntoa(answer[20:24]))
        except OSError:
            pass  # it has no IPv4 address
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return found
    fields = [line.split() for line in lines]
    return found + [
        socket.inet_ntop(socket.AF_INET6, bytes.fromhex(one[0]))
        for one in fields
        if one[-1] == interface
    ]
