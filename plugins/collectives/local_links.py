"""Exchange of host data between the ranks of one host.

Small data go through shared memory. Unix sockets between rank 0 and the other ranks carry larger
data, and show at once when a rank ends.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
from numpy.typing import NDArray
from torch.distributed import Store

from glowplug.core.errors import CollectiveError
from glowplug.plugins.collectives.shared_exchange import (
    VALUES_MAX,
    MissingPeer,
    SharedExchange,
    words_of,
)
from glowplug.plugins.collectives.shared_words import SharedWords, can_share, make_memory

HEAD = struct.Struct("<q")  #: a rank's number or a frame's length
KEY = "address of rank 0"


class LocalLinks:
    """Connections of a rank of one host: to rank 0, or from rank 0 to all other ranks.

    Args:
        rank: This rank.
        ranks: Number of ranks.
        store: The rendezvous store, in which rank 0 gives its address.
        timeout: Seconds to wait for another rank.

    Raises:
        CollectiveError: A rank has ended or does not answer in time; the methods raise it too.
    """

    def __init__(self, rank: int, ranks: int, store: Store, timeout: float) -> None:
        self._rank = rank
        self._ranks = ranks
        self._timeout = timeout
        self._peers: dict[int, socket.socket] = {}
        self._by_file: dict[int, int] = {}  # file descriptor of a connection -> the peer's rank
        self._hangups = select.poll()
        self._shared: SharedExchange | None = None
        if rank == 0:
            self._listen(store)
        else:
            self._connect(store.get(KEY).decode())

    def _listen(self, store: Store) -> None:
        """Accept a connection from every other rank, and give it the shared memory."""
        files = [make_memory(words_of(self._ranks))] if can_share(self._ranks) else []
        with (
            tempfile.TemporaryDirectory(prefix="glowplug-") as folder,
            socket.socket(socket.AF_UNIX) as listener,
            self._errors("connecting"),
        ):
            path = os.path.join(folder, "ranks")
            listener.bind(path)
            listener.listen(self._ranks)
            listener.settimeout(self._timeout)
            store.set(KEY, path)
            for _ in range(1, self._ranks):
                peer, _ = listener.accept()
                peer.settimeout(self._timeout)
                self._peers[HEAD.unpack(self._read(peer, HEAD.size))[0]] = peer
                socket.send_fds(peer, [HEAD.pack(0)], files)
        self._share(files)

    def _connect(self, path: str) -> None:
        peer = socket.socket(socket.AF_UNIX)
        peer.settimeout(self._timeout)
        self._peers[0] = peer
        with self._errors("connecting", 0):
            peer.connect(path)
            peer.sendall(HEAD.pack(self._rank))
            _, files, _, _ = socket.recv_fds(peer, HEAD.size, 1)
        self._share(files)

    def _share(self, files: list[int]) -> None:
        """Map the memory ``files``, one file descriptor or none, and close the descriptor."""
        for rank, peer in self._peers.items():
            self._hangups.register(peer, select.POLLRDHUP)
            self._by_file[peer.fileno()] = rank
        for file in files:
            words = SharedWords(file, words_of(self._ranks))
            self._shared = SharedExchange(words, self._rank, self._ranks, self._timeout, self.ended)
            os.close(file)

    def ended(self) -> int | None:
        """Return a rank that has closed its connection; None if all are there."""
        return next((self._by_file[file] for file, _ in self._hangups.poll(0)), None)

    def broadcast(self, data: bytes | None, operation: str = "broadcast_bytes") -> bytes:
        """Send rank 0's ``data`` to all ranks, and return it on each of them.

        Args:
            data: The bytes to send, on rank 0; None on all other ranks.
            operation: Name of the operation in error messages.
        """
        if self._rank:
            found = None
            if self._shared is not None:
                with self._errors(operation):
                    found = self._shared.receive()
            return self._receive(0, operation) if found is None else found
        assert data is not None, "rank 0 must pass the bytes"
        if self._shared is not None:
            with self._errors(operation):
                if self._shared.send(data):
                    return data
        self._send_all(data, operation)
        return data

    def _send_all(self, data: bytes, operation: str) -> None:
        """Send rank 0's ``data`` to all other ranks, over their connections."""
        for rank in range(1, self._ranks):
            self._send(rank, data, operation)

    def gather(self, data: bytes, operation: str = "all_gather_bytes") -> list[bytes]:
        """Return the ``data`` of every rank, in order of ranks.

        ``operation``: name of the operation in error messages.
        """
        if self._rank == 0:
            every = [data]
            every += [self._receive(rank, operation) for rank in range(1, self._ranks)]
            sizes = struct.pack(f"<{self._ranks}q", *map(len, every))
            self._send_all(sizes + b"".join(every), operation)
            return every
        self._send(0, data, operation)
        joined = self._receive(0, operation)
        lengths = struct.unpack_from(f"<{self._ranks}q", joined)
        ends = np.cumsum([HEAD.size * self._ranks, *lengths]).tolist()
        return [joined[start:end] for start, end in zip(ends, ends[1:])]

    def gather_numbers(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the ``values``, int64 [N], of every rank as one array, int64 [ranks, N]."""
        if self._shared is not None and 0 < len(values) <= VALUES_MAX:
            with self._errors("all_gather_numbers"):
                return self._shared.gather(values)
        every = b"".join(self.gather(values.tobytes(), "all_gather_numbers"))
        return np.frombuffer(every, np.int64).reshape(self._ranks, len(values))

    def close(self) -> None:
        """Close the connections; ranks that still wait for this one get an error. Idempotent."""
        for peer in self._peers.values():
            with suppress(OSError):  # the peer may have closed it
                peer.shutdown(socket.SHUT_RDWR)
            peer.close()

    def _send(self, rank: int, data: bytes, operation: str) -> None:
        with self._errors(operation, rank):
            self._peers[rank].sendall(HEAD.pack(len(data)) + data)

    def _receive(self, rank: int, operation: str) -> bytes:
        with self._errors(operation, rank):
            peer = self._peers[rank]
            return self._read(peer, HEAD.unpack(self._read(peer, HEAD.size))[0])

    @staticmethod
    def _read(peer: socket.socket, size: int) -> bytes:
        """Return the next ``size`` bytes from ``peer``.

        Raises:
            ConnectionError: the peer has closed the connection.
        """
        data = peer.recv(size, socket.MSG_WAITALL) if size else b""
        while len(data) < size:
            more = peer.recv(size - len(data), socket.MSG_WAITALL)
            if not more:
                raise ConnectionError("the connection was closed")
            data += more
        return data

    @contextmanager
    def _errors(self, operation: str, rank: int | None = None) -> Iterator[None]:
        """Turn errors of connections and shared memory into a CollectiveError.

        The error names ``operation`` and, if known, the other ``rank``.
        """
        try:
            yield
        except MissingPeer as error:
            how = " has ended (the connection was closed)" if error.ended else None
            raise self._error(operation, f"rank {error.rank}", how) from None
        except OSError as error:
            other = "another rank" if rank is None else f"rank {rank}"
            how = None if isinstance(error, TimeoutError) else f" has ended ({error})"
            raise self._error(operation, other, how) from error

    def _error(self, operation: str, other: str, how: str | None) -> CollectiveError:
        """Return the error of ``operation``. ``how``: how ``other`` ended; None: it is silent."""
        reason = (
            f"timed out after {self._timeout:g} s waiting for {other}"
            if how is None
            else other + how
        )
        return CollectiveError(
            f"{operation} failed on rank {self._rank} of {self._ranks}: {reason}"
        )
