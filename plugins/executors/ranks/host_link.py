"""Messages between hosts through the rendezvous store: identities, heartbeats and failures.

A host is represented by the process that supervises its ranks; under torchrun each process counts
as a host (``Site`` in ``host.py``). The store is torch.distributed's. After the hosts have met,
separate threads call the store, because a call never returns when the link to the store is broken.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing import Pipe
from queue import Empty, SimpleQueue

import msgspec
from torch.distributed import PrefixStore, Store, TCPStore

from glowplug.core.errors import EngineDead
from glowplug.plugins.executors.ranks.failure_cause import (
    BEAT,
    QUIET,
    FailureKind,
    Trouble,
    silence,
)
from glowplug.plugins.executors.ranks.host import Site

POLL = 0.05  #: seconds between checks for hosts that have not arrived
FOREVER = timedelta(days=365)  #: timeout of a wait that has no limit


class Beat(msgspec.Struct, array_like=True):
    """Heartbeat that each host writes to the store every BEAT seconds.

    Attributes:
        count: number of the heartbeat; a new number shows that the host is alive.
        ranks: rank -> (phase, seconds since its last message), for the host's own ranks.
        trouble: the failure for which the host ends; None if it has not failed.
        leaving: the engine stops in an orderly way.
    """

    count: int = 0
    ranks: dict[int, tuple[str, float]] = {}
    trouble: Trouble | None = None
    leaving: bool = False


class HostLink:
    """Connection of this host to the other hosts, through the rendezvous store.

    Call ``open`` and ``meet`` first, then ``start``: its threads exchange heartbeats and frames
    until ``close``.

    Args:
        site: this host.
        limit: seconds of silence after which another host counts as gone.
        states: returns (phase, seconds since its last message) of each of this host's ranks.

    Attributes:
        wake: pipe that is readable when a frame of another host has arrived.
        frames: frames of other hosts' ranks for the front end; used on host 0.
    """

    def __init__(
        self, site: Site, limit: float, states: Callable[[], dict[int, tuple[str, float]]]
    ) -> None:
        self.site = site
        self.limit = limit
        self._states = states
        self.wake, self._waker = Pipe(duplex=False)
        self.frames: SimpleQueue[bytes] = SimpleQueue()
        self._held: list[Store] = []
        self._own_beat = Beat()
        self._beats: dict[int, Beat] = {}
        self._last_beats: dict[int, float] = {}
        self._last_store_reply = time.monotonic()  # time of the store's last reply
        self._broken = ""
        self._closed = threading.Event()
        self._urgent = threading.Event()
        self._reported = threading.Event()
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()

    # ---- meeting ---------------------------------------------------------------------------------

    def open(self, timeout: float) -> Site:
        """Connect to the store; host 0 starts it first, unless torchrun's agent runs it.

        Args:
            timeout: seconds to wait for the store.

        Returns:
            The description of this host, with the store's actual port.

        Raises:
            EngineDead: the store cannot be reached.
        """
        self._store, store = self._connect(timeout, self.site.serves)
        self._held.append(store)
        self.site = replace(self.site, port=store.port)
        return self.site

    def _connect(self, timeout: float, serves: bool) -> tuple[Store, TCPStore]:
        site = self.site
        try:
            found = (
                hold_store(site.host, site.port, timeout)
                if serves
                else TCPStore(
                    site.host,
                    site.port,
                    None,
                    False,
                    timedelta(seconds=timeout),
                    wait_for_workers=False,
                )
            )
        except (RuntimeError, OSError) as error:
            raise EngineDead(
                f"{site.name(site.index)} could not reach {site.name(0)} at {site.host}:"
                f"{site.port} within {timeout:.0f} s: {_line(error)}"
            ) from error
        return PrefixStore(f"sites {site.prefix}", found), found

    def meet(self, identity: bytes, timeout: float) -> list[bytes]:
        """Exchange identities with all hosts: the facts that must be equal on every host.

        Args:
            identity: the identity of this host, from ``host_identity.identity``.
            timeout: seconds to wait for the other hosts.

        Returns:
            The identity of every host, in order of their numbers.

        Raises:
            EngineDead: some hosts have not arrived in time (the message names them), or the store
                has gone.
        """
        me = self.site.index
        sites = range(self.site.count)
        deadline = time.monotonic() + timeout
        beat = msgspec.msgpack.encode(self._own_beat)
        try:
            self._store.set(f"beat {me}", beat)  # type: ignore[arg-type]
            self._store.set(f"identity {me}", identity)  # type: ignore[arg-type]
            self._await_identities(deadline, timeout)
            found = [bytes(self._store.get(f"identity {one}")) for one in sites]
            self._leave_together(deadline)
        except RuntimeError as error:
            raise EngineDead(
                f"{self.site.name(0)} has gone while the hosts met: {_line(error)}"
            ) from error
        now = time.monotonic()
        self._last_beats = {one: now for one in sites if one != me}
        return found

    def _await_identities(self, deadline: float, timeout: float) -> None:
        """Wait until the store has all hosts' identities; the error message gives ``timeout``."""
        missing = list(range(self.site.count))
        while missing := [one for one in missing if not self._store.check([f"identity {one}"])]:
            if time.monotonic() > deadline or self._closed.is_set():
                names = ", ".join(map(self.site.name, missing))
                place = f"{self.site.host}:{self.site.port}"
                raise EngineDead(f"{names} did not connect to {place} within {timeout:.0f} s")
            time.sleep(POLL)

    def _leave_together(self, deadline: float) -> None:
        """Make host 0, which may run the store, wait until every host has read the identities."""
        read = self._store.add("read", 1)
        while self.site.index == 0 and read < self.site.count and time.monotonic() < deadline:
            time.sleep(POLL)
            read = self._store.add("read", 0)

    def start(self) -> None:
        self._last_store_reply = time.monotonic()
        self._thread("glowplug-hosts", self._beat_forever)
        if self.site.index:
            self._thread("glowplug-outputs", self._send_forever)
        else:
            for other in self._last_beats:
                self._thread(f"glowplug-outputs-{other}", partial(self._receive_forever, other))

    def _thread(self, name: str, run: Callable[[], None]) -> None:
        threading.Thread(target=run, daemon=True, name=name).start()

    # ---- heartbeats ------------------------------------------------------------------------------

    def _beat_forever(self) -> None:
        me = self.site.index
        others = sorted(self._last_beats)
        try:
            while not self._closed.is_set():
                urgent = self._urgent.is_set()
                self._urgent.clear()
                self._own_beat.count += 1
                self._own_beat.ranks = self._states()
                self._store.set(
                    f"beat {me}",
                    msgspec.msgpack.encode(self._own_beat),  # type: ignore[arg-type]
                )
                if urgent:
                    self._reported.set()
                self._read(others)
                self._last_store_reply = time.monotonic()
                self._urgent.wait(BEAT)
        except RuntimeError as error:
            self._broken = _line(error)

    def _read(self, others: list[int]) -> None:
        values = self._store.multi_get([f"beat {other}" for other in others]) if others else []
        now = time.monotonic()
        for other, value in zip(others, values, strict=True):
            beat = msgspec.msgpack.decode(bytes(value), type=Beat)
            if beat.count != self._beats.get(other, Beat()).count:
                self._last_beats[other] = now
            self._beats[other] = beat

    def phases(self) -> dict[int, str]:
        """Return the last reported phase of each rank of the other hosts."""
        return {
            rank: phase
            for beat in list(self._beats.values())
            for rank, (phase, _) in beat.ranks.items()
        }

    def leaving(self) -> bool:
        """Return True if host 0 has reported that the engine stops."""
        return self._beats.get(0, Beat()).leaving

    def look(self, limit: float | None = None) -> list[Trouble]:
        """Return the failures that other hosts have reported, and one for each silent host.

        If the store cannot be reached, the last failure is that of host 0.

        Args:
            limit: seconds without a heartbeat that count as silence; None: ``self.limit``.
        """
        now = time.monotonic()
        limit = self.limit if limit is None else limit
        name = self.site.name
        found = [beat.trouble for beat in list(self._beats.values()) if beat.trouble is not None]
        if self.site.index and (self._broken or now - self._last_store_reply > limit):
            state = (
                f"has gone: {self._broken}"
                if self._broken
                else _silent_for(now - self._last_store_reply)
            )
            kind = FailureKind.ENDED if self._broken else FailureKind.SILENT
            return [*found, Trouble(kind, f"{name(0)} {state}{self._phase_of(0)}")]
        for other, last in self._last_beats.items():
            if now - last > limit:
                found.append(
                    Trouble(
                        FailureKind.SILENT,
                        f"{name(other)} {_silent_for(now - last)}{self._phase_of(other)}",
                    )
                )
        return found

    def look_at_ranks(self, limit: float) -> list[Trouble]:
        """Return the failures that ``look`` finds, and one for each silent rank of another host.

        Args:
            limit: seconds without a message after which a host or rank counts as silent.
        """
        found = self.look(limit)
        for other, beat in list(self._beats.items()):
            found += [
                named(silence(rank, phase, seconds), self.site.name(other))
                for rank, (phase, seconds) in beat.ranks.items()
                if seconds > limit
            ]
        return found

    def _phase_of(self, other: int) -> str:
        phases = sorted({phase for phase, _ in self._beats.get(other, Beat()).ranks.values()})
        return f" (phase {', '.join(phases)})" if phases else ""

    def report(self, trouble: Trouble | None, wait: float) -> None:
        """Report to the other hosts why this one ends, and wait until the store has the report.

        Args:
            trouble: the reason; None: the engine stops in an orderly way.
            wait: seconds to wait at most.
        """
        if trouble is None:
            self._own_beat.leaving = True
        else:
            self._own_beat.trouble = named(trouble, self.site.name(self.site.index))
        self._urgent.set()
        # NOTE: without an answering store the report cannot arrive.
        if not self._broken and time.monotonic() - self._last_store_reply < QUIET:
            self._reported.wait(wait)

    def close(self) -> None:
        self._closed.set()
        self._urgent.set()
        self._outgoing.put(None)
        with contextlib.suppress(OSError):
            self._waker.close()

    # ---- outputs of leaders on other hosts -------------------------------------------------------

    def forward(self, frame: bytes) -> None:
        """Send a frame to the front end on host 0, in order. May be called from any thread."""
        self._outgoing.put(frame)

    def _send_forever(self) -> None:
        # NOTE: the heartbeat thread reports the same broken store.
        with contextlib.suppress(RuntimeError, EngineDead):
            store, held = self._connect(self.limit, False)
            self._held.append(held)
            while (frame := self._outgoing.get()) is not None:
                store.queue_push(f"outputs {self.site.index}", frame)

    def _receive_forever(self, other: int) -> None:
        with contextlib.suppress(RuntimeError, OSError, EngineDead):
            store, held = self._connect(self.limit, False)
            self._held.append(held)
            held.set_timeout(FOREVER)
            store.set_timeout(FOREVER)
            while not self._closed.is_set():
                self.frames.put(bytes(store.queue_pop(f"outputs {other}")))
                self._waker.send_bytes(b"1")

    def take(self) -> list[bytes]:
        """Return the frames that have arrived from other hosts since the last call."""
        found = []
        with contextlib.suppress(Empty, EOFError, OSError):
            while self.wake.poll():
                self.wake.recv_bytes()
            while True:
                found.append(self.frames.get_nowait())
        return found


def named(trouble: Trouble, site: str) -> Trouble:
    """Return ``trouble`` with ``site``, the name of the host, put before its text."""
    return Trouble(trouble.kind, f"{site}: {trouble.text}", trouble.traceback)


def _silent_for(seconds: float) -> str:
    return f"has been silent for {seconds:.0f} s"


def _line(error: BaseException) -> str:
    """Return the first line of torch's error message, without the C++ stack after it."""
    return str(error).partition("\n")[0].partition(" Exception raised from")[0]


def hold_store(host: str, port: int, timeout: float) -> TCPStore:
    """Start the rendezvous store in this process.

    Args:
        host: address to listen on.
        port: port; 0: a free one.
        timeout: seconds that its operations may take.

    Raises:
        EngineDead: the port is taken.
    """
    listener = _listener(host, port)
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        None,
        True,
        timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _listener(host: str, port: int) -> socket.socket:
    """Return a listening socket on the given address, and only on that address if possible.

    Raises:
        EngineDead: the port is taken.
    """
    # NOTE: behind address translation the public address cannot be bound; then the store listens
    # on all addresses.
    for place in (host, ""):
        family = socket.AF_INET6 if ":" in place else socket.AF_INET
        try:
            return socket.create_server((place, port), family=family, backlog=2048)
        except OSError as error:
            failed = error
            if error.errno != errno.EADDRNOTAVAIL:
                break
    raise EngineDead(
        f"cannot listen on {host}:{port} for other hosts: {failed.strerror or failed}"
    ) from failed
